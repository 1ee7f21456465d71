"""What is in a checkpoint: its values, each with its shards. The indexes say that; of what DCP wrote, its metadata."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.format.index import Index
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME
from asyncckpt.loading.source import StorageSource, checkpoints_in, is_stock
from asyncckpt.storage import is_address, named_steps, step_folder, step_of, storage_for

logger = logging.getLogger(__name__)


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


class SetsOfFiles:
    """The sets that files are in, each looked for once, and held against removal.

    All methods raise ``DamagedCheckpointError`` and ``StorageError``.
    """

    def __init__(self, held: ExitStack) -> None:
        """Look at nothing yet. ``held`` lets go of the sets."""
        self._held = held
        self._sets: dict[str, tuple[StorageSource, str] | None] = {}  # by the folder of a file

    def with_file(self, path: str) -> tuple[StorageSource, str] | None:
        """The set that has the file ``path``, and the name that it has there; None: it is of none."""
        # A link out of a set has taken the place of a file of it; one into a set leads to a file of that.
        for each in (path,) if is_address(path) else (path, os.path.realpath(path)):
            folder, base = os.path.split(each)
            if folder not in self._sets:
                self._sets[folder] = self._around(folder)
            if (found := self._sets[folder]) is not None and (its := f"{found[1]}{base}") in found[0].manifest.files:
                return found[0], its
        return None

    def _around(self, folder: str) -> tuple[StorageSource, str] | None:
        """Find the set that ``folder`` is in, and what the names of its files begin with there."""
        for above in _upwards(folder):
            if _is_set(above, folder):
                self._held.enter_context(storage_for(above).reading(above))  # retention leaves it alone
                return StorageSource(above), folder[len(above) :].lstrip("/") + "/" * (folder != above)
        return None


def _is_set(above: str, folder: str) -> bool:
    """Whether a set stands ``above``: what else is called as its manifest is somebody else's."""
    storage, name = storage_for(above), os.path.join(above, MANIFEST_NAME)
    try:
        if not storage.exists(name):
            return False
        found = json.loads(storage.read(name))
        return isinstance(found, dict) and found.keys() >= {"attempt", "files"}
    except (ValueError, RecursionError):
        return above == folder  # it is damaged, if it is one
    except StorageError as error:  # as on a store where only some keys may be read
        if above == folder:
            raise
        logger.info("whether %s is a set of files cannot be seen: %s", above, error)
        return False


def _upwards(folder: str) -> Iterator[str]:
    """``folder`` and those above it, but for the root of the file system, or of all buckets."""
    is_object = is_address(folder)
    while folder != (above := os.path.dirname(folder)) and is_address(folder) == is_object:
        yield folder
        folder = above
