"""Find the state in a checkpoint of stock DCP. Each tensor is stored in the format of ``torch.save``.

The format is an archive, or the older form that this library also uses (see ``asyncckpt/planning/layout.py``). This
module finds the place and order of a tensor's bytes without running any code of the pickle, see
``loading/unpickled_tensors.py``.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from asyncckpt.errors import DamagedCheckpointError, UnsavableStateError
from asyncckpt.exporting.checkpoint_source import nesting, whole
from asyncckpt.exporting.source_files import SourceFiles
from asyncckpt.exporting.stored import StoredObject, StoredState
from asyncckpt.format.archive import LOCAL_BYTES, LOCAL_MAGIC, record_at
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.loading.data_file import ChecksummedFile, read_plain, read_pool
from asyncckpt.loading.dcp_reader import read_stock_metadata
from asyncckpt.loading.unpickled_tensors import Note, StoredPart, TensorUnpickler
from asyncckpt.planning.boxes import Box
from asyncckpt.storage.storage import InputFile

# Bytes to read first, and at most, to find a tensor's bytes. The records before the bytes take a kilobyte, or some
# pages if all records are aligned to pages.
_HEAD_BYTES, _LONGEST_HEAD_BYTES = 4 << 10, 256 << 10
# Heads (the first bytes of items) with a smaller distance are read together.
_NEAR_BYTES = 64 << 10
_READ_BYTES = 1 << 20


class _Place(NamedTuple):
    """The place of an item in a file of DCP, in bytes."""

    at: int
    nbytes: int
    key: MetadataIndex


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


def _box(file: str, place: _Place, note: StoredPart, dims: int, path: str) -> Box:
    offsets = tuple(place.key.offset or (0,) * dims)
    if len(offsets) != len(note.shape):
        raise DamagedCheckpointError(f"{place.key.fqn!r} has {len(offsets)} dimensions, and not its part", path=path)
    return Box(file, note.begin(), offsets, note.shape, note.strides)


def _notes(file: InputFile, places: Sequence[_Place], pool: ThreadPoolExecutor) -> Iterator[tuple[_Place, StoredPart]]:
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


def _read_group(file: InputFile, group: Sequence[_Place]) -> list[tuple[_Place, StoredPart]]:
    begin = group[0].at
    data = read_plain(file, begin, group[-1].at + _HEAD_BYTES)
    found = []
    for place in group:
        try:
            note = _note(data[place.at - begin : place.at - begin + min(place.nbytes, _HEAD_BYTES)], place)
            if note is None:
                note = _note(read_plain(file, place.at, place.at + min(place.nbytes, _LONGEST_HEAD_BYTES)), place)
            if note is None:
                raise pickle.UnpicklingError("the bytes are not those of one tensor of torch.save")
        except UnsavableStateError as error:
            raise UnsavableStateError(error.message, path=file.path) from error
        except Exception as error:  # invalid pickles fail in many ways
            raise DamagedCheckpointError(
                f"{place.key.fqn!r}, from {place.at:,} on, cannot be read: {type(error).__name__}: {error}",
                path=file.path,
            ) from error
        found.append((place, note))
    return found


def _note(head: bytes, place: _Place) -> StoredPart | None:
    """Return the note of the item that begins with ``head``; None: more bytes of the item are needed."""
    return _note_of_archive(head, place) if head.startswith(LOCAL_MAGIC) else _note_of_older(head, place)


def _note_of_archive(head: bytes, place: _Place) -> StoredPart | None:
    note: StoredPart | None = None
    at = 0
    while (at := head.find(LOCAL_MAGIC, at)) >= 0 and at + LOCAL_BYTES <= len(head):
        name, payload_at = record_at(head, at)
        if name.endswith(b"/data.pkl") and note is None:
            if payload_at >= len(head):
                return None
            note = _checked(TensorUnpickler(io.BytesIO(head[payload_at:])).load(), place)
        elif name.endswith(b"/byteorder") and not _BYTE_ORDER.startswith(
            head[payload_at : payload_at + len(_BYTE_ORDER)]
        ):
            raise _other_order(place)
        elif name.endswith(b"/data/0") and note is not None:
            return _placed(note, payload_at, place)
        at += len(LOCAL_MAGIC)
    return None


def _note_of_older(head: bytes, place: _Place) -> StoredPart:
    if sys.byteorder != "little":
        raise _other_order(place)
    stream = io.BytesIO(head)
    known = [TensorUnpickler(stream).load() for _ in range(2)]
    if known != [MAGIC_NUMBER, PROTOCOL_VERSION]:
        raise pickle.UnpicklingError(f"the pickle begins with {known!r}")
    TensorUnpickler(stream).load()  # skip the facts about the machine that saved the tensor
    note = _checked(TensorUnpickler(stream).load(), place)
    if len(TensorUnpickler(stream).load()) != 1:
        raise pickle.UnpicklingError("the tensor does not have exactly one storage")
    return _placed(note, stream.tell() + 8, place)  # the bytes follow the number of elements


def _checked(note: Any, place: _Place) -> StoredPart:
    if isinstance(note, Note):
        raise UnsavableStateError(
            f"a tensor is stored by way of {note}, and only plain ones can be exported; leave it out by exporting"
            " another part of the state, or load it with torch.distributed.checkpoint"
        )
    if not isinstance(note, StoredPart) or note.whole is not None:
        raise UnsavableStateError(f"{place.key.fqn!r} is stored as a {type(note).__name__}: no plain tensor")
    return note


def _placed(note: StoredPart, payload_at: int, place: _Place) -> StoredPart:
    """Return the note with its place in the file. The storage begins at byte ``payload_at`` of the item."""
    placed = replace(note, record=(place.at + payload_at, place.nbytes - payload_at))
    placed.begin()  # raises if the elements lie outside the item
    return placed


def _other_order(place: _Place) -> UnsavableStateError:
    return UnsavableStateError(f"{place.key.fqn!r} has its bytes in another order than this machine")


_BYTE_ORDER = sys.byteorder.encode()
