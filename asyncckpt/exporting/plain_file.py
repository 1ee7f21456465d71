"""Files that have no checksums of ours, read as those that have."""

from __future__ import annotations

import os
from collections.abc import Sequence

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.worker.manifest import Index, Item
from asyncckpt.worker.storage import storage_for
from asyncckpt.worker.storage.storage import InputFile


def plain_file(folder: str, name: str, places: Sequence[tuple[str, int, int]]) -> tuple[InputFile, Index]:
    """Open a file.

    Args:
        folder: Where it stands.
        name: Its name there.
        places: Of each value in it the name, the first byte, and how many there are.

    Returns:
        The file, to be closed, and what is said of it in the place of an index; it has no checksums.

    Raises:
        DamagedCheckpointError: It is missing, or ends before a value does.
        StorageError: It cannot be read.
    """
    path = os.path.join(folder, name)
    storage = storage_for(path)
    if (size := storage.size(path)) is None:
        raise DamagedCheckpointError("a file of this checkpoint is missing", path=path)
    for value, at, nbytes in places:
        if at < 0 or nbytes < 0 or at + nbytes > size:
            raise DamagedCheckpointError(
                f"the file is damaged: it has {size:,} bytes, and {value!r} stands from {at:,} to {at + nbytes:,}",
                path=path,
            )
    items = [Item(value, "", "", [], [], at, nbytes, at, nbytes) for value, at, nbytes in places]
    return storage.open(path), Index(name, size, items, ())
