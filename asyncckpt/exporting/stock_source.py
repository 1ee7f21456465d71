"""Find the state in a checkpoint of stock DCP. Each tensor is stored in the format of ``torch.save``.

The format is an archive, or the older form that this library also uses (see ``asyncckpt/planning/layout.py``). This
module finds the place and order of a tensor's bytes without running any code of the pickle. Its unpickler knows only
the names that rebuild a plain tensor, and replaces them by functions that return a note of their arguments.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from asyncckpt.errors import DamagedCheckpointError, UnsavableStateError
from asyncckpt.exporting.checkpoint_source import nesting, whole
from asyncckpt.exporting.source_files import SourceFiles
from asyncckpt.exporting.stored import Box, StoredObject, StoredState
from asyncckpt.format.archive import LOCAL_BYTES, LOCAL_MAGIC, record_at
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.loading.data_file import ChecksummedFile, read_plain, read_pool
from asyncckpt.loading.dcp_reader import read_stock_metadata
from asyncckpt.storage.storage import InputFile

# Bytes to read first, and at most, to find a tensor's bytes. The records before the bytes take a kilobyte, or some
# pages if all records are aligned to pages.
_HEAD_BYTES, _LONGEST_HEAD_BYTES = 4 << 10, 256 << 10
# Heads (the first bytes of items) with a smaller distance are read together.
_NEAR_BYTES = 64 << 10
_READ_BYTES = 1 << 20

# The dtypes of torch's storage classes. The classes themselves would give the same dtypes, but with a warning.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


class _Place(NamedTuple):
    """The place of an item in a file of DCP, in bytes."""

    at: int
    nbytes: int
    key: MetadataIndex


class _Note(NamedTuple):
    """A plain tensor.

    ``begin`` is the place of its first element: in elements of the storage at first, in bytes of the file after
    ``_placed``.
    """

    dtype: torch.dtype
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def open_stock(folder: SourceFiles) -> StoredState:
    """Return the state in a checkpoint, which has no checksums.

    Args:
        folder: The folder of the checkpoint.

    Raises:
        DamagedCheckpointError, StorageError: The checkpoint is damaged, or cannot be read.
        UnsavableStateError: A value is stored in a way that only DCP can read.
    """
    path = folder.folder
    folder.watch(METADATA_NAME)
    metadata = read_stock_metadata(path, weights_only=True)
    places: dict[str, list[_Place]] = {}
    for index, info in (metadata.storage_data or {}).items():
        if transforms := getattr(info, "transform_descriptors", None):
            raise UnsavableStateError(
                f"{index.fqn!r} is stored by way of the extensions {list(transforms)}: load it with"
                " torch.distributed.checkpoint, save it without them, and export that",
                path=path,
            )
        places.setdefault(info.relative_path, []).append(_Place(info.offset, info.length, index))
    files: dict[str, ChecksummedFile] = {}
    known = metadata.state_dict_metadata
    state = StoredState(path, {}, {}, nesting(metadata), files)
    sizes = {name: about.size for name, about in known.items() if isinstance(about, TensorStorageMetadata)}
    boxes: dict[str, list[tuple[torch.dtype, Box]]] = {name: [] for name in known}
    with read_pool(path) as pool:
        for name, its in places.items():
            its.sort(key=lambda place: place.at)
            files[name] = folder.open(name, [(place.key.fqn, place.at, place.nbytes) for place in its])
            tensors = [place for place in its if place.key.fqn in sizes]
            with closing(folder.plain(name)) as file:
                for place, note in _notes(file, tensors, pool):
                    its_name = place.key.fqn
                    boxes[its_name].append((note.dtype, _box(name, place, note, len(sizes[its_name]), path)))
            for place in its:
                if place.key.fqn not in sizes:
                    state.objects[place.key.fqn] = StoredObject(name, place.at, place.at + place.nbytes)
    for name, about in known.items():
        if isinstance(about, TensorStorageMetadata):
            dtypes = {dtype for dtype, _ in boxes[name]} or {about.properties.dtype}
            state.tensors[name] = whole(name, dtypes, tuple(about.size), [box for _, box in boxes[name]], path)
        elif name not in state.objects:
            raise DamagedCheckpointError(f".metadata does not say where {name!r} is stored", path=path)
    return state


def _box(file: str, place: _Place, note: _Note, dims: int, path: str) -> Box:
    offsets = tuple(place.key.offset or (0,) * dims)
    if len(offsets) != len(note.shape):
        raise DamagedCheckpointError(f"{place.key.fqn!r} has {len(offsets)} dimensions, and not its part", path=path)
    return Box(file, note.begin, offsets, note.shape, note.strides)


def _notes(file: InputFile, places: Sequence[_Place], pool: ThreadPoolExecutor) -> Iterator[tuple[_Place, _Note]]:
    """Yield the note of the tensor at each place. Raises ``DamagedCheckpointError``, ``UnsavableStateError``."""
    groups: list[list[_Place]] = []
    for place in places:
        near = groups and place.at + _HEAD_BYTES - groups[-1][0].at <= _READ_BYTES
        if near and place.at - groups[-1][-1].at <= _NEAR_BYTES:
            groups[-1].append(place)
        else:
            groups.append([place])
    for found in pool.map(lambda group: _read_group(file, group), groups):
        yield from found


def _read_group(file: InputFile, group: Sequence[_Place]) -> list[tuple[_Place, _Note]]:
    begin = group[0].at
    data = read_plain(file, begin, group[-1].at + _HEAD_BYTES)
    found = []
    for place in group:
        try:
            note = _note(data[place.at - begin : place.at - begin + min(place.nbytes, _HEAD_BYTES)], place)
            if note is None:
                note = _note(read_plain(file, place.at, place.at + min(place.nbytes, _LONGEST_HEAD_BYTES)), place)
            if note is None:
                raise pickle.UnpicklingError("there is not what torch.save writes of one tensor")
        except UnsavableStateError as error:
            raise UnsavableStateError(error.message, path=file.path) from error
        except Exception as error:  # invalid pickles fail in many ways
            raise DamagedCheckpointError(
                f"{place.key.fqn!r}, from {place.at:,} on, cannot be read: {type(error).__name__}: {error}",
                path=file.path,
            ) from error
        found.append((place, note))
    return found


def _note(head: bytes, place: _Place) -> _Note | None:
    """Return the note of the item that begins with ``head``; None: more bytes of the item are needed."""
    return _note_of_archive(head, place) if head.startswith(LOCAL_MAGIC) else _note_of_older(head, place)


def _note_of_archive(head: bytes, place: _Place) -> _Note | None:
    note: _Note | None = None
    at = 0
    while (at := head.find(LOCAL_MAGIC, at)) >= 0 and at + LOCAL_BYTES <= len(head):
        name, payload_at = record_at(head, at)
        if name.endswith(b"/data.pkl") and note is None:
            if payload_at >= len(head):
                return None
            note = _checked(_Unpickler(io.BytesIO(head[payload_at:])).load(), place)
        elif name.endswith(b"/byteorder") and not _BYTE_ORDER.startswith(
            head[payload_at : payload_at + len(_BYTE_ORDER)]
        ):
            raise _other_order(place)
        elif name.endswith(b"/data/0") and note is not None:
            return _placed(note, payload_at, place)
        at += len(LOCAL_MAGIC)
    return None


def _note_of_older(head: bytes, place: _Place) -> _Note:
    if sys.byteorder != "little":
        raise _other_order(place)
    stream = io.BytesIO(head)
    known = [_Unpickler(stream).load() for _ in range(2)]
    if known != [MAGIC_NUMBER, PROTOCOL_VERSION]:
        raise pickle.UnpicklingError(f"it begins with {known!r}")
    _Unpickler(stream).load()  # skip the facts about the machine that saved the tensor
    note = _checked(_Unpickler(stream).load(), place)
    if len(_Unpickler(stream).load()) != 1:
        raise pickle.UnpicklingError("it has not one storage")
    return _placed(note, stream.tell() + 8, place)  # the bytes follow the number of elements


def _checked(note: Any, place: _Place) -> _Note:
    if not isinstance(note, _Note):
        raise UnsavableStateError(f"{place.key.fqn!r} is stored as a {type(note).__name__}: no plain tensor")
    return note


def _placed(note: _Note, payload_at: int, place: _Place) -> _Note:
    """Return the note with ``begin`` in bytes of the file. The storage begins at byte ``payload_at`` of the item."""
    begin = end = payload_at
    if 0 not in note.shape:  # an empty tensor may begin anywhere
        begin += note.begin * note.dtype.itemsize
        extent = 1 + sum((n - 1) * stride for n, stride in zip(note.shape, note.strides, strict=True))
        end = begin + extent * note.dtype.itemsize
    if min((*note.shape, *note.strides), default=0) < 0 or not payload_at <= begin <= end <= place.nbytes:
        raise ValueError("its elements do not stand in it")
    return note._replace(begin=place.at + begin)


def _other_order(place: _Place) -> UnsavableStateError:
    return UnsavableStateError(f"{place.key.fqn!r} has its bytes in another order than this machine")


class _Unpickler(pickle.Unpickler):
    """An unpickler for one plain tensor.

    All names resolve to objects of this module, or to dtypes, which cannot be called.
    """

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                return _rebuild
            case "torch._utils", "_rebuild_parameter":
                return _rebuild_parameter
            case "collections", "OrderedDict":
                return _Hooks
            case (("torch" | "torch.storage"), "UntypedStorage"):
                return torch.uint8
            case "torch", _:
                found = _STORAGES.get(name) or getattr(torch, name, None)
                if isinstance(found, torch.dtype):
                    return found
        raise UnsavableStateError(
            f"a tensor is stored by way of {module}.{name}, and only plain ones can be exported; leave it out by"
            " exporting another part of the state, or load it with torch.distributed.checkpoint"
        )

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, _, _, _, *view = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or view not in ([], [None]):
            raise pickle.UnpicklingError(f"it refers to {pid!r}")
        return dtype


_BYTE_ORDER = sys.byteorder.encode()


class _Hooks(dict[Any, Any]):
    """A replacement for an empty OrderedDict."""


def _rebuild(storage: Any, first: Any, shape: Any, strides: Any, *more: Any) -> _Note:
    """Return a note of the tensor that torch would rebuild. The dtype is among ``more``, or is the storage's."""
    if any(isinstance(each, dict) and each for each in more):
        raise UnsavableStateError(f"a tensor is stored with {more[2:]}, and only plain ones can be exported")
    dtype = more[2] if len(more) > 2 and isinstance(more[2], torch.dtype) else storage
    numbers = [first, *shape, *strides]
    if not isinstance(dtype, torch.dtype) or any(type(number) is not int for number in numbers):
        raise pickle.UnpicklingError("it is not made of numbers")
    return _Note(dtype, first, tuple(shape), tuple(strides))


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data
