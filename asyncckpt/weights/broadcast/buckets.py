"""Buckets: named tensors, some at a time, as one run of bytes.

A bucket is filled with tensors one after the other, each aligned; a tensor that is larger than a bucket is cut into
pieces, each a bucket of its own. Where tensors that stay as they are lie side by side in this host's memory already,
that memory is the bucket: nothing is copied. All else is copied into two buffers, which alternate, so that one can be
filled while the other is under way.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from xxhash import xxh3_64_intdigest

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.structure import has_no_bytes
from asyncckpt.shm.memcpy import memcpy, memcpy_holding
from asyncckpt.shm.segment import round_up
from asyncckpt.weights.broadcast.transport import ALIGNMENT, Buffers

# So large that it is worth while to let other threads run meanwhile.
_LARGE_BYTES = 64 << 10
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = tuple[str, torch.Tensor]
Given = Mapping[str, Any] | Iterable[Named]
"""Weights, as a caller has them."""


class BucketTensor(NamedTuple):
    """A tensor to send. ``stays``: its memory stays as it is while others are sent, and may itself be a bucket."""

    name: str
    tensor: torch.Tensor
    stays: bool


class BucketItem(NamedTuple):
    """A tensor of a bucket, or the piece of one that is from byte ``begin`` on. It stands at ``at``; ``total`` bytes
    are all of the tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    nbytes: int
    begin: int
    total: int

    @property
    def is_piece(self) -> bool:
        return self.nbytes < self.total

    @property
    def is_last_piece(self) -> bool:
        return self.begin + self.nbytes == self.total


@dataclass(frozen=True)
class Bucket:
    """What is sent at once: ``data``, which belongs at byte ``skew`` of a receiver's buffer, and what is in it."""

    items: Sequence[BucketItem]
    data: torch.Tensor
    skew: int = 0
    keep: Sequence[torch.Tensor] = ()
    """Whose memory it may be."""


def tensors_of(weights: Given) -> Iterator[BucketTensor]:
    """The tensors of ``weights``, one at a time. Raises ``UnsavableStateError`` where one cannot be sent."""
    stays = isinstance(weights, Mapping)
    pairs: Iterable[tuple[str, Any]] = weights.items() if isinstance(weights, Mapping) else weights
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise UnsavableStateError(f"{name!r} is no tensor but a {type(tensor).__name__}: it cannot be sent")
        if isinstance(tensor, DTensor):
            raise UnsavableStateError(
                f"{name!r} is a DTensor, and none is gathered here: give a generator of names and full_tensor()s, and"
                " have the other ranks that hold shards make the same calls"
            )
        if has_no_bytes(tensor) or (tensor.nbytes and not tensor.data_ptr()):  # a wrapper of others, or offloaded
            kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}"
            raise UnsavableStateError(f"{name!r} has no plain memory ({kind}): not sent")
        yield BucketTensor(name, tensor.detach(), stays)


def fill(tensors: Iterable[BucketTensor], bucket_bytes: int, buffers: Buffers) -> Iterator[Bucket]:
    """Make buckets. The caller may ask for the next one while this one is under way.

    Args:
        tensors: What goes into them, in this order.
        bucket_bytes: The most bytes of a bucket.
        buffers: What is copied goes here.
    """
    bucket = _OpenBucket(buffers)
    for each in tensors:
        nbytes = each.tensor.nbytes
        if bucket.items and (nbytes > bucket_bytes or round_up(bucket.end, ALIGNMENT) + nbytes > bucket_bytes):
            yield bucket.close()
            bucket = _OpenBucket(buffers)
        if nbytes > bucket_bytes:
            yield from _pieces(each, bucket_bytes, buffers)
        else:
            bucket.add(each)
    if bucket.items:
        yield bucket.close()


class _OpenBucket:
    """A bucket being filled: first with a run of tensors that lie side by side, as long as there are only such."""

    def __init__(self, buffers: Buffers) -> None:
        self.items: list[BucketItem] = []
        self.end = 0
        self._buffers = buffers
        self._buffer: int | None = None
        self._run: int | None = None  # where it begins in memory
        self._skew = 0
        self._keep: list[torch.Tensor] = []

    def add(self, entry: BucketTensor) -> None:
        tensor = entry.tensor
        at, nbytes = self.end, tensor.nbytes
        if nbytes == 0:
            self.items.append(_item(entry, 0, 0))
            return
        if entry.stays and self._buffer is None and self._continues(tensor):
            if self._run is None:
                self._run = tensor.data_ptr()
                at = self._skew = self._run % ALIGNMENT
            self._keep.append(tensor)
        else:
            buffer = self._use_buffer()
            at = round_up(self.end, ALIGNMENT)
            _copy_into(buffer[at : at + nbytes], tensor)
        self.end = at + nbytes
        self.items.append(_item(entry, at, nbytes))

    def close(self) -> Bucket:
        if self._buffer is not None:
            return Bucket(self.items, self._buffers.pair[self._buffer][: self.end])
        return Bucket(self.items, self._run_bytes(), self._skew, keep=self._keep)

    def _continues(self, tensor: torch.Tensor) -> bool:
        """Whether it lies where the run ends, or can begin one."""
        if not _is_plain(tensor) or tensor.data_ptr() % tensor.element_size():
            return False
        return self._run is None or tensor.data_ptr() == self._run + self.end - self._skew

    def _run_bytes(self) -> torch.Tensor:
        return _at_address(self._run or 0, self.end - self._skew)

    def _use_buffer(self) -> torch.Tensor:
        """From here on this is a bucket in a buffer, which is returned; so is the run that was."""
        if self._buffer is None:
            self._buffer = self._buffers.next()
            if self._run is not None:
                _copy_into(self._buffers.pair[self._buffer][self._skew : self.end], self._run_bytes())
        return self._buffers.pair[self._buffer]


def _pieces(entry: BucketTensor, bucket_bytes: int, buffers: Buffers) -> Iterator[Bucket]:
    tensor = entry.tensor.resolve_conj().resolve_neg().contiguous()  # once, and not for each piece
    for begin in range(0, tensor.nbytes, bucket_bytes):
        nbytes = min(bucket_bytes, tensor.nbytes - begin)
        items = [_item(entry, 0, nbytes, begin)]
        if entry.stays and tensor.is_cpu:
            yield Bucket(items, _at_address(tensor.data_ptr() + begin, nbytes), keep=[tensor])
        else:
            data = buffers.pair[buffers.next()][:nbytes]
            _copy_into(data, tensor.reshape(-1).view(torch.uint8)[begin : begin + nbytes])
            yield Bucket(items, data)


def _item(entry: BucketTensor, at: int, nbytes: int, begin: int = 0) -> BucketItem:
    name, tensor, _ = entry
    dtype = str(tensor.dtype).removeprefix("torch.")
    return BucketItem(name, dtype, tuple(tensor.shape), at, nbytes, begin, tensor.nbytes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` lie in this host's memory just as they are to be sent."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _at_address(address: int, nbytes: int) -> torch.Tensor:
    """``nbytes`` of memory, which somebody else keeps."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _copy_into(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the bytes of ``tensor``, wherever it is and however it lies, to those of ``place``."""
    if place.is_cpu and _is_plain(tensor):
        copy = memcpy if tensor.nbytes >= _LARGE_BYTES else memcpy_holding
        copy(place.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return
    tensor = tensor.resolve_conj().resolve_neg()
    # As integers: not every dtype can be copied from every layout.
    integer = _INTEGERS.get(tensor.element_size())
    if integer is not None and not tensor.is_complex():
        tensor = tensor.view(integer)
    place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def checksum(data: torch.Tensor) -> int:
    """That of the bytes of a bucket, for memory of the host or of a device."""
    if data.is_cpu:
        memory: Any = data.numpy()
        return xxh3_64_intdigest(memory)
    return sum_on_device(data)


def sum_on_device(data: torch.Tensor) -> int:
    """The same for memory of a device, made there: sums of the words, each weighted by where it stands."""
    if data.storage_offset() % 8:
        data = data.clone()  # words can be seen only where they are aligned
    tail = data.numel() % 8
    words = data[: data.numel() - tail].view(torch.int64) if data.numel() >= 8 else data.new_empty(0).view(torch.int64)
    rest = sum(byte << (8 * place) for place, byte in enumerate(data[data.numel() - tail :].tolist()))
    columns = 4096
    whole = words.numel() // columns * columns
    found = rest + 3 * data.numel()
    for part in (words[:whole].view(-1, columns), words[whole:].reshape(1, words.numel() - whole)):
        # What is larger than a word wraps, as it does at the receiver. The factors are odd: no bit is lost.
        by_row = 2 * torch.arange(part.shape[0], device=data.device) + 1
        by_column = 2 * torch.arange(part.shape[1], device=data.device) + 1
        found = found * 31 + int((part.sum(1) * by_row).sum().item()) + 7 * int((part.sum(0) * by_column).sum().item())
    return int(found & (2**64 - 1))


def describe(items: Sequence[BucketItem]) -> bytes:
    """As it travels. Plain JSON: nothing in it is code."""
    return json.dumps(items).encode()


def read_description(data: bytes) -> list[BucketItem]:
    """What ``describe`` wrote."""
    return [BucketItem(name, dtype, tuple(shape), *numbers) for name, dtype, shape, *numbers in json.loads(data)]


def views(items: Sequence[BucketItem], buffer: torch.Tensor) -> list[Named]:
    """The tensors of a bucket that stands in ``buffer``."""
    return [(item.name, view(item, buffer[item.at : item.at + item.total])) for item in items]


def view(item: BucketItem, raw: torch.Tensor) -> torch.Tensor:
    """The tensor whose bytes are ``raw``."""
    dtype = getattr(torch, item.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsavableStateError(f"{item.name!r} is of {item.dtype}, which this version of torch does not know")
    return raw.view(dtype).view(item.shape)
