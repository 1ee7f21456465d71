"""The layout of an image: which byte of its data files stands where.

A data file is a row of items, each in the form DCP's reader expects: a tensor as ``torch.load`` reads it (a *header*,
then the tensor's bytes, its *payload*), an object as pickled bytes with more reserved behind them. Between saves with
the same structure only payloads and objects differ; all else, the headers and all offsets, is constant.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import pickletools
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from asyncckpt.errors import UnsavableStateError
from asyncckpt.shm.segment import PAGE, round_up

_NAME = "0"  # of the one storage
_COUNT = struct.Struct("<q")


@functools.lru_cache(maxsize=65536)
def tensor_header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What stands before the bytes of a contiguous CPU tensor, whatever its values.

    Raises ``UnsavableStateError`` on a machine with another order of bytes than this form has.
    """
    if sys.byteorder != "little":
        raise UnsavableStateError("tensors are stored with the lowest byte first, and this machine has it last")
    elements = math.prod(shape)
    about = 0, shape, torch.empty(shape, device="meta").stride(), False, None  # no gradient, no hooks
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    if name is None:  # a storage of bytes, as only some dtypes have a kind of their own
        elements *= dtype.itemsize
        storage = _Storage(torch.ByteStorage, elements)
        tensor = _Call(torch._utils._rebuild_tensor_v3, (storage, *about, dtype))
    else:
        tensor = _Call(torch._utils._rebuild_tensor_v2, (_Storage(getattr(torch, name), elements), *about))
    pickles = map(_pickled, (MAGIC_NUMBER, PROTOCOL_VERSION, None, tensor, [_NAME]))
    return b"".join(pickles) + _COUNT.pack(elements)


class _Storage(NamedTuple):
    """Stands for a storage, of a class of torch's."""

    kind: type
    elements: int


class _Call(NamedTuple):
    """Stands for what ``function`` returns."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", value.kind, _NAME, "cpu", value.elements, None  # no view of another
        return None


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump(value)
    # Without the protocol, which is told anyhow, and what would be remembered: torch reads a pickle byte by byte.
    return pickletools.optimize(buffer.getvalue())[2:]


# What an item is aligned to, and a payload; enough for every dtype.
_ALIGNMENT = 64
# Payloads from this size on begin on a page of the file: a reader may then read them past the page cache, in place.
PAGE_ALIGNED_FROM = 1 << 20


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of ``shape`` whose elements are in a row, as torch has them."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class TensorSpec(NamedTuple):
    """A stored tensor, or a shard of it. ``alias`` is the number of an earlier one that has the same bytes; ``name`` is
    for errors.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    alias: int | None = None
    name: str = ""


class Place(NamedTuple):
    """Where an item stands in the image, and its payload in it; bytes from the start of the image."""

    at: int
    nbytes: int
    payload_at: int
    payload_bytes: int

    def since(self, begin: int) -> Place:
        """The same, in bytes from ``begin`` of the image."""
        return Place(self.at - begin, self.nbytes, self.payload_at - begin, self.payload_bytes)


@dataclass(frozen=True)
class DataLayout:
    """Where all items of an image stand: those of a data file after those of another, in each tensors, then objects.

    The files begin at ``begins``. They are whole pages, and so are the ``nbytes`` of all. ``constants``: the headers,
    each with its offset. ``converted``: which tensors come in another dtype than they are stored in; empty: none.
    """

    specs: Sequence[TensorSpec]
    tensors: Sequence[Place]
    objects: Sequence[Place]
    nbytes: int
    constants: Sequence[tuple[int, bytes]] = ()
    begins: Sequence[int] = (0,)
    converted: Sequence[bool] = ()

    @classmethod
    def lay_out(
        cls,
        specs: Sequence[TensorSpec],
        reserved: Sequence[int],
        counts: Sequence[tuple[int, int]] = (),
    ) -> DataLayout:
        """Place tensors and objects, in the order given.

        Args:
            specs: The tensors.
            reserved: For each object, how many bytes there are to be for it.
            counts: How many of the tensors, and of the objects, each data file has; empty: there is one file.
        """
        tensors: list[Place] = []
        objects: list[Place] = []
        constants: list[tuple[int, bytes]] = []
        begins: list[int] = []
        end = 0
        for tensor_count, object_count in counts or [(len(specs), len(reserved))]:
            begins.append(end)
            for spec in specs[len(tensors) : len(tensors) + tensor_count]:
                if spec.alias is not None:
                    tensors.append(tensors[spec.alias])
                    continue
                header = tensor_header(spec.dtype, spec.shape)
                payload_bytes = math.prod(spec.shape) * spec.dtype.itemsize
                alignment = PAGE if payload_bytes >= PAGE_ALIGNED_FROM else _ALIGNMENT
                payload_at = round_up(end + len(header), alignment)
                at = payload_at - len(header)
                end = payload_at + payload_bytes
                tensors.append(Place(at, end - at, payload_at, payload_bytes))
                constants.append((at, header))
            for nbytes in reserved[len(objects) : len(objects) + object_count]:
                at = round_up(end, _ALIGNMENT)
                objects.append(Place(at, nbytes, at, nbytes))
                end = at + nbytes
            end = round_up(end)
        return cls(specs, tensors, objects, end, constants, begins)

    @classmethod
    def joined(cls, layouts: Sequence[DataLayout]) -> DataLayout:
        """That of an image which has those of ``layouts``, one after the other."""
        specs: list[TensorSpec] = []
        tensors: list[Place] = []
        objects: list[Place] = []
        constants: list[tuple[int, bytes]] = []
        begins: list[int] = []
        converted: list[bool] = []
        end = 0
        for each in layouts:
            first = len(specs)
            specs += [spec if spec.alias is None else spec._replace(alias=first + spec.alias) for spec in each.specs]
            tensors += [place.since(-end) for place in each.tensors]
            objects += [place.since(-end) for place in each.objects]
            constants += [(end + at, data) for at, data in each.constants]
            begins += [end + begin for begin in each.begins]
            converted += each.converted or [False] * len(each.specs)
            end += each.nbytes
        return cls(specs, tensors, objects, end, constants, begins, converted if any(converted) else ())

    def file_of(self, place: Place) -> int:
        """The number of the data file that has the item at ``place``."""
        return bisect_right(self.begins, place.at) - 1


@dataclass(frozen=True)
class PlannedFile:
    """A data file of a plan, as ``DataFile`` is one of a segment, with the bytes that it has regions for.

    ``is_frozen``: it holds the frozen tensors (``planning/frozen.py``).
    """

    folder: str
    prefix: str
    begin: int
    nbytes: int
    index_head: bytes
    spans: array[int]
    is_frozen: bool = False
