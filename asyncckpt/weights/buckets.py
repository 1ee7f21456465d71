"""Buckets: named tensors, some at a time, as one run of bytes.

A bucket is filled with tensors one after the other, each aligned; a tensor that is larger than a bucket is cut into
pieces, each a bucket of its own. Where tensors that stay as they are lie side by side in this host's memory already,
that memory is the bucket: nothing is copied. Everything else is copied into one of two buffers in turn, so that one can
be filled while the other is under way.
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
from asyncckpt.shm.huge import huge_buffer
from asyncckpt.shm.memcpy import memcpy, memcpy_holding
from asyncckpt.shm.segment import round_up
from asyncckpt.structure import has_no_bytes

ALIGNMENT = 256
"""Bytes, of each tensor in a bucket, unless the bucket is where they lie anyway. Enough for every dtype and device."""

# So large that it is worth while to let other threads run meanwhile.
_LARGE_BYTES = 64 << 10
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = tuple[str, torch.Tensor]
Given = Mapping[str, Any] | Iterable[Named]
"""Weights, as a caller has them."""


class Entry(NamedTuple):
    """A tensor to send. ``stays``: its memory stays as it is while others are sent."""

    name: str
    tensor: torch.Tensor
    stays: bool


class Item(NamedTuple):
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

    items: Sequence[Item]
    data: torch.Tensor
    skew: int
    buffer: int | None
    """Which of the two buffers ``data`` is of; None: it is memory of the tensors."""
    keep: Sequence[torch.Tensor]
    """Whose memory it may be."""


class Buffers:
    """Two buffers for buckets, of which the one is filled, or loaded from, while the other is under way."""

    def __init__(self, pair: Sequence[torch.Tensor]) -> None:
        self.pair = pair
        self._turn = 0

    @classmethod
    def of_host(cls, bucket_bytes: int) -> Buffers:
        """Of this process alone."""
        nbytes = buffer_bytes(bucket_bytes)
        return cls([torch.frombuffer(huge_buffer(nbytes), dtype=torch.uint8) for _ in range(2)])

    def next(self) -> int:
        """The number of the one whose turn it is."""
        self._turn = 1 - self._turn
        return self._turn


def buffer_bytes(bucket_bytes: int) -> int:
    """What a buffer needs for any bucket: it may begin with up to ``ALIGNMENT`` bytes of nothing."""
    return round_up(bucket_bytes + ALIGNMENT)


def entries(weights: Given, sources: Sequence[int] | None = None) -> Iterator[Entry]:
    """The tensors of ``weights``, one at a time; sharded ones (``DTensor``) are gathered when it is their turn.

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
            yield Entry(name, tensor.full_tensor(), True)
        elif has_no_bytes(tensor) or (tensor.nbytes and not tensor.data_ptr()):  # a wrapper of others, or offloaded
            kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}"
            raise UnsavableStateError(f"{name!r} has no plain memory ({kind}): not sent")
        else:
            yield Entry(name, tensor, stays)


def fill(
    given: Iterable[Entry], bucket_bytes: int, buffers: Buffers | None, *, borrow: bool = True
) -> Iterator[Bucket]:
    """Make buckets of up to ``bucket_bytes``. The caller may ask for the next one while this one is under way.

    With ``borrow``, memory of tensors that stay may be a bucket. Without it the cuts depend on names, dtypes and shapes
    alone; and without ``buffers`` nothing is copied, and a bucket has no data: so a rank that only helps to gather goes
    through all of it in step with the one that sends.
    """
    filling = _Filling(bucket_bytes, buffers, borrow)
    for entry in given:
        nbytes = entry.tensor.nbytes
        if nbytes > bucket_bytes:
            if filling.items:
                yield filling.finish()
            yield from _pieces(entry, bucket_bytes, buffers, borrow)
            filling = _Filling(bucket_bytes, buffers, borrow)
            continue
        if not filling.has_room_for(nbytes):
            yield filling.finish()
            filling = _Filling(bucket_bytes, buffers, borrow)
        filling.add(entry)
    if filling.items:
        yield filling.finish()


@dataclass
class _Filling:
    """A bucket being filled: first with a run of tensors that lie side by side, as long as there are only such."""

    bucket_bytes: int
    buffers: Buffers | None
    borrow: bool
    items: list[Item] = field(default_factory=list)
    _end: int = 0
    _skew: int = 0
    _run: int | None = None
    """Where the run begins in memory."""
    _keep: list[torch.Tensor] = field(default_factory=list)
    _buffer: int | None = None

    def has_room_for(self, nbytes: int) -> bool:
        return round_up(self._end, ALIGNMENT) + nbytes <= self.bucket_bytes or not self.items

    def add(self, entry: Entry) -> None:
        tensor = entry.tensor
        nbytes = tensor.nbytes
        if nbytes == 0:
            at = 0
        elif self.borrow and self._buffer is None and entry.stays and self._continues(tensor):
            if self._run is None:
                self._run = tensor.data_ptr()
                self._end = self._skew = self._run % ALIGNMENT
            at = self._end
            self._keep.append(tensor)
            self._end = at + nbytes
        else:
            self._settle()
            at = round_up(self._end, ALIGNMENT)
            self._end = at + nbytes
            if self.buffers is not None and self._buffer is not None:
                copy_into(self.buffers.pair[self._buffer], at, tensor)
        self.items.append(Item(entry.name, _name(tensor.dtype), tuple(tensor.shape), at, nbytes, 0, nbytes))

    def finish(self) -> Bucket:
        data = torch.empty(0, dtype=torch.uint8)
        if self._run is not None:
            data = at_address(self._run, self._end - self._skew)
        elif self.buffers is not None and self._buffer is not None:
            data = self.buffers.pair[self._buffer][: self._end]
        return Bucket(self.items, data, self._skew, self._buffer, self._keep)

    def _continues(self, tensor: torch.Tensor) -> bool:
        """Whether it lies where the run ends, or can begin one."""
        if not is_plain(tensor) or tensor.data_ptr() % tensor.element_size():
            return False
        return self._run is None or tensor.data_ptr() == self._run + self._end - self._skew

    def _settle(self) -> None:
        """From here on this is a bucket in a buffer; so is the run that was."""
        if self._buffer is not None or self.buffers is None:
            return
        self._buffer = self.buffers.next()
        if self._run is not None:
            run = at_address(self._run, self._end - self._skew)
            copy_into(self.buffers.pair[self._buffer], self._skew, run)
            self._run, self._skew = None, 0
            self._keep = []


def _pieces(entry: Entry, bucket_bytes: int, buffers: Buffers | None, borrow: bool) -> Iterator[Bucket]:
    tensor, total = entry.tensor, entry.tensor.nbytes
    if buffers is not None:
        tensor = tensor.resolve_conj().resolve_neg().contiguous()  # once, and not for each piece
    for begin in range(0, total, bucket_bytes):
        nbytes = min(bucket_bytes, total - begin)
        item = Item(entry.name, _name(tensor.dtype), tuple(tensor.shape), 0, nbytes, begin, total)
        if buffers is None:
            yield Bucket([item], torch.empty(0, dtype=torch.uint8), 0, None, [])
        elif borrow and entry.stays and is_plain(tensor):
            yield Bucket([item], at_address(tensor.data_ptr() + begin, nbytes), 0, None, [tensor])
        else:
            number = buffers.next()
            raw = tensor.reshape(-1).view(torch.uint8)[begin : begin + nbytes]
            copy_into(buffers.pair[number], 0, raw)
            yield Bucket([item], buffers.pair[number][:nbytes], 0, number, [])


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
    """Of the bytes of a bucket."""
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
        # Whatever is larger than a word wraps, as it does for whoever receives it. The factors are odd: no bit is lost.
        by_row = 2 * torch.arange(part.shape[0], device=data.device) + 1
        by_column = 2 * torch.arange(part.shape[1], device=data.device) + 1
        found = found * 31 + int((part.sum(1) * by_row).sum().item()) + 7 * int((part.sum(0) * by_column).sum().item())
    return int(found & (2**64 - 1))


def describe(items: Sequence[Item]) -> bytes:
    """As it travels. Plain JSON: nothing in it is code."""
    return json.dumps(items).encode()


def read_description(data: bytes) -> list[Item]:
    """What ``describe`` wrote."""
    return [Item(name, dtype, tuple(shape), *numbers) for name, dtype, shape, *numbers in json.loads(data)]


def views(items: Sequence[Item], buffer: torch.Tensor) -> list[Named]:
    """The tensors of a bucket that stands in ``buffer``."""
    return [(item.name, view(item, buffer[item.at : item.at + item.total])) for item in items]


def view(item: Item, raw: torch.Tensor) -> torch.Tensor:
    """The tensor whose bytes are ``raw``."""
    dtype = getattr(torch, item.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsavableStateError(f"{item.name!r} is of {item.dtype}, which this version of torch does not know")
    return raw.view(dtype).view(item.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
