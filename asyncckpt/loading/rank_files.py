"""Read checkpoints of PyTorch's torch_checkpointing, as a source of DCP's metadata and of items.

Each rank has a file of ``torch.save`` for each item: ``<item>_<rank>.pt``. ``metadata.pkl`` names the files of items
that can be resharded, in this or another format. Neither torch_checkpointing nor any class of the pickles is needed.
Tensors are read from their places in the files. All other values are pickled again, into a file in memory.

As in torch_checkpointing, Hugging Face's weights are the item "model", with a rank for each file.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import pickle
import posixpath
import re
import sys
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

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
from asyncckpt.format.archive import LOCAL_BYTES, place_before, record_at
from asyncckpt.format.index import Index, Item
from asyncckpt.format.manifest import MANIFEST_NAME
from asyncckpt.loading.data_file import ChecksummedFile, FilePart, MemoryFile, StoredFile, fill, read_plain, read_pool
from asyncckpt.loading.safetensors_parts import parts_in, shards_of
from asyncckpt.loading.source import HF_INDEX_NAME, HF_NAME, RANKS_METADATA_NAME, StorageSource, has_rank_files
from asyncckpt.loading.unpickle import NamelessUnpickler
from asyncckpt.loading.unpickled_tensors import ReadBytes, RefusedNameError, StoredPart, TensorUnpickler
from asyncckpt.planning.boxes import Box, StoredTensor
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.planning.structure import Keys, is_leaf
from asyncckpt.shm.memcpy import Destinations
from asyncckpt.shm.segment import Descriptor
from asyncckpt.storage import is_address, storage_for
from asyncckpt.storage.storage import FileStamp, InputFile

_NAME = re.compile(r"(.+)_(\d+)\.pt")
_TORCH, _SAFETENSORS, _JSON = "TorchSerialization", "SafetensorsSerialization", "JsonSerialization"
_KINDS = (_TORCH, _SAFETENSORS, _JSON, "RawSerialization")
# The names of files that are made of others. No file of a rank has these names.
_IN_MEMORY, _TURNED = "(pickled again)", "(made contiguous)"
_ALIGNMENT = 64
# The size of a small read. The directory of an archive with 400 tensors has 36 KB.
_BUFFER_BYTES = 64 << 10
_PIECE_BYTES = 8 << 20  # the size of a read of a whole file
# Maximum number of values in a file. Shared values count as often as they occur.
_MOST_VALUES = 4 << 20


class _File(NamedTuple):
    """A file of a rank. ``kind``: torch_checkpointing's name of its format."""

    item: str
    rank: int
    kind: str = _TORCH

    @property
    def is_archive(self) -> bool:
        """Whether the file is one of ``torch.save``, with CRCs."""
        return self.kind == _TORCH


class RankFiles:
    """The checkpoint ``path`` of torch_checkpointing, or of Hugging Face: call ``read`` first.

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
        self._items: dict[str, list[Item]] = {}  # by file
        self._memory = bytearray()
        self._turned: list[tuple[str, StoredPart]] = []  # the tensors of ``_TURNED``, and their files
        self._sharding: dict[str, dict[str, tuple[Keys, Any]]] = {}  # by item, and by the name within the item
        self._expected: set[str] = set()  # names of tensors of Hugging Face
        names = set(self._storage.names_in(path) if self._set is None else self._set.manifest.files)
        self.files: dict[str, _File] = {}
        """The files, by name."""
        self.ranks = 1
        """The number of ranks that saved the checkpoint."""
        if has_rank_files(names, self._whole):
            self._find_named_files(names)
            for match in filter(None, map(_NAME.fullmatch, sorted(names))):
                if int(match[2]) < self.ranks and match[1] not in self._sharding:
                    self.files.setdefault(match[0], _File(match[1], int(match[2])))
        else:
            self._find_weights(HF_INDEX_NAME if HF_INDEX_NAME in names else None)

    def read(self, rank: int = 0, *, trusts: bool = False) -> RankFiles:
        """Read the pickles and headers of all files, but no tensors. Also raises ``MismatchError``.

        Args:
            rank: Values that differ by rank are of the file of this rank, if there is one.
            trusts: Whether values may run code, see ``TensorUnpickler``.

        Returns:
            This object.
        """
        names: set[str] = set()
        order = sorted(self.files, key=lambda name: (self.files[name].rank != rank, self.files[name].rank, name))
        # The code of trusted values runs on the caller's thread. Files that are one value are in memory one at a time.
        ahead = {} if trusts else {name: None for name in order if self.files[name].kind in (_TORCH, _SAFETENSORS)}
        leaves = functools.partial(self._leaves, trusts)
        with read_pool(self.path) as pool:
            found = pool.map(leaves, ahead)
            for file in order:
                with _damage(self._place(file)):
                    if not self._expected:
                        names.clear()
                    for keys, shards in next(found) if file in ahead else leaves(file):
                        name = ".".join(map(str, keys))
                        if name in names or self._keys.setdefault(name, keys) != keys:
                            raise MismatchError(f"two values have the name {name!r}, and DCP could tell only one")
                        names.add(name)
                        for each in shards:
                            self._add(name, each, file)
        if missing := sorted(self._expected - self._about.keys()):
            raise DamagedCheckpointError(f"no file has the tensor {missing[0]!r}", path=self._place(HF_INDEX_NAME))
        for name, about in self._about.items():
            if isinstance(about, dcp.TensorStorageMetadata) and not _is_whole(name, about):
                have = f"parts of {name!r} are missing: {', '.join(sorted(self.files))} are not the files of all ranks"
                raise DamagedCheckpointError(f"{have}, or their parts overlap", path=self.path)
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
        if name == _TURNED:
            reads = [functools.partial(self._contiguous, *each) for each in self._turned]
            return _TurnedFile(self.path, self._index(name), reads)
        if self._set is None:
            self._check_unchanged(name)
            return StoredFile((opened or self._storage.open)(path), self._index(name))
        if "index" not in self._set.manifest.files[name]:
            return MemoryFile(path, self._index(name), memoryview(bytearray(self._set.read(name))))
        file = self._set.open(name, opened)
        file.index = replace(file.index, items=self._items[name])  # its spans stay as they are
        return file

    def damages(self, progress: Callable[[int], object]) -> Iterator[DamagedCheckpointError]:
        """Compare the CRC of each record of each archive. Yield an error for each damaged or missing file.

        ``progress``: called with the size of each file.
        """
        for name, file in self.files.items():
            try:
                with _damage(self._place(name)):
                    nbytes, read_bytes = self._reader(name)
                    if file.is_archive and (
                        bad := zipfile.ZipFile(_stream(nbytes, read_bytes, _PIECE_BYTES)).testzip()
                    ):
                        raise ValueError(f"the record {bad!r} has another CRC")
                    progress(nbytes)
            except DamagedCheckpointError as error:
                yield error

    def _place(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _index(self, name: str) -> Index:
        items = self._items[name]
        kind = _TurnedIndex if name == _TURNED else Index
        return kind(name, max(item.at + item.nbytes for item in items), items, ())

    def _check_unchanged(self, name: str) -> None:
        """Raise ``StorageError`` if a file has changed since its header was read. Files of a set have checksums."""
        if self._set is None and self._storage.stamp(path := self._place(name)) != self._stamps[name]:
            raise StorageError("this file was changed or replaced while it was read: try again", path=path)

    def _contiguous(self, name: str, part: StoredPart) -> memoryview:
        """Return the bytes of a tensor in the file ``name``, made contiguous."""
        with _damage(self._place(name)):
            self._check_unchanged(name)
            return part.read().contiguous().view(-1).view(torch.uint8).numpy().data

    def _whole(self, name: str) -> bytes:
        """Return all bytes of a file."""
        nbytes, read_bytes = self._reader(name)
        return read_bytes(0, nbytes)

    def _reader(self, name: str) -> tuple[int, ReadBytes]:
        """Return the size of a file, and the function that reads its bytes."""
        if self._set is not None and "index" not in self._set.manifest.files.get(name, ()):
            data = self._set.read(name)
            return len(data), lambda begin, end: data[begin:end]
        stamp = self._stamps[name] = self._storage.stamp(path := self._place(name))
        if stamp is None:
            raise DamagedCheckpointError("a file of this checkpoint is missing", path=path)
        source, place = (self._storage, path) if self._set is None else (self._set, name)
        # A file on an object store holds no descriptor, and each opening is a request.
        opened: Callable[[str], Any] = functools.cache(source.open) if is_address(path) else source.open

        def read_bytes(begin: int, end: int) -> bytes:
            file = opened(place)
            if isinstance(file, ChecksummedFile):
                fill(into := memoryview(bytearray(end - begin)), file, begin)
                return bytes(into)
            with closing(file):
                return read_plain(file, begin, end)

        return stamp.nbytes, read_bytes

    def _find_named_files(self, names: set[str]) -> None:
        """Find the files that the metadata names. ``names``: the files that are there."""
        with _damage(self._place(RANKS_METADATA_NAME)) as path:
            known = NamelessUnpickler(io.BytesIO(self._whole(RANKS_METADATA_NAME))).load()
            if (version := known["version"]) != "2.0":
                raise FormatError(f"its version is {version!r}, and only 2.0 can be read", path=path)
            self.ranks = int(known["world_size"])
            for item, about in known["metadata"].items():
                groups = about["nested_path_to_metadata"]
                # Keys become text, as DCP notes the keys of a dict.
                keyed = ((tuple(map(str, json.loads(keys))), its) for keys, its in groups.items())
                self._sharding[str(item)] = {".".join(keys): (keys, its) for keys, its in keyed}
                owners = {rank for its in groups.values() for each in its for rank in each["ranks"]}
                for rank in sorted(owners | set(about["rank_to_layout_info"])):
                    layout = about["rank_to_layout_info"].get(rank)
                    name, kind = f"{item}_{rank}.pt", _TORCH
                    if layout is not None:
                        name, kind = layout["file_path"], layout["serialization_format"]["type"]
                    elif rank not in owners and name not in names:
                        continue  # this rank has not saved the item
                    if kind not in _KINDS:
                        raise FormatError(f"{name!r} has the format {kind!r}: load it with its own library", path=path)
                    file = self.files.setdefault(_inside(name), _File(str(item), int(rank), kind))
                    if file.item != str(item):
                        raise ValueError(f"{name!r} is the file of two items, {file.item!r} and {str(item)!r}")

    def _find_weights(self, index: str | None) -> None:
        """Find the files of Hugging Face's weights."""
        weight_map = {"": HF_NAME}
        with _damage(self._place(index or HF_NAME)) as path:
            if index is not None:
                weight_map = json.loads(self._storage.read(path))["weight_map"]
                self._expected = {f"model.{name}" for name in weight_map}
                if not weight_map:
                    raise ValueError("it names no tensor")
            for number, name in enumerate(sorted({*map(_inside, weight_map.values())})):
                self.files[name] = _File("model", number, _SAFETENSORS)

    def _leaves(self, trusts: bool, file: str) -> list[tuple[Keys, list[Any]]]:
        """Read the pickle or the header of a file. Return the leaves, each with the keys as DCP notes them.

        A leaf is a value, or all shards of a tensor.
        """
        item, rank, kind = self.files[file]
        with _damage(self._place(file)):
            nbytes, read_bytes = self._reader(file)
            if kind == _SAFETENSORS:
                parts, known = parts_in(_stream(nbytes, read_bytes), nbytes, read_bytes), self._sharding.get(item, {})
                found = []
                for name, part in parts.items():
                    keys, groups = known.get(name, ((name,), None))
                    shards = [part]
                    if groups is not None:
                        its = (each["sharding_metadata"] for each in groups if rank in each["ranks"])
                        shards = [shard for about in its for shard in shards_of(part, about, rank)]
                        if not shards and 0 not in part.shape:
                            raise ValueError(f"{RANKS_METADATA_NAME} names no shard of {name!r} for the rank {rank}")
                    found.append(((item, *keys), shards))
                return found
            if kind == _TORCH:
                read_head = None
                with ExitStack() as held:
                    if self._set is None and not is_address(self.path):
                        # Through the page cache: many small reads of the device would take longer.
                        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                        opened = held.enter_context(Descriptor.of(os.open, self._place(file), flags)).fileno()
                        read_head = functools.partial(os.pread, opened, LOCAL_BYTES)
                    value = _load(nbytes, read_bytes, trusts, read_head)
            else:
                data = read_bytes(0, nbytes)
                value = json.loads(data) if kind == _JSON else data
            if (count := _count(value, {})) > _MOST_VALUES:
                raise ValueError(f"it has {count:,} values, with shared ones, and at most {_MOST_VALUES:,} are read")
            return list(_flat(value, (item,)))

    def _add(self, name: str, leaf: Any, file: str) -> None:
        """Add a value of a file, unless the file of another rank has brought it."""
        if not isinstance(leaf, StoredPart):
            if self._about.setdefault(name, about := dcp.BytesStorageMetadata()) is about:
                self._remember(Item(name, "object", "", [], [], 0, 0, 0, 0), _pickled(leaf))
            return
        if 0 not in leaf.shape and self._meshes.setdefault(name, leaf.mesh) != leaf.mesh:
            raise MismatchError(f"the ranks have {name!r} on different meshes, {self._meshes[name]} and {leaf.mesh}")
        whole = leaf.shape if leaf.whole is None else leaf.whole
        properties = dcp.TensorProperties(dtype=leaf.dtype)
        about = self._about.setdefault(name, dcp.TensorStorageMetadata(properties, torch.Size(whole), []))
        is_tensor = isinstance(about, dcp.TensorStorageMetadata)
        if not is_tensor or (leaf.whole is None and about.chunks) or (0 in leaf.shape and math.prod(whole)):
            return
        offsets, lengths = list(leaf.offsets or (0,) * len(whole)), list(leaf.shape)
        if (about.properties.dtype, tuple(about.size)) != (leaf.dtype, whole):
            raise ValueError(f"the part of {name!r}, {leaf.dtype} of {leaf.shape}, does not fit the other parts")
        if dcp.MetadataIndex(name, offsets) in self._places:  # a replica
            return
        about.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)))
        place = leaf.begin(), math.prod(lengths) * leaf.dtype.itemsize
        item = Item(name, "tensor", str(leaf.dtype).removeprefix("torch."), lengths, offsets, *place, *place)
        if leaf.strides == contiguous_strides(lengths) or 0 in lengths:
            self._keep(item, file)
            return
        made = self._items.get(_TURNED, [])
        place = made[-1].at + made[-1].nbytes if made else 0, place[1]
        self._keep(Item(*item[:5], *place, *place), _TURNED)
        self._turned.append((file, leaf))

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


class _TurnedIndex(Index):
    """The index of a ``_TurnedFile``. Each span is a whole tensor."""

    @functools.cached_property
    def bounds(self) -> array[int]:
        return array("Q", [*(item.at for item in self.items), self.nbytes])


class _TurnedFile(ChecksummedFile):
    """Tensors that are not contiguous in their files. Each tensor is read and made contiguous when it is needed."""

    def __init__(self, path: str, index: Index, reads: Iterable[Callable[[], memoryview]]) -> None:
        """Read nothing yet. ``reads``: the functions that read the items."""
        super().__init__(path, index, 0)  # a run is one span
        self._reads = {item.at: read for item, read in zip(index.items, reads, strict=True)}

    def close(self) -> None:
        pass

    def _fetch(self, begin: int, end: int, destinations: Destinations) -> Iterator[FilePart]:
        yield FilePart(begin, self._reads[begin]())


class _Stream(io.RawIOBase):
    """A file to read by a cursor. The end of the file is read once, because archives have their directory there."""

    def __init__(self, nbytes: int, read_bytes: ReadBytes) -> None:
        self._nbytes, self._read_bytes, self._at = nbytes, read_bytes, 0
        self._end: bytes | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end_at = max(0, self._nbytes - _BUFFER_BYTES)
        if self._at < end_at:
            data = self._read_bytes(self._at, min(self._at + len(buffer), self._nbytes))
        else:
            if self._end is None:
                self._end = self._read_bytes(end_at, self._nbytes)
            data = self._end[self._at - end_at :][: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _stream(nbytes: int, read_bytes: ReadBytes, at_once: int = _BUFFER_BYTES) -> io.BufferedReader:
    return io.BufferedReader(_Stream(nbytes, read_bytes), at_once)


@contextmanager
def _damage(path: str) -> Iterator[str]:
    """Raise each error of the body as one about the file ``path``: damaged files fail in many ways."""
    try:
        yield path
    except unless_interrupt(Exception) as error:
        kind = StorageError if isinstance(error, OSError) else DamagedCheckpointError
        raise located(error, path=path, otherwise=kind) from error


def _inside(name: Any) -> str:
    """Return the name of a file. Raise ``ValueError`` if it names a file of another folder."""
    if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"it names a file of another folder: {name!r}")
    return posixpath.normpath(name)


def _is_whole(name: str, about: dcp.TensorStorageMetadata) -> bool:
    """Return whether each element of a tensor is in exactly one chunk."""
    shapes = ((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks)
    boxes = [Box("", 0, offsets, lengths, contiguous_strides(lengths)) for offsets, lengths in shapes]
    return StoredTensor(name, about.properties.dtype, tuple(about.size), boxes).is_whole()


def _load(nbytes: int, read_bytes: ReadBytes, trusts: bool, read_head: Callable[[int], bytes] | None) -> Any:
    """Return the value in a file of ``torch.save``, with notes in the place of tensors.

    ``read_head`` reads the header of a record; None: each read is expensive, so compute each place that is sure.
    """
    archive = zipfile.ZipFile(_stream(nbytes, read_bytes))
    records = sorted(archive.infolist(), key=lambda each: each.header_offset)
    ends = {one.filename: after.header_offset for one, after in pairwise(records)}
    folder = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("data.pkl")

    def record(name: str) -> tuple[int, int, int]:
        about = archive.getinfo(f"{folder}{name}")
        if about.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"the record {name!r} is compressed")
        begin = about.header_offset
        at = place_before(about, ends.get(about.filename, 0)) if read_head is None else None
        if at is None:
            at = begin + record_at(read_head(begin) if read_head else read_bytes(begin, begin + LOCAL_BYTES))[1]
        return at, about.file_size, about.CRC

    record("data.pkl")
    pickled = io.BytesIO(archive.read(f"{folder}data.pkl"))
    # The size is compared first, because a record can be large.
    if record("byteorder")[1] != len(sys.byteorder) or archive.read(f"{folder}byteorder").decode() != sys.byteorder:
        raise FormatError("the file was written on a machine with another byte order")
    unpickler = TensorUnpickler(pickled, lambda key: record(f"data/{key}"), read_bytes)
    unpickler.trusts = trusts
    return unpickler.load()


def _count(value: Any, known: dict[int, int]) -> int:
    """Return the number of values in a value, with itself. ``known``: the numbers so far, by identity."""
    if (key := id(value)) not in known:
        entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        known[key] = 1 + sum(_count(each, known) for each in entries)
    return known[key]


def _flat(value: Any, keys: Keys) -> Iterator[tuple[Keys, list[Any]]]:
    """Yield the leaves of a value, each with the keys as DCP notes them."""
    if is_leaf(value, StoredPart):
        yield keys, [value]
        return
    for key, each in enumerate(value) if isinstance(value, list) else value.items():
        yield from _flat(each, (*keys, key if isinstance(value, list) else str(key)))


def _pickled(value: Any) -> bytes:
    """Return the value in the format of ``torch.save``. A refused value is a pickle that every reader refuses."""
    try:
        torch.save(value, buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    except RefusedNameError as error:
        module, name = (re.sub(r"[^\w.]", "_", each) for each in error.args)
        return f"crefused.{module}\n{name}\n.".encode()
    return buffer.getvalue()
