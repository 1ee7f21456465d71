"""How the values of two stored tensors differ, region by region, so that little of them is in memory at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncckpt.exporting.stored import Box, StoredState, StoredTensor, fetch
from asyncckpt.planning.layout import contiguous_strides

# Of a region: some spans, of which those at its ends are read twice.
_REGION_BYTES = 32 << 20
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


class TensorComparison:
    """A comparison of a tensor of one stored state with that of the same name and shape in another."""

    def __init__(self, one: StoredState, other: StoredState, name: str, pool: ThreadPoolExecutor) -> None:
        """Read nothing yet. ``pool``: the threads that read."""
        self._states = one, other
        self._tensors = one.tensors[name], other.tensors[name]
        self._pool = pool
        self._total = 0.0
        self._count = 0
        self._found = ValueDifference()

    def is_same(self) -> bool:
        """Whether type and bytes are the same. Raises ``DamagedCheckpointError``, ``StorageError``."""
        one, other = self._tensors
        return one.dtype == other.dtype and all(torch.equal(_raw(a), _raw(b)) for a, b in self._regions())

    def difference(self) -> ValueDifference | None:
        """How they differ; None: torch cannot compute with that type. Raises as ``is_same``."""
        for regions in self._regions():
            flat = [region.reshape(-1) for region in regions]
            for begin in range(0, len(flat[0]), _CONVERTED):
                pair = [_as_float64(each[begin : begin + _CONVERTED]) for each in flat]
                if pair[0] is None or pair[1] is None:
                    return None
                self._add(pair[0], pair[1])
        if self._count:
            self._found.mean = self._total / self._count
        return self._found

    def _add(self, one: torch.Tensor, other: torch.Tensor) -> None:
        found = self._found
        for side, each in enumerate((one, other)):
            found.nan[side] += int(each.isnan().sum())
            found.infinite[side] += int(each.isinf().sum())
        is_finite = one.isfinite() & other.isfinite()
        differences = (one - other).abs()[is_finite]
        if len(differences):
            self._total += float(differences.sum())
            self._count += len(differences)
            found.greatest = max(found.greatest or 0.0, float(differences.max()))

    def _regions(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        shape, size = self._tensors[0].shape, max(tensor.dtype.itemsize for tensor in self._tensors)
        most = _REGION_BYTES // size
        if not all(_is_contiguous(box) for tensor in self._tensors for box in tensor.boxes):
            most = math.prod(shape)  # of a view with gaps each region might be spread over all of it
        for offsets, lengths in regions(shape, most):
            one, other = (
                _read(state, tensor, offsets, lengths, self._pool)
                for state, tensor in zip(self._states, self._tensors, strict=True)
            )
            yield one, other


def regions(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
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
            for offsets, lengths in regions(shape[1:], most):
                yield (begin, *offsets), (1, *lengths)


def _read(
    state: StoredState,
    tensor: StoredTensor,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    pool: ThreadPoolExecutor,
) -> torch.Tensor:
    """A region of a tensor."""
    size, result = tensor.dtype.itemsize, None
    for box in tensor.boxes:
        begins = [max(ours, its) for ours, its in zip(offsets, box.offsets, strict=True)]
        ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, lengths, box.offsets, box.shape, strict=True)]
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        if any(n <= 0 for n in shape):
            continue
        rows = zip(begins, box.offsets, box.strides, strict=True)
        at = box.begin + size * sum((begin - its) * stride for begin, its, stride in rows)
        nbytes = size * box._replace(shape=shape).extent
        memory = torch.empty(nbytes, dtype=torch.uint8)
        fetch(state.files[box.file], [(at, at + nbytes, memory.data_ptr())], pool)
        found = memory.view(tensor.dtype).as_strided(shape, box.strides)
        if shape == lengths:
            return found
        result = torch.empty(lengths, dtype=tensor.dtype) if result is None else result
        where = tuple(slice(a - b, c - b) for a, c, b in zip(begins, ends, offsets, strict=True))
        result[where].copy_(found)
    return torch.empty(lengths, dtype=tensor.dtype) if result is None else result


def _is_contiguous(box: Box) -> bool:
    rows = zip(box.shape, box.strides, contiguous_strides(box.shape), strict=True)
    return all(n <= 1 or stride == expected for n, stride, expected in rows)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _as_float64(tensor: torch.Tensor) -> torch.Tensor | None:
    convert: Callable[[torch.dtype], torch.Tensor] = tensor.to
    try:
        return convert(torch.complex128 if tensor.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError, TypeError):  # of some types torch knows the bytes alone
        return None
