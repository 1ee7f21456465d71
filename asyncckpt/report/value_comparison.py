"""How the values of two stored tensors differ, tile by tile, so that little of them is in memory at once."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import UntrustedValueError
from asyncckpt.exporting.stored import Box, StoredState, StoredTensor, fetch
from asyncckpt.loading.unpickle import load_object
from asyncckpt.planning.layout import contiguous_strides

# Of a tile: some spans, of which those at its ends are read twice.
_TILE_BYTES = 32 << 20
# Converted at once.
_CONVERTED = 1 << 20


@dataclass
class ValueDifference:
    """How two tensors differ, in float64, of complex numbers by absolute values.

    ``greatest``, ``mean``: of the differences, over all elements that are finite in both; None: there are none.
    ``nan``, ``infinite``: how many elements are that in the first, and in the second.
    """

    greatest: float | None = None
    mean: float | None = None
    nan: list[int] = field(default_factory=lambda: [0, 0])
    infinite: list[int] = field(default_factory=lambda: [0, 0])

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {"max_abs": self.greatest, "mean_abs": self.mean, "nan": self.nan, "infinite": self.infinite}


class StateReader:
    """Reads tiles of the tensors of a stored state. Small tensors are read many at once: each alone would take longer
    to ask for than to read.
    """

    def __init__(self, state: StoredState, pool: ThreadPoolExecutor) -> None:
        """Read nothing yet. ``pool``: the threads that read."""
        self._state = state
        self._pool = pool
        self._at_hand: dict[Box, torch.Tensor] = {}

    def tensor(self, name: str) -> StoredTensor:
        """What is stored under ``name``."""
        return self._state.tensors[name]

    def read_ahead(self, names: Sequence[str]) -> None:
        """Have the tensors ``names`` at hand, and no others. Raises ``DamagedCheckpointError``, ``StorageError``."""
        self._at_hand = {}
        parts: dict[str, list[tuple[int, int, int]]] = {}
        for name in names:
            size = self.tensor(name).dtype.itemsize
            for box in self.tensor(name).boxes:
                if box in self._at_hand:  # it is tied to another
                    continue
                nbytes = size * box.extent
                memory = self._at_hand[box] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                parts.setdefault(box.file, []).append((box.begin, box.begin + nbytes, memory.data_ptr()))
        for file, some in parts.items():
            fetch(self._state.files[file], some, self._pool)

    def tile(self, name: str, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """A part of a tensor. Raises ``DamagedCheckpointError``, ``StorageError``."""
        tensor, result = self.tensor(name), None
        for box in tensor.boxes:
            begins = [max(ours, its) for ours, its in zip(offsets, box.offsets, strict=True)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, lengths, box.offsets, box.shape, strict=True)]
            shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
            if any(n <= 0 for n in shape):
                continue
            rows = zip(begins, box.offsets, box.strides, strict=True)
            first = sum((begin - its) * stride for begin, its, stride in rows)
            memory = self._bytes(box, first * tensor.dtype.itemsize, box._replace(shape=shape).extent, tensor.dtype)
            found = memory.as_strided(shape, box.strides, memory.storage_offset())
            if shape == lengths:
                return found
            result = torch.empty(lengths, dtype=tensor.dtype, device="cpu") if result is None else result
            result[tuple(slice(a - b, c - b) for a, c, b in zip(begins, ends, offsets, strict=True))].copy_(found)
        return torch.empty(lengths, dtype=tensor.dtype, device="cpu") if result is None else result

    def _bytes(self, box: Box, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """So many elements of a box as they are stored, from its byte ``at`` on."""
        nbytes = count * dtype.itemsize
        if (memory := self._at_hand.get(box)) is not None:
            return memory[at : at + nbytes].view(dtype)
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        begin = box.begin + at
        fetch(self._state.files[box.file], [(begin, begin + nbytes, memory.data_ptr())], self._pool)
        return memory.view(dtype)


class TensorComparison:
    """A comparison of a tensor of one stored state with that of the same name and shape in another.

    Its methods raise ``DamagedCheckpointError``, ``StorageError``.
    """

    def __init__(self, one: StateReader, other: StateReader, name: str) -> None:
        """Read nothing yet."""
        self.name = name
        self._readers = one, other
        self._tensors = one.tensor(name), other.tensor(name)
        self._total = 0.0
        self._count = 0
        self._found = ValueDifference()

    def is_same(self) -> bool:
        """Whether type and bytes are the same."""
        one, other = self._tensors
        return one.dtype == other.dtype and all(torch.equal(_raw(a), _raw(b)) for a, b in self._tiles())

    def difference(self) -> ValueDifference | None:
        """How they differ; None: torch cannot compute with that type."""
        for tiles in self._tiles():
            flat = [tile.reshape(-1) for tile in tiles]
            for begin in range(0, len(flat[0]), _CONVERTED):
                pair = [_as_float64(each[begin : begin + _CONVERTED]) for each in flat]
                if pair[0] is None or pair[1] is None:
                    return None
                self._add(pair[0], pair[1])
        if self._count:
            self._found.mean = self._total / self._count
        return self._found

    def _add(self, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
        # By numpy, on this thread: to wake others takes longer than what there is to do.
        with np.errstate(all="ignore"):
            differences = np.abs(one - other)
        if not np.isfinite(total := differences.sum()):
            for side, each in enumerate((one, other)):
                self._found.nan[side] += int(np.isnan(each).sum())
                self._found.infinite[side] += int(np.isinf(each).sum())
            differences = differences[np.isfinite(one) & np.isfinite(other)]
            total = differences.sum()
        if len(differences):
            self._total += float(total)
            self._count += len(differences)
            self._found.greatest = max(self._found.greatest or 0.0, float(differences.max()))

    def _tiles(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        shape, size = self._tensors[0].shape, max(tensor.dtype.itemsize for tensor in self._tensors)
        most = _TILE_BYTES // size
        if not all(_is_contiguous(box) for tensor in self._tensors for box in tensor.boxes):
            most = math.prod(shape)  # of a view with gaps each tile might be spread over all of it
        one, other = self._readers
        for offsets, lengths in tiles(shape, most):
            yield one.tile(self.name, offsets, lengths), other.tile(self.name, offsets, lengths)


def comparisons(
    one: StoredState, other: StoredState, names: Iterable[str], pool: ThreadPoolExecutor
) -> Iterator[TensorComparison]:
    """A comparison of each of the tensors ``names``, about in the order in which they are stored; each is to be made
    before the next one is asked for.

    Raises ``DamagedCheckpointError``, ``StorageError``.
    """
    readers = StateReader(one, pool), StateReader(other, pool)
    for some in _batches(one, names):
        for reader in readers:
            reader.read_ahead(some if len(some) > 1 else ())
        for name in some:
            yield TensorComparison(*readers, name)


def _batches(state: StoredState, names: Iterable[str]) -> Iterator[list[str]]:
    """Tensors that are read together: as many as a tile has bytes, or one alone."""
    batch: list[str] = []
    nbytes = 0
    for name in sorted(names, key=lambda name: min(state.tensors[name].boxes, default=())):
        its = state.tensors[name].numel * state.tensors[name].dtype.itemsize
        if batch and nbytes + its > _TILE_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += its
    if batch:
        yield batch


def pickled_anew(data: bytes, name: str, path: str) -> bytes:
    """The object ``name`` of the checkpoint ``path`` as this torch pickles it; as it is where it could run code."""
    buffer = io.BytesIO()
    try:
        torch.save(load_object(io.BytesIO(data), name, path, weights_only=True), buffer)
    except UntrustedValueError:
        return data
    return buffer.getvalue()


def tiles(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A tensor cut into boxes of at most so many elements, each in a row: the offsets and the shape of each."""
    if 0 in shape:
        return
    row = math.prod(shape[1:])
    if not shape or row * shape[0] <= most:
        yield (0,) * len(shape), shape
    elif row <= most:
        rows = most // row
        for begin in range(0, shape[0], rows):
            count = min(rows, shape[0] - begin)
            yield (begin, *(0,) * (len(shape) - 1)), (count, *shape[1:])
    else:
        for begin in range(shape[0]):
            for offsets, lengths in tiles(shape[1:], most):
                yield (begin, *offsets), (1, *lengths)


def _is_contiguous(box: Box) -> bool:
    rows = zip(box.shape, box.strides, contiguous_strides(box.shape), strict=True)
    return all(n <= 1 or stride == expected for n, stride, expected in rows)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _as_float64(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()
    except (RuntimeError, NotImplementedError, TypeError):  # of some types torch knows the bytes alone
        return None
