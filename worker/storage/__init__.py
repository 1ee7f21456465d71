"""Where checkpoints are kept: one seam (``storage.py``), and the kinds behind it."""

from __future__ import annotations

from asyncckpt.worker.storage.local import LocalStorage
from asyncckpt.worker.storage.storage import Storage


def storage_for(path: str, *, direct_io: bool = True) -> Storage:
    """The kind of storage that ``path`` is in; today there is one. ``direct_io``: write past the page cache."""
    return LocalStorage(direct_io)
