"""What is stored in a file of ``torch.save``: unpickled without its bytes, which are read when they are needed."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import sys
import warnings
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from asyncckpt.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MismatchError,
    StorageError,
    UnsavableStateError,
)
from asyncckpt.exporting.checkpoint_source import whole
from asyncckpt.exporting.source_files import SourceFiles, check
from asyncckpt.exporting.stored import Box, DictKey, StoredState
from asyncckpt.loading.unpickle import harmless, untrusted
from asyncckpt.planning.structure import PLAIN, Keys, has_no_bytes, is_leaf
from asyncckpt.worker.storage import refuse_address
from asyncckpt.worker.storage.file_system import translated


def open_torch_file(folder: SourceFiles, file: str, *, weights_only: bool) -> StoredState:
    """The state dict in a file.

    Args:
        folder: Where it stands.
        file: Its name there.
        weights_only: Nothing in it may run code.

    Raises:
        DamagedCheckpointError, StorageError: It is none of ``torch.save``'s, or cannot be read.
        UntrustedValueError: It names what could run code.
        MismatchError: There is no state dict in it.
        UnsavableStateError: Two values have the same name, or a tensor has no plain bytes.
    """
    path = folder.path(file)
    refuse_address(path)
    if (checked := folder.checked(file)) is not None:  # before anybody makes something else of it
        pickles = [item for item in checked.index.items if item.name.endswith("/data.pkl")]
        check(checked, [(item.at, checked.index.nbytes) for item in pickles])
    _check_records(path)
    loaded = _load(path, weights_only)
    if not isinstance(loaded, dict):
        raise MismatchError(f"this holds a {type(loaded).__name__}, and no state dict", path=path)
    state = StoredState(path, {}, {}, {}, {})
    maps = _Mappings(path)
    places: list[tuple[str, int, int]] = []
    for keys, value in _leaves(loaded, path):
        name = ".".join(map(str, keys))
        if name in state.keys:
            raise UnsavableStateError(f"two values have the name {name!r} when keys are joined by dots", path=path)
        state.keys[name] = keys
        if not isinstance(value, torch.Tensor):
            state.objects[name] = _pickled(value, name)
            continue
        if type(value) not in PLAIN or has_no_bytes(value) or value.is_conj() or value.is_neg():
            raise UnsavableStateError(
                f"{name!r} is a tensor without plain bytes of its own (sparse, quantised, on meta, or conjugated)",
                path=path,
            )
        box = Box(file, maps.offset(value), (0,) * value.ndim, tuple(value.shape), value.stride())
        places.append((name, box.begin, box.extent * value.itemsize))
        state.tensors[name] = whole(name, {value.dtype}, tuple(value.shape), [box], path)
    its_file = folder.open(file, places)
    check(its_file, _beside(its_file.index.bounds, places))  # what is in objects has been read already
    state.files = {file: its_file}
    return state


def _beside(bounds: Sequence[int], places: Sequence[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """The spans between ``bounds`` in which nothing of ``places`` stands."""
    touched = bytearray(len(bounds) - 1)
    for _, at, nbytes in places:
        if nbytes:
            first, last = bisect_right(bounds, at) - 1, bisect_left(bounds, at + nbytes)
            touched[first:last] = b"\1" * (last - first)
    return [span for span, is_touched in zip(pairwise(bounds), touched, strict=True) if not is_touched]


def _check_records(path: str) -> None:
    """What is read by its offsets has to stand there as it is in memory, and the pickle has to be the one that was
    written: a damaged one may name what could run code. A file that is no archive is told by torch.
    """
    with translated("reading", path), contextlib.ExitStack() as held:
        try:
            archive = held.enter_context(zipfile.ZipFile(path))
        except OSError:
            raise
        except Exception:  # one that is none fails in many ways
            return
        order = ""
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise UnsavableStateError(
                    "its records are compressed, as by a tool for archives: load it with torch.load, and save it again",
                    path=path,
                )
            if info.filename.endswith("/byteorder"):
                order = _record(archive, info, path).decode(errors="replace").strip()
            elif info.filename.endswith("/data.pkl"):
                _record(archive, info, path)
        if order not in ("", sys.byteorder):
            raise UnsavableStateError(
                f"it was saved on a machine with bytes in {order} order: load it with torch.load, and save it again",
                path=path,
            )


def _record(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str) -> bytes:
    """The bytes of a record, compared with its CRC-32, if it has one."""
    if info.CRC == 0:  # torch.save has been told to take none
        info = copy.copy(info)
        del info.CRC
    try:
        return archive.read(info)
    except OSError:
        raise
    except Exception as error:  # what is damaged fails in many ways
        raise DamagedCheckpointError(f"the file is damaged: {info.filename}: {error}", path=path) from error


def _load(path: str, weights_only: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated", category=UserWarning)
            with harmless.allowed():
                return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not re.search("GLOBAL|Unsupported", str(error)):
            raise DamagedCheckpointError(f"the file is damaged: its pickle ends in {error}", path=path) from error
        raise untrusted("what is in this file", error, path) from error
    except OSError as error:
        raise StorageError(f"reading failed: {error.strerror or error}", path=path) from error
    except Exception as error:  # one that is none fails in many ways
        raise DamagedCheckpointError(
            f"torch.load cannot map this file: {type(error).__name__}: {error}; if it is of torch before 1.6, load and"
            " save it again",
            path=path,
        ) from error


def _leaves(state_dict: Any, path: str) -> Iterator[tuple[Keys, Any]]:
    """The keys and the value of each leaf, in DCP's order, and of each empty container, which DCP has none of."""

    def walk(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
        if keys and (is_leaf(value) or not value):
            yield keys, value
        elif isinstance(value, Mapping):
            for key, each in value.items():
                yield from walk(each, (*keys, key if type(key) is str else DictKey(key)))
        else:
            for position, each in enumerate(value):
                yield from walk(each, (*keys, position))

    try:
        yield from walk(state_dict, ())
    except RecursionError as error:
        raise UnsavableStateError("a dict or a list of it is within itself, or too deep", path=path) from error


def _pickled(value: object, name: str) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # of the object's own code
        raise UnsavableStateError(f"{name!r} cannot be pickled: {type(error).__name__}: {error}") from error
    return buffer.getvalue()


class _Mappings:
    """Where this process has mapped files; not by their inodes, which stacked file systems say differently."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rows: list[tuple[int, int, int]] = []  # address, end, offset in the file
        with open("/proc/self/maps") as lines:
            for line in lines:
                addresses, _, offset, _, inode, *_ = line.split(maxsplit=5)
                if int(inode):
                    begin, _, end = addresses.partition("-")
                    self._rows.append((int(begin, 16), int(end, 16), int(offset, 16)))
        self._rows.sort()

    def offset(self, tensor: torch.Tensor) -> int:
        """At which byte of the file a tensor begins."""
        address = tensor.data_ptr()
        if tensor.numel() == 0:
            return 0
        at = bisect_right(self._rows, address, key=lambda row: row[0]) - 1
        if at < 0 or address >= self._rows[at][1]:
            raise CheckpointError(
                "torch.load has not mapped a tensor of this file; load and save it again", path=self._path
            )
        begin, _, offset = self._rows[at]
        return address - begin + offset
