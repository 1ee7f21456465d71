"""The layout of weights: a slot is a safetensors file.

The format (huggingface/safetensors, its README): eight bytes with the length of a header, the header (JSON, which may
end in spaces), then the bytes of all tensors without a gap. Here the widest element types come first (``plan.py``),
and the data begins at a multiple of 64 bytes: so every tensor is aligned to its own elements.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import UnsavableStateError
from asyncckpt.shm.segment import round_up
from asyncckpt.worker.manifest import Index, Item
from asyncckpt.worker.segment_layout import CheckpointLayout

_ALIGNMENT = 64
_PREFIX_BYTES = 8
# The offsets and the whole shapes of parts of sharded tensors stand under the second name in the format's metadata.
_METADATA = "__metadata__"
_PARTS = "asyncckpt.parts"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


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


def lay_out(entries: Sequence[TensorEntry]) -> tuple[bytes, list[TensorEntry]]:
    """Place tensors one after the other. Returns the header that says so, and the entries with their places.

    Raises ``UnsavableStateError`` where the format has no such dtype or name.
    """
    fields: dict[str, Any] = {}
    parts = {entry.name: [entry.offsets, entry.whole] for entry in entries if entry.shape != entry.whole}
    if parts:
        fields[_METADATA] = {_PARTS: json.dumps(parts)}
    end = 0
    for entry in entries:
        if entry.dtype not in _NAMES:
            raise UnsavableStateError(f"{entry.name!r}: safetensors knows no {entry.dtype}; publish it as another")
        if entry.name == _METADATA or not isinstance(entry.name, str):
            raise UnsavableStateError(f"{entry.name!r} cannot be the name of a tensor in a safetensors file")
        begin, end = end, end + entry.nbytes
        fields[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    data = round_up(_PREFIX_BYTES + len(text), _ALIGNMENT)
    length = data - _PREFIX_BYTES
    placed = [entry._replace(begin=data + fields[entry.name]["data_offsets"][0]) for entry in entries]
    return length.to_bytes(_PREFIX_BYTES, "little") + text.ljust(length), placed


def read_entries(image: memoryview) -> dict[str, TensorEntry]:
    """The tensors of a slot of weights by name, from its header."""
    data = _PREFIX_BYTES + int.from_bytes(image[:_PREFIX_BYTES], "little")
    fields = json.loads(bytes(image[_PREFIX_BYTES:data]))
    parts: Mapping[str, Any] = json.loads(fields.pop(_METADATA, {}).get(_PARTS, "{}"))
    entries = {}
    for name, field in fields.items():
        dtype, shape = _DTYPES[field["dtype"]], tuple(field["shape"])
        offsets, whole = parts.get(name, ([0] * len(shape), shape))
        begin = data + field["data_offsets"][0]
        entries[name] = TensorEntry(name, dtype, shape, tuple(offsets), tuple(whole), begin)
    return entries


def read_indexes(segment: memoryview, layout: CheckpointLayout) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint by name, from the heads of its indexes (``Index.head``)."""
    entries: dict[str, TensorEntry] = {}
    for file in layout.data_files:
        head = segment[file.index_head.offset :][: file.index_head.nbytes]
        for item in starmap(Item, json.loads(bytes(head) + Index.tail(0, array("Q")))["items"]):
            if item.kind == "tensor":
                dtype, begin = getattr(torch, item.dtype), file.begin + item.payload_at
                shape, offsets = tuple(item.shape), tuple(item.offsets)
                entries[item.name] = TensorEntry(item.name, dtype, shape, offsets, None, begin)
    return entries
