"""How a request travels to the helper: as a pickle without the bytes of its tensors, and these in shared memory.

The pickle is one of ``multiprocess``, which knows closures and what stands in ``__main__``. Storages are copied, each
once, so that tensors that share one still do; what was on a device is on the CPU when it arrives, and no handle of a
device leaves the trainer.
"""

from __future__ import annotations

import io
import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from multiprocess.connection import Connection
from multiprocess.reduction import ForkingPickler, recv_handle, send_handle

from asyncckpt.errors import OutOfMemoryError, UnsavableStateError
from asyncckpt.shm import budget
from asyncckpt.shm.segment import Segment, round_up
from asyncckpt.worker.wire import receive, send

_ALIGNMENT = 64


@dataclass(frozen=True)
class _Parcel:
    """Request ``number``. A descriptor follows, of a memory file with the storages, unless ``nbytes`` is 0."""

    number: int
    pickle: bytes
    nbytes: int


class _Pickler(ForkingPickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, recurse=True)  # of the globals of __main__ just what a function names
        self.storages: dict[int, tuple[torch.UntypedStorage, int]] = {}  # with their places, by address of the object
        self.nbytes = 0

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            return _typed, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            if obj._cdata not in self.storages:
                self.storages[obj._cdata] = obj, self.nbytes
                self.nbytes = round_up(self.nbytes + obj.nbytes(), _ALIGNMENT)
            return _storage, (self.storages[obj._cdata][1], obj.nbytes())
        return NotImplemented


def pack_and_send(connection: Connection, pid: int, number: int, value: Any) -> None:
    """Send ``value`` to the process ``pid``. What is in it may be changed from then on.

    Raises ``UnsavableStateError`` for what does not pickle, ``OutOfMemoryError``, ``OSError``.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except Exception as error:  # whatever a value's own code raises
        raise UnsavableStateError(
            f"the request cannot be pickled for the helper process: {type(error).__name__}: {error}"
        ) from error
    parcel = _Parcel(number, buffer.getvalue(), pickler.nbytes)
    if not parcel.nbytes:
        send(connection, parcel)
        return
    budget.require(parcel.nbytes, "the tensors of a request", "leave more memory to it, or save less at once")
    with _memory_of(parcel.nbytes) as segment:
        for storage, place in pickler.storages.values():
            if storage.nbytes():
                target = torch.frombuffer(segment.view, dtype=torch.uint8, count=storage.nbytes(), offset=place)
                target.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
                del target  # it holds on to the memory
        send(connection, parcel)
        send_handle(connection, segment.fileno(), pid)


def _memory_of(nbytes: int) -> Segment:
    try:
        return Segment.create("asyncckpt", nbytes)
    except OSError as error:  # which is not one of the connection
        raise OutOfMemoryError(f"no {nbytes:,} bytes of shared memory for the tensors of a request: {error}") from error


def receive_and_unpack(connection: Connection) -> tuple[int, Any]:
    """The next request: its number, and the value, or the error that unpickling it raised.

    Raises ``EOFError`` or ``OSError`` when nobody is at the other end.
    """
    global _memory
    parcel: _Parcel = receive(connection)
    _memory = None
    if parcel.nbytes:
        fd = recv_handle(connection)
        _memory = memoryview(mmap.mmap(fd, parcel.nbytes))
        os.close(fd)
    _arrived.clear()
    try:
        return parcel.number, ForkingPickler.loads(parcel.pickle)
    except BaseException as error:  # what is missing there, or what a module does that is imported there
        return parcel.number, error
    finally:
        _memory = None
        _arrived.clear()


# What is being unpacked: pickle has no other way to hand it to the functions it calls.
_memory: memoryview | None = None
_arrived: dict[tuple[int, int], torch.UntypedStorage] = {}


def _storage(place: int, nbytes: int) -> torch.UntypedStorage:
    if (place, nbytes) not in _arrived:
        if nbytes and _memory is not None:
            tensor = torch.frombuffer(_memory, dtype=torch.uint8, count=nbytes, offset=place)
        else:
            tensor = torch.empty(0, dtype=torch.uint8)
        _arrived[place, nbytes] = tensor.untyped_storage()
    return _arrived[place, nbytes]


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
