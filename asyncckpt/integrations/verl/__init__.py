"""Publish each weight sync of verl in shared memory, from which rollouts map the weights.

Importing this package registers ``engine.SharedMemoryCheckpointEngine`` with verl, if verl is installed.
"""

from importlib.util import find_spec

if find_spec("verl") is not None:
    from asyncckpt.integrations.verl.engine import SharedMemoryCheckpointEngine as SharedMemoryCheckpointEngine
