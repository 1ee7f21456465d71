"""Lay out a file of ``torch.save``, with the nesting that the state dict had before DCP flattened it."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.serialization import normalize_storage_type

from asyncckpt.errors import UnsavableStateError
from asyncckpt.exporting.batches import FilePlan, PlacedTensor, Window
from asyncckpt.exporting.selection import Selection
from asyncckpt.format.archive import Archive, Record, crc32, header, lay_out, tail_room
from asyncckpt.loading.unpickle import load_object
from asyncckpt.planning.boxes import StoredTensor
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.planning.structure import Keys
from asyncckpt.planning.torch_file_plan import StoragePickler, flat_bytes, storage_alignment

_PROTOCOL = 2  # the protocol of torch.save


def plan_torch_file(
    selection: Selection, pickles: Mapping[str, bytes], path: str, *, item: str | None = None, weights_only: bool
) -> FilePlan:
    """Lay out a file.

    Args:
        selection: The values of the file.
        pickles: The objects, by the names under which they are stored.
        path: The checkpoint, for errors.
        item: The only top-level key of ``selection.keys``. The file has its value instead of the dict.
        weights_only: Whether to refuse objects that could run code while they are unpickled.

    Raises:
        UntrustedValueError: An object could run code.
        CheckpointError, UnsavableStateError: An object cannot be unpickled, or cannot be pickled again.
    """
    state: dict[Any, Any] = {}
    storages: dict[str, _Storage] = {}
    for name, keys in selection.keys.items():
        value: Any
        if name in selection.tensors:
            first = selection.tied.get(name, name)
            value = _Tensor(storages.setdefault(first, _Storage(*selection.tensors[name])))
        else:
            data = io.BytesIO(pickles[selection.objects[name]])
            value = load_object(data, name, path, weights_only=weights_only, device="cpu")
        _put(state, keys, value)
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, _PROTOCOL)
    try:
        pickler.dump(state if item is None else state[item])
    except Exception as error:  # an object's own code may raise any error
        raise UnsavableStateError(f"the state cannot be pickled: {type(error).__name__}: {error}", path=path) from error
    return _plan(pickler, buffer.getvalue())


def _put(state: dict[Any, Any], keys: Keys, value: Any) -> None:
    """Put a value at ``keys``, and make the missing dicts and lists that contain it."""
    container: Any = state
    for key, inner in zip(keys, [*keys[1:], None], strict=True):
        if isinstance(container, list):
            container += [None] * (key + 1 - len(container))
        if inner is None:
            container[key] = value
        elif container[key] is not None if isinstance(container, list) else key in container:
            container = container[key]
        else:
            container[key] = [] if isinstance(inner, int) else {}
            container = container[key]


def _plan(pickler: _Pickler, data: bytes) -> FilePlan:
    """Lay out the file: the pickle and its storages, which are tensors to copy, or storages within objects."""
    known = [
        each if isinstance(each, _Storage) else flat_bytes(pickler.storages[each]).cpu().numpy().tobytes()
        for each in pickler.keys
    ]
    sizes = [each.nbytes if isinstance(each, _Storage) else len(each) for each in known]
    alignment = storage_alignment()
    records = lay_out(alignment, len(data), *sizes)
    placed: list[PlacedTensor] = []
    constants: list[tuple[int, bytes]] = []
    for record, each in zip(records, [*known, data], strict=True):
        constants.append((record.at, header(record)))
        if isinstance(each, _Storage):
            placed.append(PlacedTensor(each.tensor, each.dtype, record.payload_at, record.end))
        else:
            constants.append((record.payload_at, each))
    nbytes = records[-1].end + tail_room(alignment, len(sizes))
    completed = _Completed(records, [*sizes, len(data)], alignment)
    return FilePlan("", placed, constants, nbytes, completed, lambda: completed.archive.end)


class _Storage:
    """A placeholder for the storage of a tensor. The tensor is copied when the file is written."""

    def __init__(self, tensor: StoredTensor, dtype: torch.dtype) -> None:
        self.tensor, self.dtype = tensor, dtype
        self.nbytes = tensor.numel * dtype.itemsize


class _Tensor:
    """A placeholder for a tensor in the pickled state."""

    def __init__(self, storage: _Storage) -> None:
        self.storage = storage


class _Pickler(StoragePickler):
    """A pickler that pickles placeholders as the tensors and storages that they stand for."""

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, _Tensor):
            return super().reducer_override(obj)
        rebuild, (_, _, _, _, *more) = _reduced(obj.storage.dtype)
        shape = obj.storage.tensor.shape
        return rebuild, (obj.storage, 0, shape, contiguous_strides(shape), *more)

    def persistent_id(self, obj: object) -> Any:
        if not isinstance(obj, _Storage):
            return super().persistent_id(obj)
        of_tensor = _reduced(obj.dtype)[1][0]
        key = self.keys.setdefault(obj, str(len(self.keys)))
        if isinstance(of_tensor, torch.storage.TypedStorage):
            kind = getattr(torch, of_tensor._pickle_storage_type())  # type: ignore[no-untyped-call]
            return "storage", kind, key, "cpu", obj.tensor.numel
        kind = normalize_storage_type(type(of_tensor))  # type: ignore[no-untyped-call]
        return "storage", kind, key, "cpu", obj.nbytes


@functools.cache
def _reduced(dtype: torch.dtype) -> Any:
    """Return torch's pickle of a tensor of that dtype: the function that rebuilds it, and the arguments."""
    return torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]


class _Completed:
    """Compute the checksums of an archive while it is written, and fill in the records that depend on them."""

    def __init__(self, records: Sequence[Record], sizes: Sequence[int], alignment: int) -> None:
        self._records = list(zip(records, sizes, strict=True))
        self._alignment = alignment
        self._next = self._crc = 0
        self._window = Window(0, memoryview(b""))
        self.archive = Archive(self)

    def __setitem__(self, where: slice, data: bytes | bytearray) -> None:
        self._window[where] = data

    def __call__(self, window: Window) -> None:
        self._window = window
        while self._next < len(self._records):
            record, nbytes = self._records[self._next]
            stop = record.payload_at + nbytes
            begin, end = max(record.payload_at, window.begin), min(stop, window.end)
            if begin < end:
                self._crc = crc32(window[begin:end], self._crc)
            if stop > window.end:
                return
            self.archive.close(record, nbytes, self._crc)
            self._next, self._crc = self._next + 1, 0
        self.archive.finish(self._alignment)
