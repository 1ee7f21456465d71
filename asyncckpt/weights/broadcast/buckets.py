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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_64_intdigest

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.structure import has_no_bytes
from asyncckpt.shm.memcpy import memcpy, memcpy_holding
from asyncckpt.shm.segment import round_up
from asyncckpt.weights.broadcast.buffers import ALIGNMENT, Buffers

# So large that it is worth while to let other threads run meanwhile.
_LARGE_BYTES = 64 << 10
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = tuple[str, torch.Tensor]
Given = Mapping[str, Any] | Iterable[Named]
"""Weights, as a caller has them."""


class BucketTensor(NamedTuple):
    """A tensor to send. ``stays``: its memory stays as it is while others are sent."""

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
    skew: int
    buffer: int | None
    """Which of the two buffers ``data`` is of; None: it is memory of the tensors."""
    keep: Sequence[torch.Tensor]
    """Whose memory it may be."""


def tensors_of(weights: Given, sources: Sequence[int] | None = None) -> Iterator[BucketTensor]:
    """The tensors of ``weights``, one at a time; sharded ones (``DTensor``) are gathered when they come.

    ``sources``: the ranks of the job that gather too. Raises ``UnsavableStateError``.
    """
    stays = isinstance(weights, Mapping)
    pairs: Iterable[tuple[str, Any]] = weights.items() if isinstance(weights, Mapping) else weights
    for name, value in pairs:
        if not isinstance(value, torch.Tensor):
            raise UnsavableStateError(f"{name!r} is no tensor but a {type(value).__name__}: it cannot be sent")
        tensor: Any = value.detach()
        if hasattr(tensor, "full_tensor"):
            missing = set(tensor.device_mesh.mesh.flatten().tolist()) - set(sources or ())
            if missing:
                raise UnsavableStateError(
                    f"{name!r} is sharded over ranks of which {sorted(missing)} give no weights: all that hold shards"
                    " must give theirs"
                )
            yield BucketTensor(name, tensor.full_tensor(), True)
        elif has_no_bytes(tensor) or (tensor.nbytes and not tensor.data_ptr()):  # a wrapper of others, or offloaded
            kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}"
            raise UnsavableStateError(f"{name!r} has no plain memory ({kind}): not sent")
        else:
            yield BucketTensor(name, tensor, stays)


def fill(
    tensors: Iterable[BucketTensor], bucket_bytes: int, buffers: Buffers | None, *, borrow: bool = True
) -> Iterator[Bucket]:
    """Make buckets. The caller may ask for the next one while this one is under way.

    Args:
        tensors: What goes into them, in this order.
        bucket_bytes: The most bytes of a bucket.
        buffers: What is copied goes here. None: nothing is copied, and a bucket has no data; so a rank that only helps
            to gather goes through all of it in step with the one that sends.
        borrow: Memory of tensors that stay may be a bucket. Without it the cuts depend on names, dtypes and shapes
            alone.
    """
    bucket = _OpenBucket(buffers, borrow)
    for each in tensors:
        nbytes = each.tensor.nbytes
        if bucket.items and (nbytes > bucket_bytes or round_up(bucket.end, ALIGNMENT) + nbytes > bucket_bytes):
            yield bucket.close()
            bucket = _OpenBucket(buffers, borrow)
        if nbytes > bucket_bytes:
            yield from _pieces(each, bucket_bytes, buffers, borrow)
        else:
            bucket.add(each)
    if bucket.items:
        yield bucket.close()


@dataclass
class _OpenBucket:
    """A bucket being filled: first with a run of tensors that lie side by side, as long as there are only such."""

    buffers: Buffers | None
    borrow: bool
    items: list[BucketItem] = field(default_factory=list)
    end: int = 0
    _skew: int = 0
    _run: int | None = None
    """Where the run begins in memory."""
    _keep: list[torch.Tensor] = field(default_factory=list)
    _buffer: int | None = None

    def add(self, entry: BucketTensor) -> None:
        tensor = entry.tensor
        nbytes = tensor.nbytes
        if nbytes == 0:
            at = 0
        elif self.borrow and self._buffer is None and entry.stays and self._continues(tensor):
            if self._run is None:
                self._run = tensor.data_ptr()
                self.end = self._skew = self._run % ALIGNMENT
            at = self.end
            self._keep.append(tensor)
            self.end = at + nbytes
        else:
            self._use_buffer()
            at = round_up(self.end, ALIGNMENT)
            self.end = at + nbytes
            if self.buffers is not None and self._buffer is not None:
                copy_into(self.buffers.pair[self._buffer], at, tensor)
        self.items.append(_item(entry, at, nbytes, 0))

    def close(self) -> Bucket:
        data = torch.empty(0, dtype=torch.uint8)
        if self._run is not None:
            data = at_address(self._run, self.end - self._skew)
        elif self.buffers is not None and self._buffer is not None:
            data = self.buffers.pair[self._buffer][: self.end]
        return Bucket(self.items, data, self._skew, self._buffer, self._keep)

    def _continues(self, tensor: torch.Tensor) -> bool:
        """Whether it lies where the run ends, or can begin one."""
        if not is_plain(tensor) or tensor.data_ptr() % tensor.element_size():
            return False
        return self._run is None or tensor.data_ptr() == self._run + self.end - self._skew

    def _use_buffer(self) -> None:
        """From here on this is a bucket in a buffer; so is the run that was."""
        if self._buffer is not None or self.buffers is None:
            return
        self._buffer = self.buffers.next()
        if self._run is not None:
            run = at_address(self._run, self.end - self._skew)
            copy_into(self.buffers.pair[self._buffer], self._skew, run)
            self._run, self._skew = None, 0
            self._keep = []


def _pieces(entry: BucketTensor, bucket_bytes: int, buffers: Buffers | None, borrow: bool) -> Iterator[Bucket]:
    tensor, total = entry.tensor, entry.tensor.nbytes
    if buffers is not None:
        tensor = tensor.resolve_conj().resolve_neg().contiguous()  # once, and not for each piece
    for begin in range(0, total, bucket_bytes):
        nbytes = min(bucket_bytes, total - begin)
        items = [_item(entry, 0, nbytes, begin)]
        if buffers is None:
            yield Bucket(items, torch.empty(0, dtype=torch.uint8), 0, None, [])
        elif borrow and entry.stays and is_plain(tensor):
            yield Bucket(items, at_address(tensor.data_ptr() + begin, nbytes), 0, None, [tensor])
        else:
            number = buffers.next()
            raw = tensor.reshape(-1).view(torch.uint8)[begin : begin + nbytes]
            copy_into(buffers.pair[number], 0, raw)
            yield Bucket(items, buffers.pair[number][:nbytes], 0, number, [])


def _item(entry: BucketTensor, at: int, nbytes: int, begin: int) -> BucketItem:
    name, tensor, _ = entry
    return BucketItem(
        name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at, nbytes, begin, tensor.nbytes
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` lie in this host's memory just as they are to be sent."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def at_address(address: int, nbytes: int) -> torch.Tensor:
    """``nbytes`` of memory, which somebody else keeps."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def copy_into(buffer: torch.Tensor, at: int, tensor: torch.Tensor) -> None:
    """Copy the bytes of ``tensor``, wherever it is and however it lies, to byte ``at`` of ``buffer``."""
    nbytes = tensor.nbytes
    if buffer.is_cpu and is_plain(tensor):
        copy = memcpy if nbytes >= _LARGE_BYTES else memcpy_holding
        copy(buffer.data_ptr() + at, tensor.data_ptr(), nbytes)
        return
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # As integers: not every dtype can be copied from every layout.
    integer = _INTEGERS.get(tensor.element_size())
    if integer is not None and not tensor.is_complex():
        tensor = tensor.view(integer)
    into = buffer[at : at + nbytes].view(tensor.dtype).view(tensor.shape)
    into.copy_(tensor)


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
