"""Save torchtitan's checkpoints asynchronously: one line to switch.

    --module asyncckpt.integrations.torchtitan --config llama3.llama3_8b    # was: --module llama3 --config llama3_8b

or, in a configuration function of one's own: ``checkpoint=AsyncckptManager.Config(...)``.

The folders and files are the same as for torchtitan's own ``CheckpointManager``: ``step-100`` is a checkpoint of DCP.
Each of the two resumes from the other's checkpoints. torchtitan's own code, which ``manager.py`` inherits, still
chooses steps and states, and does the initial load.
"""

from asyncckpt.integrations.torchtitan.config_registry import switch as switch
from asyncckpt.integrations.torchtitan.manager import AsyncckptManager as AsyncckptManager
