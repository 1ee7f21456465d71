"""The layout of an image: which byte of its data files stands where.

A data file is a row of items, each in the form DCP's reader expects: a tensor as ``torch.load`` reads it (a zip with
the tensor's bytes, its *payload*, in the middle), an object as pickled bytes with more reserved behind them. Between
saves with the same structure only payloads and objects differ; all else, the *envelopes* and all offsets, is constant.
"""

from __future__ import annotations

import functools
import math
import os
import zipfile
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import IO, NamedTuple

import torch
from torch.serialization import skip_data

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.shm.segment import PAGE, refusal, round_up
from asyncckpt.worker.archive import around

# What a payload is aligned to, from the start of its zip, as by torch.save; enough for every dtype.
_ALIGNMENT = 64
# Payloads from this size on begin on a page of the file: a reader may then read them past the page cache, in place.
PAGE_ALIGNED_FROM = 1 << 20


@functools.lru_cache(maxsize=65536)
def _envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What stands before and behind the bytes of a contiguous CPU tensor, whatever its values."""
    # The pickle is that of torch.save, of a tensor with zeros in the place of the data. Tensor and zip are memory files
    # full of holes, however many gigabytes they have: torch seeks over the payload. (A fake tensor would need no
    # memory, but 1.3 s to import what makes it.)
    nbytes = math.prod(shape) * dtype.itemsize
    strides = torch.empty(shape, device="meta").stride()
    try:
        storage = _hole(nbytes)
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)
        with _memory_file() as file:
            with skip_data():
                torch.save(tensor, file)
            file.flush()
            with zipfile.ZipFile(file) as archive:
                (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
                # torch.load never looks at the checksum of the payload, so it need not be right.
                return around(archive.read(pickled), nbytes, _ALIGNMENT)
    except OSError as error:
        raise OutOfMemoryError(
            f"no memory file of {nbytes:,} bytes, to see how torch saves a tensor: {refusal(error)}"
        ) from error


def _hole(nbytes: int) -> torch.UntypedStorage:
    with _memory_file() as file:
        os.ftruncate(file.fileno(), nbytes)  # torch would, and not say which limit was too low
        try:
            storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, nbytes=nbytes)
        except RuntimeError as error:
            raise OSError(str(error)) from error
    return storage  # type: ignore[return-value]


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("asyncckpt-envelope", os.MFD_CLOEXEC), "w+b")


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


class Settled(IntEnum):
    """What is to be expected of what stands in a data file, and what is made of that."""

    NOT = 0
    """It changes from save to save."""
    COPIED = 1
    """It does not, as far as is known; it is copied into each slot all the same."""
    SHARED = 2
    """Nor does this, and all slots share it: it is looked at in each save, or somebody has promised it."""


@dataclass(frozen=True)
class DataLayout:
    """Where all items of an image stand: those of a data file after those of another, in each tensors, then objects.

    The files begin at ``begins``. They are whole pages, and so are the ``nbytes`` of all. ``constants`` are the bytes
    around the items, each with its offset. ``converted``: which tensors come in another dtype than they are stored in;
    empty: none. The last ``shared_bytes`` all images have in common: whole files.
    """

    specs: Sequence[TensorSpec]
    tensors: Sequence[Place]
    objects: Sequence[Place]
    nbytes: int
    constants: Sequence[tuple[int, bytes]] = ()
    begins: Sequence[int] = (0,)
    converted: Sequence[bool] = ()
    shared_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """What each slot has for itself."""
        return self.nbytes - self.shared_bytes

    @classmethod
    def lay_out(
        cls,
        specs: Sequence[TensorSpec],
        reserved: Sequence[int],
        counts: Sequence[tuple[int, int]] = (),
        shared: int = 0,
    ) -> DataLayout:
        """Place tensors and objects, in the order given.

        Args:
            specs: The tensors.
            reserved: For each object, how many bytes there are to be for it.
            counts: How many of the tensors, and of the objects, each data file has; empty: there is one file.
            shared: How many of the data files, the last ones, all images have in common.
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
                before, after = _envelope(spec.dtype, spec.shape)
                payload_bytes = math.prod(spec.shape) * spec.dtype.itemsize
                alignment = PAGE if payload_bytes >= PAGE_ALIGNED_FROM else _ALIGNMENT
                payload_at = round_up(end + len(before), alignment)
                at = payload_at - len(before)
                end = payload_at + payload_bytes + len(after)
                tensors.append(Place(at, end - at, payload_at, payload_bytes))
                constants += [(at, before), (payload_at + payload_bytes, after)]
            for nbytes in reserved[len(objects) : len(objects) + object_count]:
                at = round_up(end, _ALIGNMENT)
                objects.append(Place(at, nbytes, at, nbytes))
                end = at + nbytes
            end = round_up(end)
        shared_bytes = end - begins[-shared] if shared else 0
        return cls(specs, tensors, objects, end, constants, begins, shared_bytes=shared_bytes)

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
    """A data file of a plan, as ``DataFile`` is one of a segment, with the bytes that it has regions for."""

    folder: str
    prefix: str
    begin: int
    nbytes: int
    index_head: bytes
    spans: array[int]
    settled: Settled = Settled.NOT
