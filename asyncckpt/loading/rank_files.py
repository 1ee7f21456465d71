"""Read checkpoints of PyTorch's torch_checkpointing, as a source of DCP's metadata and of items.

Each rank has a file of ``torch.save`` for each item: ``<item>_<rank>.pt``. ``metadata.pkl`` names the files of items
that can be resharded. Neither torch_checkpointing nor any class of the pickles is needed. Tensors are read from their
places in the files. All other values are pickled again, into a file in memory.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from asyncckpt.errors import (
    DamagedCheckpointError,
    FormatError,
    MismatchError,
    StorageError,
    located,
    unless_interrupt,
)
from asyncckpt.format.archive import LOCAL_BYTES, record_at
from asyncckpt.format.index import Index, Item
from asyncckpt.format.manifest import MANIFEST_NAME
from asyncckpt.loading.data_file import ChecksummedFile, MemoryFile, StoredFile
from asyncckpt.loading.source import RANKS_METADATA_NAME, StorageSource
from asyncckpt.loading.unpickle import NamelessUnpickler
from asyncckpt.loading.unpickled_tensors import RefusedNameError, StoredPart, TensorUnpickler
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.planning.structure import Keys, is_leaf
from asyncckpt.storage import is_address, storage_for
from asyncckpt.storage.storage import FileStamp, InputFile

_NAME = re.compile(r"(.+)_(\d+)\.pt")
# The name of the file in memory. No file of a rank has this name.
_IN_MEMORY = "(pickled again)"
_ALIGNMENT = 64


class RankFiles:
    """The checkpoint ``path`` of torch_checkpointing: call ``read`` first.

    A checkpoint of this library's manager is a set of files, with checksums. All methods raise
    ``DamagedCheckpointError`` and ``StorageError``.
    """

    def __init__(self, path: str) -> None:
        """Find the files. Also raises ``UntrustedValueError``, ``FormatError``."""
        self.path, self._storage = path, storage_for(path)
        has_manifest = self._storage.exists(os.path.join(path, MANIFEST_NAME))
        self._set = StorageSource(path) if has_manifest else None
        self.attempt = self._set.attempt if self._set is not None else ""
        self._stamps: dict[str, FileStamp | None] = {}
        self._about: dict[str, Any] = {}  # DCP's metadata of each value
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self._keys: dict[str, Keys] = {}
        self._meshes: dict[str, tuple[int, ...]] = {}
        self._items: dict[str, list[Item]] = {_IN_MEMORY: []}  # by file
        self._memory = bytearray()
        names = self._storage.names_in(path) if self._set is None else list(self._set.manifest.files)
        self.files = self._named_files() if RANKS_METADATA_NAME in names else {}
        """The item and the rank of each file, by name."""
        for match in filter(None, map(_NAME.fullmatch, names)):
            self.files.setdefault(match[0], (match[1], int(match[2])))
        self.ranks = max((rank + 1 for _, rank in self.files.values()), default=0)
        """The number of ranks that saved the checkpoint."""

    def read(self, rank: int = 0, *, trusts: bool = False) -> RankFiles:
        """Read the pickles of all files, but no tensors. Also raises ``MismatchError``.

        Args:
            rank: Values that differ by rank are of the file of this rank, if there is one.
            trusts: Whether values may run code, see ``TensorUnpickler``.

        Returns:
            This object.
        """
        for _, _, file, item in sorted((of != rank, of, name, item) for name, (item, of) in self.files.items()):
            with closing(self._stream(file)) as stream, _damage(self._place(file)):
                names = set()
                for keys, leaf in _leaves(_load(stream, trusts), (item,)):
                    name = ".".join(map(str, keys))
                    if name in names or self._keys.setdefault(name, keys) != keys:
                        raise MismatchError(f"two values have the name {name!r}, and DCP could tell only one of them")
                    names.add(name)
                    self._add(name, leaf, file)
        for name, about in self._about.items():
            is_tensor = isinstance(about, dcp.TensorStorageMetadata)
            if is_tensor and sum(math.prod(chunk.sizes) for chunk in about.chunks) != math.prod(about.size):
                have = f"parts of {name!r} are missing: {', '.join(sorted(self.files))} are not the files of all ranks"
                raise DamagedCheckpointError(have, path=self.path)
        return self

    def metadata(self) -> bytes:
        """Return the metadata that DCP would have written."""
        return pickle.dumps(dcp.Metadata(self._about, planner_data=self._keys, storage_data=self._places))

    def data_files(self) -> list[str]:
        """Return the names of the files that have values to load."""
        return list(self._items)

    def indexes(self) -> Iterator[Index]:
        """Yield the indexes of all data files, without checksums."""
        return map(self._index, self._items)

    def open(self, name: str, opened: Callable[[str], InputFile] | None = None) -> ChecksummedFile:
        """Open a data file. The caller closes the file. ``opened``: see ``StorageSource.open``.

        Raises ``StorageError`` if the file has changed since this object was made.
        """
        path = self._place(name)
        if name == _IN_MEMORY:
            return MemoryFile(path, self._index(name), memoryview(self._memory))
        if self._set is None:
            if self._storage.stamp(path) != self._stamps[name]:
                raise StorageError("this file was changed or replaced while it was read: try again", path=path)
            return StoredFile((opened or self._storage.open)(path), self._index(name))
        if "index" not in self._set.manifest.files[name]:
            return MemoryFile(path, self._index(name), memoryview(bytearray(self._set.read(name))))
        file = self._set.open(name, opened)
        file.index = replace(file.index, items=self._items[name])  # its spans stay as they are
        return file

    def damages(self, progress: Callable[[int], object]) -> Iterator[DamagedCheckpointError]:
        """Compare the CRC of each record of each file. Yield an error for each damaged or missing file.

        ``progress``: called with the size of each file.
        """
        for name in self.files:
            try:
                with closing(self._stream(name)) as stream, _damage(self._place(name)):
                    if (bad := zipfile.ZipFile(stream).testzip()) is not None:
                        raise ValueError(f"the record {bad!r} has another CRC")
                    progress(stream.seek(0, os.SEEK_END))
            except DamagedCheckpointError as error:
                yield error

    def _place(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _index(self, name: str) -> Index:
        nbytes = len(self._memory) if name == _IN_MEMORY else self._storage.size(self._place(name)) or 0
        return Index(name, nbytes, self._items[name], ())

    def _stream(self, name: str) -> IO[bytes]:
        """Open a file to read its bytes. The caller closes the file."""
        if self._set is not None and "index" not in self._set.manifest.files.get(name, ()):
            return io.BytesIO(self._set.read(name))
        self._stamps[name] = self._storage.stamp(path := self._place(name))
        if is_address(path):
            return io.BytesIO(self._storage.read(path))
        if not os.path.isfile(path):
            raise DamagedCheckpointError("a file of this checkpoint is missing", path=path)
        return open(path, "rb")

    def _named_files(self) -> dict[str, tuple[str, int]]:
        """Return the item and the rank of each file that the metadata names, by name."""
        found = {}
        with closing(self._stream(RANKS_METADATA_NAME)) as stream, _damage(self._place(RANKS_METADATA_NAME)) as path:
            known = NamelessUnpickler(stream).load()
            if (version := known["version"]) != "2.0":
                raise FormatError(f"its version is {version!r}, and only 2.0 can be read", path=path)
            for item, about in known["metadata"].items():
                owners = {
                    rank
                    for groups in about["nested_path_to_metadata"].values()
                    for each in groups
                    for rank in each["ranks"]
                }
                for rank, layout in about["rank_to_layout_info"].items():
                    name = f"{item}_{rank}.pt" if layout is None else str(layout["file_path"])
                    if layout is None and int(rank) not in owners and not self._storage.exists(self._place(name)):
                        continue  # this rank has not saved the item
                    if layout is not None and layout["serialization_format"]["type"] != "TorchSerialization":
                        raise FormatError(f"{name!r} is no file of torch.save: load it with its own library", path=path)
                    if name.startswith("/") or ".." in name.split("/"):
                        raise ValueError(f"it names a file of another folder: {name!r}")
                    found[name] = str(item), int(rank)
        return found

    def _add(self, name: str, leaf: Any, file: str) -> None:
        """Add a value of a file, unless the file of another rank has brought it."""
        if not isinstance(leaf, StoredPart):
            if self._about.setdefault(name, about := dcp.BytesStorageMetadata()) is about:
                self._remember(Item(name, "object", "", [], [], 0, 0, 0, 0), _pickled(leaf))
            return
        if self._meshes.setdefault(name, leaf.mesh) != leaf.mesh:
            raise MismatchError(f"the ranks have {name!r} on different meshes, {self._meshes[name]} and {leaf.mesh}")
        whole = leaf.shape if leaf.whole is None else leaf.whole
        properties = dcp.TensorProperties(dtype=leaf.dtype)
        about = self._about.setdefault(name, dcp.TensorStorageMetadata(properties, torch.Size(whole), []))
        is_tensor = isinstance(about, dcp.TensorStorageMetadata)
        if not is_tensor or (leaf.whole is None and about.chunks) or (0 in leaf.shape and math.prod(whole)):
            return
        offsets, lengths = leaf.box()
        if (about.properties.dtype, tuple(about.size), tuple(lengths)) != (leaf.dtype, whole, leaf.shape):
            raise ValueError(f"the part of {name!r}, {leaf.dtype} of {leaf.shape}, does not fit the other parts")
        if dcp.MetadataIndex(name, offsets) in self._places:  # a replica
            return
        about.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)))
        place = leaf.begin(), math.prod(lengths) * leaf.dtype.itemsize
        item = Item(name, "tensor", str(leaf.dtype).removeprefix("torch."), lengths, offsets, *place, *place)
        if leaf.strides != contiguous_strides(lengths):
            self._remember(item, leaf.read().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            self._keep(item, file)

    def _remember(self, item: Item, data: bytes) -> None:
        """Add a value to the file in memory."""
        self._memory += bytes(-len(self._memory) % _ALIGNMENT)
        place = len(self._memory), len(data)
        self._memory += data
        self._keep(Item(*item[:5], *place, *place), _IN_MEMORY)

    def _keep(self, item: Item, file: str) -> None:
        self._items.setdefault(file, []).append(item)
        index = dcp.MetadataIndex(item.name, item.offsets if item.kind == "tensor" else None)
        self._places[index] = _StorageInfo(file, item.at, item.nbytes)


@contextmanager
def _damage(path: str) -> Iterator[str]:
    """Raise each error of the body as one about the file ``path``: damaged files fail in many ways."""
    try:
        yield path
    except unless_interrupt(Exception) as error:
        kind = StorageError if isinstance(error, OSError) else DamagedCheckpointError
        raise located(error, path=path, otherwise=kind) from error


def _load(stream: IO[bytes], trusts: bool) -> Any:
    """Return the value in a file of ``torch.save``, with notes in the place of tensors."""
    archive = zipfile.ZipFile(stream)
    folder = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("data.pkl")
    if archive.read(f"{folder}byteorder").decode() != sys.byteorder:
        raise FormatError("the file was written on a machine with another byte order")

    def record(name: str) -> tuple[int, int, int]:
        about = archive.getinfo(f"{folder}{name}")
        if about.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"the record {name!r} is compressed")
        stream.seek(about.header_offset)
        return about.header_offset + record_at(stream.read(LOCAL_BYTES))[1], about.file_size, about.CRC

    record("data.pkl")
    pickled = io.BytesIO(archive.read(f"{folder}data.pkl"))
    unpickler = TensorUnpickler(pickled, lambda key: record(f"data/{key}"), stream)
    unpickler.trusts = trusts
    return unpickler.load()


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield the leaves of a value, each with the keys as DCP notes them."""
    if is_leaf(value, StoredPart):
        yield keys, value
        return
    for key, each in enumerate(value) if isinstance(value, list) else value.items():
        yield from _leaves(each, (*keys, key if isinstance(value, list) else str(key)))


def _pickled(value: Any) -> bytes:
    """Return the value in the format of ``torch.save``. A refused value is a pickle that every reader refuses."""
    try:
        torch.save(value, buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    except RefusedNameError as error:
        module, name = (re.sub(r"[^\w.]", "_", each) for each in error.args)
        return f"crefused.{module}\n{name}\n.".encode()
    return buffer.getvalue()
