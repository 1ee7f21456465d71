"""What is in a checkpoint: its values, each with its shards. The indexes say that; of what DCP wrote, its metadata."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.format.index import Index
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME
from asyncckpt.loading.source import StorageSource, checkpoints_in, is_stock
from asyncckpt.storage import named_steps, step_folder, step_of, storage_for


@dataclass(frozen=True)
class Shard:
    """A part of a value: ``nbytes`` in ``file``. ``offsets`` in the whole tensor, and ``shape``; () for objects."""

    file: str
    nbytes: int
    offsets: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass
class Value:
    """A value of a state dict: a tensor with its ``dtype``, or an object, whose dtype is ""."""

    name: str
    dtype: str
    shards: list[Shard] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        ends = [map(sum, zip(each.offsets, each.shape, strict=True)) for each in self.shards]
        return tuple(map(max, zip(*ends, strict=True)))

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        shards = [vars(shard) for shard in self.shards]
        return {"name": self.name, "dtype": self.dtype, "shape": self.shape, "bytes": self.nbytes, "shards": shards}


def checkpoints_at(path: str) -> list[str]:
    """The checkpoints that ``path`` stands for: itself, or those in it, by their steps, or else by their names; none in
    an empty folder.

    Raises ``CheckpointNotFoundError`` where there is nothing, or something else; ``StorageError``.
    """
    storage = storage_for(path)
    if any(storage.exists(os.path.join(path, name)) for name in (MANIFEST_NAME, METADATA_NAME)):
        return [path]
    names = list(storage.names_in(path))
    steps = named_steps(path)
    if steps or (os.path.isdir(path) and not names):
        return [step_folder(path, step) for step in steps]
    if found := checkpoints_in(path):
        return found
    if step_of(path) is not None and names:
        return [path]  # what made it one is missing
    raise CheckpointNotFoundError("there is no checkpoint here, nor a folder of checkpoints", path=path)


def contents(path: str) -> list[Value]:
    """The values in the checkpoint ``path``, in the order in which they are stored.

    Raises ``CheckpointNotFoundError``, ``DamagedCheckpointError``, ``UntrustedValueError``, ``StorageError``.
    """
    if is_stock(path):
        found: dict[str, Value] = {}
        for name, dtype, shard in _stock_shards(path):
            found.setdefault(name, Value(name, dtype)).shards.append(shard)
        return _alike(found, path)
    return values_of(StorageSource(path).indexes(), path)


def values_of(indexes: Iterable[Index], path: str) -> list[Value]:
    """The values that the indexes of the checkpoint ``path`` have. Raises ``DamagedCheckpointError``."""
    found: dict[str, Value] = {}
    for index in indexes:
        for item in index.items:
            value = found.setdefault(item.name, Value(item.name, item.dtype))
            value.shards.append(Shard(index.data, item.payload_bytes, tuple(item.offsets), tuple(item.shape)))
    return _alike(found, path)


def _alike(values: Mapping[str, Value], path: str) -> list[Value]:
    """The same, where all shards of each have as many dimensions. Raises ``DamagedCheckpointError``."""
    for value in values.values():
        if len({len(shard.shape) for shard in value.shards}) > 1:
            raise DamagedCheckpointError(
                f"the shards of {value.name!r} have different numbers of dimensions", path=path
            )
    return list(values.values())


def _stock_shards(path: str) -> list[tuple[str, str, Shard]]:
    # Only here: all that is ours can be looked at without torch.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from asyncckpt.loading.dcp_reader import read_stock_metadata

    metadata = read_stock_metadata(path, weights_only=True)
    sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}  # of the chunks of a tensor, by their offsets
    shards = []
    for index, place in (metadata.storage_data or {}).items():
        about, file = metadata.state_dict_metadata.get(index.fqn), place.relative_path
        if not isinstance(about, TensorStorageMetadata):
            shards.append((index.fqn, "", Shard(file, place.length)))
            continue
        if index.fqn not in sizes:
            sizes[index.fqn] = {tuple(each.offsets): tuple(each.sizes) for each in about.chunks}
        dtype = about.properties.dtype
        offsets = tuple(index.offset or (0,) * len(about.size))
        shape = sizes[index.fqn].get(offsets, tuple(about.size))
        nbytes = math.prod(shape) * dtype.itemsize
        shards.append((index.fqn, str(dtype).removeprefix("torch."), Shard(file, nbytes, offsets, shape)))
    return shards
