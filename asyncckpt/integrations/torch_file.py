"""``torch.save``, asynchronously: one line to switch.

    from asyncckpt import torch_save
    save = torch_save(obj, path)        # was: torch.save(obj, path); returns when the tensors are copied

The file is one that stock ``torch.load`` reads, by ``mmap`` too, and equal to what ``torch.save`` would have made but
for the order of the records in it. One engine of this process serves all calls (see ``engine/shared.py``).
"""

from __future__ import annotations

import os
import pickle
import stat
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

    Copied tensors are written even if this process dies. The old file of that name stays whole until then. Each process
    saves for itself, also in a job of ranks. The memory is kept for later objects with storages of the same sizes.

    ``torch.save`` itself saves, and the caller waits, in these cases: a file-like object, a path that is no regular
    file, another ``pickle_module``, the older format, and ``torch.serialization.skip_data``.

    Args:
        obj: Anything that ``torch.save`` takes. The caller may change its tensors when this returns (with
            ``Config.overlap`` when they are staged). Everything else is pickled by then.
        f: The file, or a file-like object.
        pickle_module, pickle_protocol: As for ``torch.save``, like the arguments with an underscore.
        config: Config of the engine, if this is the first save of this process alone; None: from the environment.

    Returns:
        A handle, which ends when the file is complete and durable, or raises the error of the save.

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
    """Save as ``torch_save`` does, by a given engine.

    Args:
        engine: Returns the engine.
        obj, f, pickle_module, pickle_protocol: As for ``torch_save``, like the arguments with an underscore.
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
    """Return whether ``path`` is something to write to that cannot be replaced, such as a pipe."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # if it stays, the save raises it; ``torch.save`` would write over a file that is there
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
