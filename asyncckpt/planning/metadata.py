"""DCP's ``.metadata``, as every torch from 2.6 on reads it."""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from asyncckpt.worker.manifest import data_name

# How many properties of a tensor torch 2.6 knows.
_PROPERTIES = 5


class StoredPlaces(NamedTuple):
    """Where a rank's items stand in its image: their offsets and sizes in bytes, in the order of its final plan.

    ``indices``: of them, where those are not the ones that the first rank knows. ``files``: the prefix and the first
    byte of each data file.
    """

    at: array[int]
    nbytes: array[int]
    indices: Sequence[MetadataIndex] | None
    files: Sequence[tuple[str, int]]

    def storage(self, rank: int, plan: SavePlan) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
        """As DCP's metadata has it, of ``rank`` with the final ``plan``."""
        names = [data_name(rank, number, prefix) for number, (prefix, _) in enumerate(self.files)]
        begins = [begin for _, begin in self.files]
        for index, at, nbytes in zip(
            self.indices or [item.index for item in plan.items], self.at, self.nbytes, strict=True
        ):
            file = bisect_right(begins, at) - 1
            yield index, _StorageInfo(names[file], at - begins[file], nbytes)


def pickle_metadata(metadata: Metadata) -> bytes:
    """DCP's ``.metadata``, in the form that every torch from 2.6 on reads: the properties of a tensor are the first
    five, which all of them know. The strides that torch 2.14 added are not needed to load.

    Sizes and offsets, which nobody can change, stand there once for all tensors that have the same.
    """
    buffer = io.BytesIO()
    # The last protocol without frames: the worker puts other steps in the place of the last one.
    pickler = pickle.Pickler(buffer, protocol=3)
    pickler.dispatch_table = copyreg.dispatch_table | _Sizes().reducers | {TensorProperties: _reduce_properties}
    pickler.dump(metadata)
    return buffer.getvalue()


class _Sizes:
    """How a pickler takes apart what has sizes and offsets, so that it meets equal ones as one object."""

    def __init__(self) -> None:
        self._known: dict[torch.Size, torch.Size] = {}
        self.reducers: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            TensorStorageMetadata: lambda its: self._made_of(its, "size"),
            ChunkStorageMetadata: lambda its: self._made_of(its, "offsets", "sizes"),
            MetadataIndex: lambda its: self._made_of(its, "offset"),
        }

    def _made_of(self, value: Any, *names: str) -> tuple[Any, ...]:
        """As pickle makes it."""
        parts = dict(vars(value))
        for name in names:
            if type(parts.get(name)) is torch.Size:
                parts[name] = self._known.setdefault(parts[name], parts[name])
        return copyreg.__newobj__, (type(value),), parts  # type: ignore[attr-defined]


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    state = properties.__getstate__()[:_PROPERTIES]  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]
