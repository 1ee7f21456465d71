"""Random faults of all kinds, by the hundreds: ``python scripts/torture --help``.

The faults are ``kills`` of trainers and workers, ``interruptions`` of the trainer by signals, ``forks``, failing
``system_calls`` of the worker, full ``disks``, ``power_cuts``, ``damages`` of checkpoints, and kills of trainings of
``frameworks``, which resume. ``restarts`` measures restarts from memory, and ``leftovers`` finds leftovers. ``tally``
has the counts and the losses, which must stay empty. Trainers run in processes of their own (``jobs``).
"""
