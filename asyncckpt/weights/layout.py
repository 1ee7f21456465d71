"""The layout of weights: a slot is a safetensors file.

The format (huggingface/safetensors, its README): eight bytes with the length of a header, the header (JSON, which may
end in spaces), then the bytes of all tensors without a gap. Here the widest element types come first, and the data
begins at a multiple of 64 bytes: so every tensor is aligned to its own elements.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.layout import DataLayout, Place, TensorSpec
from asyncckpt.shm.segment import round_up
from asyncckpt.worker.manifest import Index, Item

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
    shape ``whole`` (None: the parts together have it). Its bytes are ``nbytes`` at ``begin`` of the slot.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...] | None
    begin: int
    nbytes: int


class TensorForm(NamedTuple):
    """A tensor that is to be laid out, as in ``TensorEntry``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True)
class SafetensorsLayout:
    """The places of all tensors, and the header that says so. ``order``: their numbers, in the order of the places."""

    header: bytes
    order: Sequence[int]
    entries: Sequence[TensorEntry]
    nbytes: int

    @classmethod
    def lay_out(cls, forms: Sequence[TensorForm]) -> SafetensorsLayout:
        """Place tensors of these ``forms``. Raises ``UnsavableStateError`` where there is no such dtype or name."""
        for form in forms:
            if form.dtype not in _NAMES:
                raise UnsavableStateError(f"{form.name!r}: safetensors knows no {form.dtype}; publish it as another")
            if form.name == _METADATA or not isinstance(form.name, str):
                raise UnsavableStateError(f"{form.name!r} cannot be the name of a tensor in a safetensors file")
        order = sorted(range(len(forms)), key=lambda number: -forms[number].dtype.itemsize)
        fields: dict[str, Any] = {}
        parts = {form.name: [form.offsets, form.whole] for form in forms if form.shape != form.whole}
        if parts:
            fields[_METADATA] = {_PARTS: json.dumps(parts)}
        places: list[tuple[int, int]] = []
        end = 0
        for number in order:
            form = forms[number]
            begin, end = end, end + math.prod(form.shape) * form.dtype.itemsize
            places.append((begin, end))
            fields[form.name] = {"dtype": _NAMES[form.dtype], "shape": form.shape, "data_offsets": [begin, end]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        length = round_up(_PREFIX_BYTES + len(text), _ALIGNMENT) - _PREFIX_BYTES
        data = _PREFIX_BYTES + length
        entries = [
            TensorEntry(*forms[number], begin=data + begin, nbytes=end - begin)
            for number, (begin, end) in zip(order, places, strict=True)
        ]
        return cls(length.to_bytes(_PREFIX_BYTES, "little") + text.ljust(length), order, entries, data + end)

    @cached_property
    def number_of(self) -> Mapping[str, int]:
        """The number of each name in ``entries``."""
        return {entry.name: number for number, entry in enumerate(self.entries)}

    @cached_property
    def places(self) -> DataLayout:
        """The same for those that copy tensors there."""
        specs = [TensorSpec(entry.dtype, entry.shape) for entry in self.entries]
        places = [Place(entry.begin, entry.nbytes, entry.begin, entry.nbytes) for entry in self.entries]
        return DataLayout(specs, places, [], self.nbytes)


def read_entries(image: memoryview) -> list[TensorEntry]:
    """The tensors of a slot of weights, from its header."""
    data = _PREFIX_BYTES + int.from_bytes(image[:_PREFIX_BYTES], "little")
    fields = json.loads(bytes(image[_PREFIX_BYTES:data]))
    parts: Mapping[str, Any] = json.loads(fields.pop(_METADATA, {}).get(_PARTS, "{}"))
    entries = []
    for name, field in fields.items():
        shape = tuple(field["shape"])
        offsets, whole = parts.get(name, ([0] * len(shape), shape))
        begin, end = field["data_offsets"]
        entries.append(
            TensorEntry(name, _DTYPES[field["dtype"]], shape, tuple(offsets), tuple(whole), data + begin, end - begin)
        )
    return entries


def read_index(head: memoryview) -> list[TensorEntry]:
    """The tensors of a checkpoint, from the head of its index (``Index.head``)."""
    items = [Item(*fields) for fields in json.loads(bytes(head) + Index.tail(array("Q")))["items"]]
    return [
        TensorEntry(
            item.name,
            getattr(torch, item.dtype),
            tuple(item.shape),
            tuple(item.offsets),
            None,
            item.payload_at,
            item.payload_bytes,
        )
        for item in items
        if item.kind == "tensor"
    ]
