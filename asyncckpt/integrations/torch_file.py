"""Save as ``torch.save`` does, but asynchronously: one line to switch.

    from asyncckpt import torch_save
    save = torch_save(obj, path)        # was: torch.save(obj, path); returns when the tensors are copied

Stock ``torch.load`` reads the file, also with ``mmap``. The file differs from a file of ``torch.save`` only in the
order of its records. One engine of this process serves all calls (see ``engine/shared.py``).
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

    If this process dies after the tensors are copied, the file is written all the same. An old file at that path stays
    unchanged until the new file replaces it. Each process saves for itself, even in a distributed job. The shared
    memory is kept and reused for later objects with storages of the same sizes.

    ``torch.save`` itself saves, and the caller waits, in these cases: a file-like object, a path that is no regular
    file, another ``pickle_module``, the older format, and ``torch.serialization.skip_data``.

    Args:
        obj: Anything that ``torch.save`` takes. Everything but the tensors is pickled during this call. The caller may
            change the tensors when this returns, or, with ``Config.overlap``, when they are staged.
        f: The file, or a file-like object.
        pickle_module, pickle_protocol: As for ``torch.save``, like the arguments with an underscore.
        config: Config of the engine for this process alone, if this is its first save; None: from the environment.

    Returns:
        The handle of the save. Its ``result`` waits until the file is complete and durable, or raises the error.

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
    """Save as ``torch_save`` does, with a given engine.

    Args:
        engine: A function that returns the engine.
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
    """Return whether ``path`` exists and a save cannot replace it, such as a pipe."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # if the error persists, the save raises it; ``torch.save`` would overwrite the file
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
