"""Types for the stored values of any source: tensors and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asyncckpt.loading.data_file import ChecksummedFile, fetch, read_pool
from asyncckpt.planning.boxes import StoredTensor
from asyncckpt.planning.structure import Keys
from asyncckpt.shm.memcpy import address_of


class StoredObject(NamedTuple):
    """The bytes from ``begin`` to ``end`` of ``file``, in the format of ``torch.load``."""

    file: str
    begin: int
    end: int


@dataclass
class StoredState:
    """A state dict in storage.

    ``keys`` lead to each value, by its name, in the order of the state dict. A key is a text, or a position in a list.
    The name is the keys joined by dots. ``files`` are open.
    """

    path: str
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    keys: dict[str, Keys]
    files: Mapping[str, ChecksummedFile]

    def pickles(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the checked bytes of the objects ``names``. Raises ``DamagedCheckpointError``, ``StorageError``."""
        places = {name: self.objects[name] for name in names}
        data = {name: memoryview(bytearray(place.end - place.begin)) for name, place in places.items()}
        parts = [(*place, address_of(data[name])) for name, place in places.items() if data[name]]
        with read_pool(self.path) as pool:
            fetch(self.files, parts, pool)
        return {name: bytes(view) for name, view in data.items()}
