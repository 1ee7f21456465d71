"""torchtitan's checkpoints, asynchronously: one line to switch.

    --module asyncckpt.integrations.torchtitan --config llama3.llama3_8b    # was: --module llama3 --config llama3_8b

or, in a configuration function of one's own: ``checkpoint=AsyncckptManager.Config(...)``.

The folders and files are those of torchtitan's own ``CheckpointManager``: ``step-100`` is a checkpoint of DCP, and each
resumes from what the other saved. What torchtitan does beside saving and loading (which steps, which states, the
initial load) is left to its own code, which ``manager.py`` inherits.
"""

from asyncckpt.integrations.torchtitan.config_registry import switch as switch
from asyncckpt.integrations.torchtitan.manager import AsyncckptManager as AsyncckptManager
