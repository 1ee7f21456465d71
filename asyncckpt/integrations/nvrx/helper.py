"""Run the user's functions in a helper process, one after the other. This file has both sides of the protocol.

For each call the trainer sends a pickle of the function and its arguments, and the descriptor of a memory file with the
storages of the tensors. The helper answers the calls in order, each with an error or None. ``multiprocess`` makes the
pickles, because it supports closures and definitions in ``__main__``. Each storage is copied once, so tensors that
share a storage still share it in the helper. Device tensors become CPU tensors, and no device handle leaves the
trainer. Process groups stay in the trainer, too: functions of nvrx's local checkpoints hold process groups, but use
them only in the trainer.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from multiprocess import reduction
from multiprocess.connection import wait

from asyncckpt.errors import CheckpointError, UnsavableStateError, WorkerDiedError
from asyncckpt.extension import SocketConnection, shared_memory, start_module, watched

_ALIGNMENT = 64


# The trainer's side.


class Helper:
    """The helper process. The process ends when the trainer has closed it or died, and all calls are done."""

    def __init__(self) -> None:
        """Start the process. Raises ``WorkerDiedError``."""
        self._process, self._connection = start_module("asyncckpt.integrations.nvrx")
        self._unanswered: deque[Future[None]] = deque()
        self.death: WorkerDiedError | None = None
        """The error that says how the process ended; None while the process lives."""
        self.is_leaving = False
        """Whether the process gets no further calls. The process ends when its present calls are done."""
        self._listener = threading.Thread(target=self._listen, name="asyncckpt-helper", daemon=True)
        self._listener.start()

    def submit(
        self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Future[None]:
        """Call ``function`` in the helper process.

        Args:
            function: Anything that ``multiprocess`` pickles, including closures. An ``AbsentProcessGroup`` replaces
                each process group in the function or its arguments.
            arguments, keywords: The function's arguments. The caller may change tensors in them when this returns.

        Returns:
            A future that ends when the function does. Its error is a ``CheckpointError`` with the text of the
            function's error, or a ``WorkerDiedError`` if the process ended before.

        Raises:
            UnsavableStateError: A value cannot be pickled.
            OutOfMemoryError: There is too little shared memory for the tensors.
            WorkerDiedError: The process has ended.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump((function, list(arguments), dict(keywords)))
        except Exception as error:  # pickling runs the values' own code
            raise UnsavableStateError(
                f"the request cannot be pickled for the helper process: {type(error).__name__}: {error}"
            ) from error
        future = Future[None]()
        hint = "leave more memory to it, or save less at once"
        with shared_memory(pickler.nbytes, "the tensors of a request", hint) as segment:
            pickler.copy_storages(segment.view)
            try:
                self._unanswered.append(future)
                self._connection.send_bytes(buffer.getbuffer())
                self._connection.send_descriptor(segment.fileno())
            except OSError as error:
                self._process.kill()  # the helper may have received half a message
                self._listener.join()
                raise self.death or WorkerDiedError("the helper process has ended") from error
            except BaseException:  # an interrupt may leave half a message
                self.is_leaving = True
                self._connection.hang_up(socket.SHUT_WR)
                raise
        return future

    def kill(self) -> None:
        """End the process at once; any thread may call."""
        self._process.kill()

    def close(self, *, abort: bool = False) -> None:
        """End the process when all its calls are done, or with ``abort`` at once."""
        if abort:
            self.kill()
        self._connection.hang_up(socket.SHUT_WR)
        self._listener.join()
        self._connection.close()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError), watched(self._process.pid) as ended:
            # The end of the socket is not enough, because a process forked by a function may hold it open.
            while self._connection in wait([self._connection, *ended]):
                error = pickle.loads(self._connection.recv_bytes())
                future = self._unanswered.popleft()
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self.death = WorkerDiedError(f"the helper process {self._process.pid} {how} before the request was done")
        while self._unanswered:
            self._unanswered.popleft().set_exception(self.death)


class _Pickler(reduction.ForkingPickler):  # type: ignore[misc]  # multiprocess has no types
    """Writes the offset of each storage instead of its bytes, and the text of a process group instead of the group."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, recurse=True)  # pickle only those globals of __main__ that a function names
        self.nbytes = 0
        # Keys are addresses of storage objects; the integers are offsets.
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def persistent_id(self, obj: Any) -> tuple[int, int, torch.dtype | None] | str | None:
        if isinstance(obj, dist.ProcessGroup):
            return repr(obj)
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, None
        else:
            return None
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage, self.nbytes
            self.nbytes = self.nbytes + -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return self._storages[storage._cdata][1], storage.nbytes(), dtype

    def copy_storages(self, memory: memoryview) -> None:
        """Copy the storages to their offsets in ``memory``."""
        for storage, offset in self._storages.values():
            if storage.nbytes():
                target = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
                target.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))


# The helper's side.


def serve(fd: int) -> None:
    """Run tasks from the socket ``fd``, one after the other, until the trainer has closed the socket or died."""
    # Launchers signal every process of a job, but this process ends when its trainer does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = SocketConnection(socket.socket(fileno=fd))
    tasks: SimpleQueue[Any] = SimpleQueue()
    # The next task must be received while a task runs, or the trainer would wait.
    threading.Thread(target=_receive_all, args=[connection, tasks], daemon=True).start()
    while (task := tasks.get()) is not None:
        error = _run(*task)
        del task  # it holds memory
        with contextlib.suppress(OSError):  # the trainer is gone; its tasks still run
            connection.send_bytes(pickle.dumps(error))


def _receive_all(connection: SocketConnection, tasks: SimpleQueue[Any]) -> None:
    """Put pickles of functions and arguments into ``tasks``, each with its memory, and None at the end."""
    try:
        # A fork of the trainer may keep the socket open after the trainer's end.
        with watched(os.getppid()) as parent:
            while connection in wait([connection, *parent]):
                pickle = connection.recv_bytes()
                with connection.receive_descriptor() as file:
                    memory = memoryview(mmap.mmap(file.fileno(), 0))  # the whole file
                tasks.put((pickle, memory))
                del pickle, memory
    except (EOFError, OSError):
        pass
    finally:
        tasks.put(None)


class AbsentProcessGroup:
    """Stands in for a process group of the trainer in the helper. A function may hold it; any other use raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<stands for {self._name} of the trainer>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # Python itself asks for these, to copy or to compare
            raise AttributeError(attribute)
        raise CheckpointError(
            f"the process group {self._name} is wanted ({attribute}) by a function that runs in the background, where"
            " there are no other ranks; call collectives before the request, or in a finalize function"
        )


class _Unpickler(reduction.pickle.Unpickler):  # type: ignore[misc]  # dill's, if multiprocess uses dill
    """Replaces offsets with the storages in ``memory``, and process groups with stand-ins."""

    def __init__(self, pickle: bytes, memory: memoryview) -> None:
        super().__init__(io.BytesIO(pickle))
        self._memory = memory
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def persistent_load(
        self, pid: tuple[int, int, torch.dtype | None] | str
    ) -> torch.UntypedStorage | torch.TypedStorage | AbsentProcessGroup:
        if isinstance(pid, str):
            return AbsentProcessGroup(pid)
        offset, nbytes, dtype = pid
        if (offset, nbytes) not in self._storages:
            tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            if nbytes:
                tensor = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)
            self._storages[offset, nbytes] = tensor.untyped_storage()
        storage = self._storages[offset, nbytes]
        if dtype is None:
            return storage
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _run(pickle: bytes, memory: memoryview) -> CheckpointError | None:
    """Run one task, and return its error or None."""
    pid = os.getpid()
    try:
        function, arguments, keywords = _Unpickler(pickle, memory).load()  # raises if a module is missing here
        function(*arguments, **keywords)
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error))
        return CheckpointError(f"the request failed: {summary}\n{traceback.format_exc()}")
    finally:
        if os.getpid() != pid:  # a child process that the function forked has returned here, too
            os._exit(0)
    return None
