"""Asynchronous checkpoints for PyTorch training, staged in CPU shared memory.

    ckpt = asyncckpt.Checkpointer("checkpoints")
    save = ckpt.save(step, state_dict)      # returns when the tensors are copied; a worker process writes them
    step = ckpt.load(state_dict)            # the newest, in place

The names are imported when they are first used, because the worker process imports this package too, and must not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncckpt.checkpointer import Checkpointer as Checkpointer
    from asyncckpt.config import Config as Config
    from asyncckpt.config import add_arguments as add_arguments
    from asyncckpt.dcp import async_save as async_save
    from asyncckpt.dcp import load as load
    from asyncckpt.dcp import save as save
    from asyncckpt.errors import CheckpointError as CheckpointError
    from asyncckpt.handle import Save as Save
    from asyncckpt.torch_file import torch_save as torch_save
    from asyncckpt.wrap import wrap_save as wrap_save

_HOMES = {
    "Checkpointer": "checkpointer",
    "Config": "config",
    "Save": "handle",
    "CheckpointError": "errors",
    "add_arguments": "config",
    "async_save": "dcp",
    "load": "dcp",
    "save": "dcp",
    "torch_save": "torch_file",
    "wrap_save": "wrap",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
