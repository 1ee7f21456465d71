"""The layout of weights: a slot is a safetensors file (see ``planning/safetensors_plan.py``).

If the format lacks a tensor's dtype, the tensor is stored as bytes, with one more dimension. The metadata has the
dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from asyncckpt.format.index import Index
from asyncckpt.format.segment_layout import DataFile
from asyncckpt.planning import safetensors_plan
from asyncckpt.planning.safetensors_plan import DTYPES, METADATA, PREFIX_BYTES

Ranges = tuple[range, ...]
"""A box of elements of a tensor: one range for each dimension."""


def ranges(offsets: Sequence[int], shape: Sequence[int]) -> Ranges:
    """Return the box of size ``shape`` that begins at ``offsets``."""
    return tuple(range(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))


def missing(whole: Sequence[int], parts: Iterable[Ranges]) -> Ranges | None:
    """Return a box of a tensor of shape ``whole`` that no part covers; None if the ``parts`` cover the whole tensor."""
    left = [] if 0 in whole else [tuple(map(range, whole))]
    for part in parts:
        left = [rest for each in left for rest in _without(each, part)]
    return left[0] if left else None


def common(parts: Iterable[Ranges]) -> Ranges | None:
    """Return a box that two of the ``parts`` share; None if no two parts overlap."""
    shared = (_shared(one, other) for one, other in combinations(parts, 2))
    return next((each for each in shared if all(map(len, each))), None)


def shown(part: Ranges) -> str:
    """Format a box for a message, like a Python slice."""
    return f"[{', '.join(f'{each.start}:{each.stop}' for each in part)}]"


def _shared(one: Ranges, other: Ranges) -> Ranges:
    return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def _without(one: Ranges, part: Ranges) -> Iterator[Ranges]:
    """Yield boxes that cover ``one`` except for ``part``."""
    inner = _shared(one, part)
    if not all(map(len, inner)):
        yield one
        return
    for at, (cut, each) in enumerate(zip(inner, one, strict=True)):
        for outer in (range(each.start, cut.start), range(cut.stop, each.stop)):
            if outer:
                yield (*inner[:at], outer, *one[at + 1 :])


# The metadata key for the offsets and whole shapes of parts of sharded tensors.
_PARTS = "asyncckpt.parts"
# The metadata key for the torch dtypes that the format lacks.
_DTYPES = "asyncckpt.dtypes"
_KNOWN = frozenset(DTYPES.values())
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers with so many bytes."""
# Alignment of the data in a slot, because readers may map and pin the slot as a whole.
_ALIGNMENT = 64


class TensorEntry(NamedTuple):
    """A tensor in a slot, or a part of a sharded tensor.

    The part has shape ``shape`` and begins at ``offsets`` of a tensor of shape ``whole``. If ``whole`` is None, the
    parts together define the shape. The bytes begin at offset ``begin`` of the slot.
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
        """The box of the whole tensor that this entry covers."""
        return ranges(self.offsets, self.shape)

    @property
    def is_known(self) -> bool:
        """Whether the format has this dtype."""
        return self.dtype in _KNOWN


def copied_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to view tensors as before a copy, because torch cannot copy every dtype that it can view."""
    return dtype if dtype in _KNOWN or dtype.is_complex else INTEGERS[dtype.itemsize]


def lay_out(entries: Sequence[TensorEntry]) -> tuple[bytes, list[TensorEntry]]:
    """Place tensors one after the other. Return the header of the file, and the entries with their places.

    Raises ``UnsavableStateError`` if the format does not allow a tensor's name.
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
    """Return the header of a slot of weights, which lists the tensors."""
    return bytes(image[: PREFIX_BYTES + int.from_bytes(image[:PREFIX_BYTES], "little")])


def read_entries(image: memoryview) -> dict[str, TensorEntry]:
    """Read the tensors of a slot of weights, by name, from its header."""
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
    """Read the tensors of a checkpoint's files, by their DCP names, from the heads of the files' indexes."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        above = f"{file.folder}/" if file.folder else ""  # indexes use the tensor's path in the whole set
        head = segment[file.index_head.offset :][: file.index_head.nbytes]
        for item in Index.items_in(bytes(head)):
            if item.kind == "tensor":
                dtype, begin = getattr(torch, item.dtype), file.begin + item.payload_at
                shape, offsets = tuple(item.shape), tuple(item.offsets)
                name = item.name.removeprefix(above)
                entries[name] = TensorEntry(name, dtype, shape, offsets, None, begin)
    return entries
