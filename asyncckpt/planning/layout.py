"""The layout of an image: the place of each item of its data files.

A data file is a row of items in the form that DCP's reader expects. A tensor has a *header* and then its *payload*, the
tensor's bytes, as ``torch.load`` reads them. An object is pickled bytes, with more bytes reserved behind them. Between
saves of one structure, only payloads and objects differ. The headers and all offsets are constant.
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
from asyncckpt.shm.segment import BLOCK, IMAGE_PAGE, round_up

_NAME = "0"  # the name of the only storage
_COUNT = struct.Struct("<q")


@functools.lru_cache(maxsize=65536)
def tensor_header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the bytes before the payload of a contiguous CPU tensor. They do not depend on its values.

    Raises ``UnsavableStateError`` on a big-endian machine.
    """
    if sys.byteorder != "little":
        raise UnsavableStateError("tensors are stored with the lowest byte first, and this machine has it last")
    elements = math.prod(shape)
    about = 0, shape, torch.empty(shape, device="meta").stride(), False, None  # no gradient, no hooks
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    if name is None:  # the dtype has no storage type of its own, so the storage is one of bytes
        elements *= dtype.itemsize
        storage = _Storage(torch.ByteStorage, elements)
        tensor = _Call(torch._utils._rebuild_tensor_v3, (storage, *about, dtype))
    else:
        tensor = _Call(torch._utils._rebuild_tensor_v2, (_Storage(getattr(torch, name), elements), *about))
    pickles = map(_pickled, (MAGIC_NUMBER, PROTOCOL_VERSION, None, tensor, [_NAME]))
    return b"".join(pickles) + _COUNT.pack(elements)


class _Storage(NamedTuple):
    """A placeholder for a storage. ``kind``: torch's storage class."""

    kind: type
    elements: int


class _Call(NamedTuple):
    """A placeholder for the result of ``function``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", value.kind, _NAME, "cpu", value.elements, None  # None: not a view of another storage
        return None


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump(value)
    # Drop the PROTO opcode, which is optional, and unused memo opcodes, because torch reads a pickle byte by byte.
    return pickletools.optimize(buffer.getvalue())[2:]


# Alignment of payloads, in bytes. Enough for every dtype.
_ALIGNMENT = 64
# Payloads of at least this size begin on a block of the file, so that a reader can read them in place with direct I/O.
BLOCK_ALIGNED_FROM = 1 << 20


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return torch's strides of a contiguous tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class TensorSpec(NamedTuple):
    """A stored tensor, or a stored shard.

    ``alias``: the number of an earlier tensor with the same bytes. ``name``: the name for errors.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    alias: int | None = None
    name: str = ""


class Place(NamedTuple):
    """The place of an item in the image, and of its payload. Offsets are in bytes from the start of the image."""

    at: int
    nbytes: int
    payload_at: int
    payload_bytes: int

    def since(self, begin: int) -> Place:
        """Return the same place, with offsets from byte ``begin`` of the image."""
        return Place(self.at - begin, self.nbytes, self.payload_at - begin, self.payload_bytes)


@dataclass(frozen=True)
class DataLayout:
    """The places of all items of an image. Data files stand one after the other. In each, tensors precede objects.

    ``begins``: the starts of the files, multiples of ``IMAGE_PAGE``. ``nbytes``: the size of the image, another
    multiple. ``lengths``: the lengths of the files, multiples of ``BLOCK``. ``constants``: the headers, each with its
    offset. ``converted``: whether each tensor is stored in another dtype than the trainer's; empty: none is.
    """

    specs: Sequence[TensorSpec]
    tensors: Sequence[Place]
    objects: Sequence[Place]
    nbytes: int
    constants: Sequence[tuple[int, bytes]] = ()
    begins: Sequence[int] = (0,)
    converted: Sequence[bool] = ()
    lengths: Sequence[int] = ()

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
            reserved: The bytes to reserve for each object.
            counts: The number of tensors and the number of objects in each data file; empty: there is one file.
        """
        tensors: list[Place] = []
        objects: list[Place] = []
        constants: list[tuple[int, bytes]] = []
        begins: list[int] = []
        lengths: list[int] = []
        end = 0
        for tensor_count, object_count in counts or [(len(specs), len(reserved))]:
            begins.append(end)
            for spec in specs[len(tensors) : len(tensors) + tensor_count]:
                if spec.alias is not None:
                    tensors.append(tensors[spec.alias])
                    continue
                header = tensor_header(spec.dtype, spec.shape)
                payload_bytes = math.prod(spec.shape) * spec.dtype.itemsize
                alignment = BLOCK if payload_bytes >= BLOCK_ALIGNED_FROM else _ALIGNMENT
                payload_at = round_up(end + len(header), alignment)
                at = payload_at - len(header)
                end = payload_at + payload_bytes
                tensors.append(Place(at, end - at, payload_at, payload_bytes))
                constants.append((at, header))
            for nbytes in reserved[len(objects) : len(objects) + object_count]:
                at = round_up(end, _ALIGNMENT)
                objects.append(Place(at, nbytes, at, nbytes))
                end = at + nbytes
            lengths.append(round_up(end - begins[-1], BLOCK))
            end = round_up(end, IMAGE_PAGE)
        return cls(specs, tensors, objects, end, constants, begins, lengths=lengths)

    @classmethod
    def joined(cls, layouts: Sequence[DataLayout]) -> DataLayout:
        """Return the layout of an image that holds the images of ``layouts``, one after the other."""
        if len(layouts) == 1:
            return layouts[0]
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
        """Return the number of the data file with the item at ``place``."""
        return bisect_right(self.begins, place.at) - 1


@dataclass(frozen=True)
class PlannedFile:
    """A data file of a plan. ``DataFile`` describes the same file in a segment, with regions for its bytes.

    ``is_frozen``: the file holds the frozen tensors (``planning/frozen.py``).
    """

    prefix: str
    begin: int
    nbytes: int
    index_head: bytes
    spans: array[int]
    is_frozen: bool = False
