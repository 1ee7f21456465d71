"""Trainings of frameworks that save through asyncckpt, killed at random moments and resumed by the framework itself.

Each kind of training has a file of its own: ``huggingface``, ``lightning``, ``torchtitan``, ``verl``, ``deepspeed``.
What they have in common is ``kind``. A ``run`` trains to the end, however often it is killed on the way; its ``ranks``
are processes that are forked from one that has imported the framework, and tell of each step in a ``log``. ``checks``
reads checkpoints as the framework does. ``trials`` is what the script calls.
"""
