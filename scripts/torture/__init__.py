"""Everything that can happen to a job, at random and by the hundreds: ``python scripts/torture --help``.

``kills`` of trainers and workers, ``interruptions`` of the trainer by signals, ``forks``, ``system_calls`` that fail in
the worker, full ``disks``, ``power_cuts``, ``damages`` of checkpoints, trainings of ``frameworks`` that are killed and
resumed; then how fast ``restarts`` from memory are, and what is left behind (``leftovers``). What is counted, and what
must never be: ``tally``. Trainers are processes of their own: ``jobs``.
"""
