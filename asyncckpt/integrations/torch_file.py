"""``torch.save``, asynchronously: one line to switch.

    from asyncckpt import torch_save
    save = torch_save(obj, path)        # was: torch.save(obj, path); returns when the tensors are copied

The file is one that stock ``torch.load`` reads, by ``mmap`` too, and equal to what ``torch.save`` would have made but
for the order of the records in it. One engine of this process serves all calls (see ``engine/shared.py``).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import IO, Any

import torch
from torch import serialization

from asyncckpt.config import Config
from asyncckpt.extension import Engine, Save, engines


def torch_save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    pickle_module: Any = pickle,
    pickle_protocol: int = serialization.DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    config: Config | None = None,
) -> Save:
    """Save ``obj`` to the file ``f``, as ``torch.save`` with the same arguments does, but in the background.

    What was copied is written even if this process dies, and until then the old file of that name stays, whole. Each
    process saves for itself, also in a job of ranks. The memory is kept for objects whose storages have the same sizes.

    What only ``torch.save`` itself can do, it does, and the caller waits: a file-like object, something other than a
    regular file, another ``pickle_module``, the older format, and ``torch.serialization.skip_data``.

    Args:
        obj: Anything that ``torch.save`` takes. The caller may change its tensors when this returns (with
            ``Config.overlap`` when they are staged); all else is pickled by then.
        f: The file, or a file-like object.
        pickle_module, pickle_protocol: As for ``torch.save``, like those with an underscore.
        config: For the engine, if this is the first save of this process alone; None: as the environment says.

    Returns:
        A handle, which ends when the file is complete and durable, and raises what goes wrong until then.

    Raises:
        CheckpointError: As ``Engine.save_file`` raises.
    """
    arguments = (obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)
    return save_by(lambda: engines.get(alone=True, config=config), *arguments)


def save_by(
    engine: Callable[[], Engine],
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    pickle_module: Any = pickle,
    pickle_protocol: int = serialization.DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
) -> Save:
    """As ``torch_save``.

    Args:
        engine: Gives the engine to save by.
        obj, f, pickle_module, pickle_protocol: As of ``torch_save``, like those with an underscore.
    """
    if not (
        isinstance(f, (str, os.PathLike))
        and pickle_module is pickle
        and _use_new_zipfile_serialization
        and not _disable_byteorder_record
        and not serialization._serialization_tls.skip_data
        and not _is_special(f)
    ):
        torch.save(obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)
        path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
        return Save.finished(path if isinstance(path, (str, os.PathLike)) else repr(f))
    return engine().save_file(f, obj, pickle_protocol=pickle_protocol)


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether there is something at ``path`` that is written to, and cannot be replaced."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
