"""Save torchtitan's checkpoints asynchronously: one line to switch.

    --module asyncckpt.integrations.torchtitan --config llama3.llama3_8b    # was: --module llama3 --config llama3_8b

Or set ``checkpoint=AsyncckptManager.Config(...)`` in your own configuration function.

The folders and files are the same as for torchtitan's own ``CheckpointManager``: ``step-100`` is a checkpoint of DCP.
Each manager can resume from the other's checkpoints. ``manager.py`` inherits torchtitan's own code, which still chooses
steps and states, and does the initial load.
"""

from asyncckpt.integrations.torchtitan.config_registry import switch as switch
from asyncckpt.integrations.torchtitan.manager import AsyncckptManager as AsyncckptManager
