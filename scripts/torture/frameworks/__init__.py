"""Trainings of frameworks that save through asyncckpt, killed at random moments and resumed by the framework itself.

Each kind of training has its own file: ``huggingface``, ``lightning``, ``torchtitan``, ``verl``, ``deepspeed``. Their
common interface is ``kind``. A ``run`` trains to the end, through any number of kills. Its ``ranks`` are processes
forked from one that has imported the framework. They write each step to a ``log``. ``checks`` reads checkpoints as the
framework does. ``trials`` is the entry point for the script.
"""
