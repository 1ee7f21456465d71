"""verl: each sync of weights is published in shared memory, and rollouts map it from there.

To import this package registers ``engine.SharedMemoryCheckpointEngine`` with verl, if verl is there.
"""

from importlib.util import find_spec

if find_spec("verl") is not None:
    from asyncckpt.integrations.verl.engine import SharedMemoryCheckpointEngine as SharedMemoryCheckpointEngine
