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
    from asyncckpt.engine.loads import Loaded as Loaded
    from asyncckpt.errors import CheckpointError as CheckpointError
    from asyncckpt.errors import CheckpointExistsError as CheckpointExistsError
    from asyncckpt.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from asyncckpt.errors import ClosedError as ClosedError
    from asyncckpt.errors import DamagedCheckpointError as DamagedCheckpointError
    from asyncckpt.errors import FormatError as FormatError
    from asyncckpt.errors import JobTakenError as JobTakenError
    from asyncckpt.errors import MismatchError as MismatchError
    from asyncckpt.errors import NothingMeasuredError as NothingMeasuredError
    from asyncckpt.errors import OutOfMemoryError as OutOfMemoryError
    from asyncckpt.errors import RankFailedError as RankFailedError
    from asyncckpt.errors import SaveDroppedError as SaveDroppedError
    from asyncckpt.errors import SaveTimeoutError as SaveTimeoutError
    from asyncckpt.errors import StorageError as StorageError
    from asyncckpt.errors import StructureChangedError as StructureChangedError
    from asyncckpt.errors import UnsavableStateError as UnsavableStateError
    from asyncckpt.errors import UntrustedValueError as UntrustedValueError
    from asyncckpt.errors import VersionError as VersionError
    from asyncckpt.errors import WeightsTimeoutError as WeightsTimeoutError
    from asyncckpt.errors import WorkerDiedError as WorkerDiedError
    from asyncckpt.exporting.export import export as export
    from asyncckpt.integrations.dcp import async_save as async_save
    from asyncckpt.integrations.dcp import load as load
    from asyncckpt.integrations.dcp import save as save
    from asyncckpt.integrations.torch_file import torch_save as torch_save
    from asyncckpt.integrations.wrap import wrap_save as wrap_save
    from asyncckpt.party import join as join
    from asyncckpt.planning.file_set import FileSet as FileSet
    from asyncckpt.planning.per_rank import PerRank as PerRank
    from asyncckpt.planning.rng_state import RngState as RngState
    from asyncckpt.publication import Publication as Publication
    from asyncckpt.save_handle import Save as Save

    __version__: str

# The module of each public name.
_MODULES = {
    "CheckpointError": "errors",
    "Checkpointer": "checkpointer",
    "Config": "config",
    "FileSet": "planning.file_set",
    "Loaded": "engine.loads",
    "PerRank": "planning.per_rank",
    "Publication": "publication",
    "RngState": "planning.rng_state",
    "Save": "save_handle",
    "add_arguments": "config",
    "async_save": "integrations.dcp",
    "export": "exporting.export",
    "join": "party",
    "load": "integrations.dcp",
    "save": "integrations.dcp",
    "torch_save": "integrations.torch_file",
    "wrap_save": "integrations.wrap",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        from importlib import metadata  # here, because this import adds an eighth to the start time of a worker

        try:
            value = metadata.version(__name__)
        except metadata.PackageNotFoundError:
            value = "unknown: it is not installed"
    elif name in _MODULES or name.endswith("Error"):  # callers need the names to catch errors
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
