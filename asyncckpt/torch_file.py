"""``torch.save``, asynchronously: one line to switch.

    from asyncckpt import torch_save
    save = torch_save(obj, path)        # was: torch.save(obj, path); returns when the tensors are copied

The file is one that stock ``torch.load`` reads, by ``mmap`` too, and equal to what ``torch.save`` would have made but
for the order of the records in it. One engine of this process serves all calls (see ``engines.py``).
"""

from __future__ import annotations

import os
import pickle
from typing import IO, Any

import torch
from torch import serialization

from asyncckpt import engines
from asyncckpt.config import Config
from asyncckpt.handle import Save


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

    Returns when the tensors are copied to shared memory, so that the caller may change them (with ``Config.overlap``:
    earlier); all else of ``obj`` is pickled by then. The handle ends when the file is complete and durable; until then
    what had its name is there, whole, and at no instant is there half a file of that name. What was copied is written
    even if this process dies. Each process saves for itself, whatever ``torch.distributed`` knows of. The memory is
    kept for the next object whose storages have the same sizes. ``config``: if it is the first save of this process
    alone (None: as the environment says).

    Where that cannot be done this is ``torch.save`` itself, and the handle has ended when it returns: for a file-like
    object or something other than a regular file (a pipe, a device), another ``pickle_module``, the older format, and
    within ``torch.serialization.skip_data``.

    Raises ``UnsavableStateError`` for what does not pickle, ``StorageError`` where there is no such folder, and what
    ``Engine.save`` raises; the handle raises what goes wrong later.
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
        return _ended(f)
    return engines.shared.get(alone=True, config=config).save_file(f, obj, pickle_protocol=pickle_protocol)


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether something stands there that is written to, and cannot be replaced."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _ended(f: object) -> Save:
    """The handle of a save that is over."""
    path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    save = Save(os.fspath(path) if isinstance(path, (str, os.PathLike)) else repr(f), None)
    save._end(None, None)
    return save
