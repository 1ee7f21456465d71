"""Write DCP's ``.metadata`` so that every torch from 2.6 on reads it, and call DCP's planners."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import io
import os
import pickle
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError, unless_interrupt
from asyncckpt.format.manifest import data_name
from asyncckpt.planning.forms import has_shards, is_partial
from asyncckpt.planning.structure import StateDict

# The number of tensor properties in torch 2.6.
_PROPERTIES = 5


class StoredPlaces(NamedTuple):
    """The places of a rank's items in its image: offsets and sizes in bytes, in the order of ``indices``.

    ``indices``: the indices of the items; None: the items of the final plan, in that order. ``files``: the prefix and
    the first byte of each data file.
    """

    at: array[int]
    nbytes: array[int]
    indices: Sequence[MetadataIndex] | None
    files: Sequence[tuple[str, int]]

    def storage(self, rank: int, plan: SavePlan) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
        """Yield the entries of DCP's metadata for ``rank`` with the final ``plan``."""
        names = [data_name(rank, number, prefix) for number, (prefix, _) in enumerate(self.files)]
        begins = [begin for _, begin in self.files]
        for index, at, nbytes in zip(
            self.indices or [item.index for item in plan.items], self.at, self.nbytes, strict=True
        ):
            file = bisect_right(begins, at) - 1
            yield index, _StorageInfo(names[file], at - begins[file], nbytes)


def pickle_metadata(metadata: Metadata) -> bytes:
    """Return DCP's ``.metadata`` in the form that every torch from 2.6 on reads.

    Only the first five properties of a tensor are stored, because all these releases know them. A load does not need
    the strides, which torch 2.14 added.

    A pickle memoizes each object for later references, which would take half of the bytes here. So the repeated objects
    are pickled first, with a memo, and popped off the stack. All other objects are pickled without a memo.
    """
    repeated = _Repeated(metadata)
    buffer = io.BytesIO()
    # The last protocol without frames, because the worker replaces the last opcode by others.
    pickler = pickle.Pickler(buffer, protocol=3)
    pickler.dispatch_table = copyreg.dispatch_table | repeated.reducers | _REDUCERS
    known = {field.name for field in fields(metadata)}
    others = [value for name, value in vars(metadata).items() if name not in known]  # Megatron-LM adds fields
    pickler.dump([*_examples(metadata), *repeated.values, *others])
    buffer.seek(-len(pickle.STOP), os.SEEK_CUR)
    buffer.write(pickle.POP)
    pickler.fast = True
    metadata = copy.copy(metadata)
    metadata.planner_data = repeated.planner_data
    pickler.dump(metadata)
    return buffer.getvalue()


class _Repeated:
    """The immutable values that occur many times in a metadata: names, sizes and offsets."""

    def __init__(self, metadata: Metadata) -> None:
        self._known: dict[torch.Size | str, torch.Size | str] = {}
        self.reducers: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            TensorStorageMetadata: lambda its: _made_of(its, size=self._one(its.size)),
            ChunkStorageMetadata: lambda its: _made_of(its, offsets=self._one(its.offsets), sizes=self._one(its.sizes)),
            MetadataIndex: lambda its: _made_of(its, fqn=self._one(its.fqn), offset=self._one(its.offset)),
        }
        """Reducers for the objects that hold these values. They replace equal values by one object."""
        for about in metadata.state_dict_metadata.values():
            if isinstance(about, TensorStorageMetadata):
                self._one(about.size)
                for its in about.chunks:
                    self._one(its.offsets)
                    self._one(its.sizes)
        for name in {info.relative_path: None for info in (metadata.storage_data or {}).values()}:
            self._one(name)
        # References to early objects take fewer bytes, so the names of files come before those of values.
        for name in metadata.state_dict_metadata:
            self._one(name)
        self.planner_data: Any = self._in_paths(metadata.planner_data)
        """DCP's planner data: the path of keys for each name. Equal texts in it are one object."""

    @property
    def values(self) -> Iterable[torch.Size | str]:
        """All repeated values, each once."""
        return self._known.values()

    def _in_paths(self, planner_data: Any) -> Any:
        if type(planner_data) is not dict or not all(type(path) is tuple for path in planner_data.values()):
            return planner_data
        return {self._one(name): tuple(map(self._one, path)) for name, path in planner_data.items()}

    def _one(self, value: Any) -> Any:
        return self._known.setdefault(value, value) if type(value) in (torch.Size, str) else value


def _made_of(value: Any, **parts: Any) -> tuple[Any, ...]:
    """Return pickle's reduction of ``value``, with some attributes replaced by ``parts``."""
    return copyreg.__newobj__, (type(value),), vars(value) | parts  # type: ignore[attr-defined]


def _examples(metadata: Metadata) -> list[Any]:
    """Return one object of each kind, so that their pickles contain all classes and constants of the metadata."""
    found: dict[Any, Any] = {}
    for about in metadata.state_dict_metadata.values():
        if not isinstance(about, TensorStorageMetadata):
            found[type(about)] = about
        elif about.properties.dtype not in found:
            found[about.properties.dtype] = replace(about, chunks=about.chunks[:1])
    for index, info in islice((metadata.storage_data or {}).items(), 1):
        found |= {type(index): index, type(info): info}
    return list(found.values())


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    state = properties.__getstate__()[:_PROPERTIES]  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]


def _reduce_enum(member: Enum) -> tuple[Any, ...]:
    return type(member), (member.value,)


# Python 3.11.0 to 3.11.3 would pickle an enum member as a call of ``getattr``, which a safe unpickler refuses.
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    TensorProperties: _reduce_properties,
    _MEM_FORMAT_ENCODING: _reduce_enum,
    WriteItemType: _reduce_enum,
}


# The versions that determine a plan. Increase the first number if this package makes or describes plans in another way.
PLANNED_BY = (1, *torch.__version__.split(".")[:2])

# torch 2.14 and later.
_KNOWS_PARTS = hasattr(checkpoint, "CheckpointableTensor")


def flat_names(state_dict: StateDict, planner: SavePlanner | None) -> frozenset[str]:
    """Return the names of the values of ``state_dict`` that DCP's default planner gives.

    Raises ``UnsavableStateError`` if two values have the same name.
    """
    if type(planner) is DefaultSavePlanner and not planner.flatten_state_dict:
        return frozenset(map(str, state_dict))
    with planning():
        return frozenset(flatten_state_dict(dict(state_dict))[0])


def options(planner: DefaultSavePlanner) -> dict[str, bool]:
    """Return the options of ``planner`` that determine its plans."""
    names = "flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank"
    return {name: getattr(planner, name) for name in names}


def fresh(planner: SavePlanner | None) -> SavePlanner:
    """Return a planner of DCP with the options of ``planner``, and no state of earlier saves.

    Return a user's own planner itself.
    """
    if planner is None:
        return DefaultSavePlanner()
    if type(planner) is not DefaultSavePlanner:
        return planner
    return DefaultSavePlanner(**options(planner))


def kept_items(local: SavePlan, final: SavePlan) -> bytes | SavePlan:
    """Return which local items a rank writes by its final plan of DCP's default planner.

    The answer has a byte for each item of the local plan: 1 if this rank writes the item, 0 if another rank does. The
    planner changes nothing else that the rank needs to know. If the items of the plan do differ, return the whole plan.
    """
    kept, left = bytearray(), deque(final.items)
    for item in local.items:
        is_kept = bool(left) and left[0].index == item.index
        kept.append(is_kept)
        if is_kept:
            left.popleft()
    return final if left else bytes(kept)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Turn errors of a planner into ``UnsavableStateError``."""
    try:
        yield
    except UnsavableStateError:
        raise
    except unless_interrupt(Exception) as error:
        raise UnsavableStateError(f"the state dict cannot be planned: {type(error).__name__}: {error}") from error


def is_sharded(value: object) -> bool:
    """Return whether DCP divides ``value`` in its own way (ShardedTensor and similar types, but not DTensor)."""
    if isinstance(value, torch.Tensor) and has_shards(value):
        return True
    return hasattr(value, "__create_write_items__") and not isinstance(value, DTensor) or hasattr(value, "local_shards")


def check_shards(state: Mapping[str, Any]) -> None:
    """Raise ``UnsavableStateError`` if a tensor is a part of a larger one in a way that DCP cannot save."""
    for name, value in state.items():
        if is_partial(value):
            raise UnsavableStateError(
                f"{name!r} is a DTensor placed as {list(value.placements)}: each rank has only a summand of its values;"
                " redistribute it to Replicate() or Shard() first"
            )
        if isinstance(value, torch.Tensor) and has_shards(value) and not _KNOWS_PARTS:
            raise UnsavableStateError(
                f"{name!r} says by its global_shape and global_offsets that it is a part of a larger tensor, and torch"
                f" {torch.__version__} cannot save it as one; take torch 2.14 or later, a DTensor, or leave it out"
            )
