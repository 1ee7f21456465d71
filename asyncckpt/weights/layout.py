"""The layout of weights: a slot is a safetensors file (see ``planning/safetensors_plan.py``).

What the format has no dtype for stands there as bytes, with one dimension more, and its dtype in the metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from asyncckpt.format.index import Index
from asyncckpt.format.segment_layout import DataFile
from asyncckpt.planning import safetensors_plan
from asyncckpt.planning.safetensors_plan import DTYPES, METADATA, PREFIX_BYTES
from asyncckpt.weights.parts import Ranges, ranges

# The offsets and the whole shapes of parts of sharded tensors stand under this name in the format's metadata.
_PARTS = "asyncckpt.parts"
# Under this one the dtypes of torch that the format lacks.
_DTYPES = "asyncckpt.dtypes"
_KNOWN = frozenset(DTYPES.values())
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The data of a slot begins there: readers may map it, and pin it, as a whole.
_ALIGNMENT = 64


class TensorEntry(NamedTuple):
    """A tensor in a slot, or the part of a sharded one: ``shape`` elements from ``offsets`` on of a whole that has the
    shape ``whole`` (None: the parts together have it). Its bytes are at ``begin`` of the slot.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...] | None
    begin: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def ranges(self) -> Ranges:
        """What of the whole it is."""
        return ranges(self.offsets, self.shape)

    @property
    def is_known(self) -> bool:
        """Whether the format has its dtype."""
        return self.dtype in _KNOWN


def copied_as(dtype: torch.dtype) -> torch.dtype:
    """What tensors of ``dtype`` are copied as, by ``Tensor.view``: torch has no copies of all that it can view."""
    return dtype if dtype in _KNOWN or dtype.is_complex else _INTEGERS[dtype.itemsize]


def lay_out(entries: Sequence[TensorEntry]) -> tuple[bytes, list[TensorEntry]]:
    """Place tensors one after the other. Returns the header that says so, and the entries with their places.

    Raises ``UnsavableStateError`` where the format has no such name.
    """
    parts = {entry.name: [entry.offsets, entry.whole] for entry in entries if entry.shape != entry.whole}
    dtypes = {entry.name: str(entry.dtype).removeprefix("torch.") for entry in entries if not entry.is_known}
    metadata = {name: json.dumps(fact) for name, fact in ((_PARTS, parts), (_DTYPES, dtypes)) if fact}
    forms = {
        entry.name: (entry.dtype, entry.shape)
        if entry.is_known
        else (torch.uint8, (*entry.shape, entry.dtype.itemsize))
        for entry in entries
    }
    header, begins = safetensors_plan.lay_out(forms, metadata or None, _ALIGNMENT)
    return header, [entry._replace(begin=begins[entry.name]) for entry in entries]


def header_of(image: memoryview) -> bytes:
    """The header of a slot of weights, which says what tensors there are."""
    return bytes(image[: PREFIX_BYTES + int.from_bytes(image[:PREFIX_BYTES], "little")])


def read_entries(image: memoryview) -> dict[str, TensorEntry]:
    """The tensors of a slot of weights by name, from its header."""
    data = PREFIX_BYTES + int.from_bytes(image[:PREFIX_BYTES], "little")
    fields = json.loads(bytes(image[PREFIX_BYTES:data]))
    metadata = fields.pop(METADATA, {})
    parts, dtypes = (json.loads(metadata.get(fact, "{}")) for fact in (_PARTS, _DTYPES))
    entries = {}
    for name, field in fields.items():
        dtype, shape = DTYPES[field["dtype"]], tuple(field["shape"])
        if name in dtypes:
            dtype, shape = getattr(torch, dtypes[name]), shape[:-1]
        offsets, whole = parts.get(name, ([0] * len(shape), shape))
        begin = data + field["data_offsets"][0]
        entries[name] = TensorEntry(name, dtype, shape, tuple(offsets), tuple(whole), begin)
    return entries


def read_indexes(segment: memoryview, files: Iterable[DataFile]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint's files by the names that DCP has for them, from the heads of the files' indexes."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        above = f"{file.folder}/" if file.folder else ""  # indexes name tensors by their place in the whole set
        head = segment[file.index_head.offset :][: file.index_head.nbytes]
        for item in Index.items_in(bytes(head)):
            if item.kind == "tensor":
                dtype, begin = getattr(torch, item.dtype), file.begin + item.payload_at
                shape, offsets = tuple(item.shape), tuple(item.offsets)
                name = item.name.removeprefix(above)
                entries[name] = TensorEntry(name, dtype, shape, offsets, None, begin)
    return entries
