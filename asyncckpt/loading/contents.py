"""List the values of a checkpoint with their shards, from its indexes, or from the metadata of stock DCP."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.format.index import Index
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME
from asyncckpt.loading.source import FolderSource, StorageSource, checkpoints_in, has_rank_files, is_stock, stock_kind
from asyncckpt.storage import is_address, named_steps, step_folder, step_of, storage_for

if TYPE_CHECKING:
    from asyncckpt.loading.rank_files import RankFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """A part of a value: ``nbytes`` in ``file``. ``offsets`` in the whole tensor and ``shape`` are () for objects."""

    file: str
    nbytes: int
    offsets: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass
class Value:
    """A value of a state dict: a tensor with its ``dtype``, or an object, with the dtype ""."""

    name: str
    dtype: str
    shards: list[Shard] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        ends = [map(sum, zip(each.offsets, each.shape, strict=True)) for each in self.shards]
        return tuple(map(max, zip(*ends, strict=True)))

    def facts(self) -> dict[str, Any]:
        """Return the value as JSON data."""
        shards = [vars(shard) for shard in self.shards]
        return {"name": self.name, "dtype": self.dtype, "shape": self.shape, "bytes": self.nbytes, "shards": shards}


def checkpoints_at(path: str) -> list[str]:
    """Return the checkpoint ``path`` itself, or the checkpoints in the folder ``path``.

    They are sorted by step, or by name if no name is of a step. The list is empty for an empty folder.

    Raises ``CheckpointNotFoundError`` if ``path`` is neither a checkpoint nor a folder of checkpoints;
    ``StorageError``.
    """
    storage = storage_for(path)
    is_marked = any(storage.exists(os.path.join(path, name)) for name in (MANIFEST_NAME, METADATA_NAME))
    if is_marked or stock_kind(path) is not None:
        return [path]
    names = list(storage.names_in(path))
    steps = named_steps(path)
    if steps or (os.path.isdir(path) and not names):
        return [step_folder(path, step) for step in steps]
    if found := checkpoints_in(path):
        return found
    if step_of(path) is not None and names:
        return [path]  # a damaged checkpoint: the file that marks a checkpoint is missing
    raise CheckpointNotFoundError("there is no checkpoint here, nor a folder of checkpoints", path=path)


def contents(path: str) -> list[Value]:
    """Return the values of the checkpoint ``path``, in the order in which they are stored.

    Raises ``CheckpointNotFoundError``, ``DamagedCheckpointError``, ``UntrustedValueError``, ``StorageError``.
    """
    if is_stock(path):
        found: dict[str, Value] = {}
        for name, dtype, shard in _stock_shards(path):
            found.setdefault(name, Value(name, dtype)).shards.append(shard)
        return _alike(found, path)
    if stock_kind(path) is not None:
        # Imported here, because checkpoints of this library can be inspected without torch.
        from asyncckpt.loading.rank_files import RankFiles

        return values_of(RankFiles(path).read().indexes(), path)
    return values_of(StorageSource(path).indexes(), path)


def values_of(indexes: Iterable[Index], path: str) -> list[Value]:
    """Return the values in the indexes of the checkpoint ``path``. Raises ``DamagedCheckpointError``."""
    found: dict[str, Value] = {}
    for index in indexes:
        for item in index.items:
            value = found.setdefault(item.name, Value(item.name, item.dtype))
            value.shards.append(Shard(index.data, item.payload_bytes, tuple(item.offsets), tuple(item.shape)))
    return _alike(found, path)


def _alike(values: Mapping[str, Value], path: str) -> list[Value]:
    """Return the values. Raise ``DamagedCheckpointError`` if shards of one value differ in number of dimensions."""
    for value in values.values():
        if len({len(shard.shape) for shard in value.shards}) > 1:
            raise DamagedCheckpointError(
                f"the shards of {value.name!r} have different numbers of dimensions", path=path
            )
    return list(values.values())


def _stock_shards(path: str) -> list[tuple[str, str, Shard]]:
    # Imported here, because checkpoints of this library can be inspected without torch.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from asyncckpt.loading.dcp_reader import read_stock_metadata

    metadata = read_stock_metadata(path, weights_only=True)
    sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}  # shapes of the chunks of a tensor, by their offsets
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


def set_with_file(path: str, held: ExitStack) -> tuple[StorageSource, str] | None:
    """Return the set that contains the file ``path``, and the name of the file there; None: no set contains it.

    ``held`` protects the set against removal. Raises ``DamagedCheckpointError``, ``StorageError``.
    """
    # A link may have replaced a file of a set, or a link from elsewhere may lead to a file of a set.
    for each in (path,) if is_address(path) else (path, os.path.realpath(path)):
        folder = os.path.dirname(each)
        if (above := next((above for above in _upwards(folder) if _is_set(above, folder)), None)) is not None:
            held.enter_context(storage_for(above).reading(above))  # so that retention does not remove it
            source, name = StorageSource(above), each[len(above) :].lstrip("/")
            if name in source.manifest.files:
                return source, name
    return None


def source_at(path: str, held: ExitStack, rank: int = 0, *, trusts: bool = False) -> StorageSource | RankFiles | None:
    """Return the source of the checkpoint ``path``; None: stock DCP wrote it, and no set of files contains it.

    Args:
        path: The folder of the checkpoint.
        held: Protects the set of files against removal.
        rank, trusts: See ``RankFiles.read``.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError, StorageError: There is no checkpoint, it is damaged, or it
            cannot be read.
        UntrustedValueError, MismatchError, FormatError: As ``RankFiles`` raises.
    """
    kind = stock_kind(path)
    if kind == "dcp":
        found = set_with_file(os.path.join(path, METADATA_NAME), held)
        return None if found is None else FolderSource(found[0].path, os.path.dirname(found[1]))
    if kind is None:
        source = StorageSource(path)
        if METADATA_NAME in source.manifest.files or not has_rank_files(source.manifest.files, source.read):
            return source
    # Imported here, because sets of files can be inspected without torch.
    from asyncckpt.loading.rank_files import RankFiles

    return RankFiles(path).read(rank, trusts=trusts)


def _is_set(above: str, folder: str) -> bool:
    """Return whether a set of files is at ``above``. Another program may use the name of the manifest, too."""
    storage, name = storage_for(above), os.path.join(above, MANIFEST_NAME)
    try:
        if not storage.exists(name):
            return False
        found = json.loads(storage.read(name))
        return isinstance(found, dict) and found.keys() >= {"attempt", "files"}
    except (ValueError, RecursionError):
        return above == folder  # in the file's own folder: a damaged set; above: another program's file
    except StorageError as error:  # e.g. an object store that allows reading only some keys
        if above == folder:
            raise
        logger.info("the check whether %s is a set of files failed: %s", above, error)
        return False


def _upwards(folder: str) -> Iterator[str]:
    """Yield ``folder`` and its parents, except the root of the file system, or of all buckets."""
    is_object = is_address(folder)
    while folder != (above := os.path.dirname(folder)) and is_address(folder) == is_object:
        yield folder
        folder = above
