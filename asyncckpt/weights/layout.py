"""The layout of weights: a slot is a safetensors file (see ``planning/safetensors_plan.py``).

What the format has no dtype for stands there as bytes, with one dimension more, and its dtype in the metadata.
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
"""The elements of a tensor that are in these ranges, one a dimension."""


def ranges(offsets: Sequence[int], shape: Sequence[int]) -> Ranges:
    """The elements from ``offsets`` on, so many as ``shape`` says."""
    return tuple(range(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))


def missing(whole: Sequence[int], parts: Iterable[Ranges]) -> Ranges | None:
    """A box of a tensor of the shape ``whole`` that is in none of its ``parts``; None: there is all of it."""
    left = [] if 0 in whole else [tuple(map(range, whole))]
    for part in parts:
        left = [rest for each in left for rest in _without(each, part)]
    return left[0] if left else None


def common(parts: Iterable[Ranges]) -> Ranges | None:
    """A box that is in two of the ``parts``; None: there is none."""
    shared = (_shared(one, other) for one, other in combinations(parts, 2))
    return next((each for each in shared if all(map(len, each))), None)


def shown(part: Ranges) -> str:
    """For a message: as Python writes a slice."""
    return f"[{', '.join(f'{each.start}:{each.stop}' for each in part)}]"


def _shared(one: Ranges, other: Ranges) -> Ranges:
    return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def _without(one: Ranges, part: Ranges) -> Iterator[Ranges]:
    """What of ``one`` is not in ``part``, as boxes."""
    inner = _shared(one, part)
    if not all(map(len, inner)):
        yield one
        return
    for at, (cut, each) in enumerate(zip(inner, one, strict=True)):
        for outer in (range(each.start, cut.start), range(cut.stop, each.stop)):
            if outer:
                yield (*inner[:at], outer, *one[at + 1 :])


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
