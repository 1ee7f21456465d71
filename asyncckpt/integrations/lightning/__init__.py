"""Save Lightning's checkpoints asynchronously: one line to switch.

    trainer = Trainer(plugins=[AsyncckptIO()])      # also of Fabric

Lightning treats a checkpoint as saved when ``save_checkpoint`` returns. Then it removes the previous checkpoint and
links to the new one. With this plugin, removals and links wait until the new checkpoint is durable. Stock
``ModelCheckpoint`` looks for files and makes links without asking the plugin. Importing this package makes
``ModelCheckpoint`` ask the plugin (see ``checkpoint_io.py``).
"""

from asyncckpt.integrations.lightning.checkpoint_io import AsyncckptIO as AsyncckptIO
from asyncckpt.integrations.lightning.checkpoint_io import ask_the_plugin
from asyncckpt.integrations.lightning.strategies import AsyncckptFabricFSDPStrategy as AsyncckptFabricFSDPStrategy
from asyncckpt.integrations.lightning.strategies import (
    AsyncckptFabricModelParallelStrategy as AsyncckptFabricModelParallelStrategy,
)
from asyncckpt.integrations.lightning.strategies import AsyncckptFSDPStrategy as AsyncckptFSDPStrategy
from asyncckpt.integrations.lightning.strategies import AsyncckptModelParallelStrategy as AsyncckptModelParallelStrategy

ask_the_plugin()
