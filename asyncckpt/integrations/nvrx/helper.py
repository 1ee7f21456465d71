"""The helper process, which runs functions of the user's own, one after the other; both ends of its protocol.

For each call the trainer sends a pickle of function and arguments, and the descriptor of a memory file with the
storages of their tensors. The helper answers each, in the same order, with its error or None. ``multiprocess`` pickles,
which knows closures and what is defined in ``__main__``. Each storage is copied once, so that tensors that share one
still do. What was on a device is on the CPU in the helper, and no handle of a device leaves the trainer. Nor does a
process group, which functions of nvrx's local checkpoints hold, and use before and after in the trainer alone.
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
from asyncckpt.extension import SocketConnection, shared_memory, start_module

_ALIGNMENT = 64


# The trainer's end.


class Helper:
    """The process. It ends when the trainer has closed it or died, and all it was given is done."""

    def __init__(self) -> None:
        """Start it. Raises ``WorkerDiedError``."""
        self._process, self._connection = start_module("asyncckpt.integrations.nvrx")
        self._unanswered: deque[Future[None]] = deque()
        self.death: WorkerDiedError | None = None
        """How the process ended; None while it lives."""
        self.is_leaving = False
        """Whether it is given nothing more, and ends when all it was given is done."""
        self._listener = threading.Thread(target=self._listen, name="asyncckpt-helper", daemon=True)
        self._listener.start()

    def submit(
        self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Future[None]:
        """Have the helper call ``function``.

        Args:
            function: Anything that ``multiprocess`` pickles, closures too. Where it, or its arguments, hold a process
                group, the helper has an ``AbsentProcessGroup``.
            arguments, keywords: Of it. The caller may change tensors in them when this returns.

        Returns:
            A future that ends when the function does. Its error is a ``CheckpointError`` with the text of what the
            function raised, or a ``WorkerDiedError`` where the process ended before.

        Raises:
            UnsavableStateError: Something does not pickle.
            OutOfMemoryError: There is too little shared memory for the tensors.
            WorkerDiedError: The process has ended.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump((function, list(arguments), dict(keywords)))
        except Exception as error:  # whatever a value's own code raises
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
                self._process.kill()  # it may have received half a message
                self._listener.join()
                raise self.death or WorkerDiedError("the helper process has ended") from error
            except BaseException:  # an interrupt: nobody knows how much of it has been sent
                self.is_leaving = True
                self._connection.hang_up(socket.SHUT_WR)
                raise
        return future

    def kill(self) -> None:
        """End the process at once; any thread may call."""
        self._process.kill()

    def close(self, *, abort: bool = False) -> None:
        """End the process when it has done all it was given, or with ``abort`` at once."""
        if abort:
            self.kill()
        self._connection.hang_up(socket.SHUT_WR)
        self._listener.join()
        self._connection.close()

    def _listen(self) -> None:
        ended: list[int] = []
        with contextlib.suppress(EOFError, OSError), contextlib.ExitStack() as opened:
            with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, without them
                ended.append(os.pidfd_open(self._process.pid))
                opened.callback(os.close, ended[0])
            # Its socket alone would not tell: a fork of it, of the function's own, may hold that open.
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
    """Writes the offset of each storage in the place of its bytes, and of a process group only what it is called."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, recurse=True)  # of the globals of __main__ only what a function names
        self.nbytes = 0
        # With their offsets, by the address of the object.
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


# The helper's end.


def serve(fd: int) -> None:
    """Run tasks that arrive at the socket ``fd``, one after the other, until the trainer has closed it or died."""
    # Launchers signal every process of a job; this one ends when its trainer does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = SocketConnection(socket.socket(fileno=fd))
    tasks: SimpleQueue[Any] = SimpleQueue()
    # While a task runs the next must be taken off the socket, or the trainer would wait.
    threading.Thread(target=_receive_all, args=[connection, tasks], daemon=True).start()
    while (task := tasks.get()) is not None:
        error = _run(*task)
        del task  # it holds memory
        with contextlib.suppress(OSError):  # the trainer is gone; the tasks that it gave are run all the same
            connection.send_bytes(pickle.dumps(error))


def _receive_all(connection: SocketConnection, tasks: SimpleQueue[Any]) -> None:
    """Put into ``tasks`` pickles of functions with their arguments, each with its memory, and in the end None."""
    try:
        # A fork of the trainer may keep the socket open after its end.
        parent = os.pidfd_open(os.getppid())
        while connection in wait([connection, parent]):
            pickle = connection.recv_bytes()
            with connection.receive_descriptor() as file:
                memory = memoryview(mmap.mmap(file.fileno(), 0))  # all of it
            tasks.put((pickle, memory))
            del pickle, memory
    except (EOFError, OSError):
        pass
    finally:
        tasks.put(None)


class AbsentProcessGroup:
    """Stands in the helper for a process group of the trainer. It can be held, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<stands for {self._name} of the trainer>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # Python itself asks, to copy or to compare
            raise AttributeError(attribute)
        raise CheckpointError(
            f"the process group {self._name} is wanted ({attribute}) by a function that runs in the background, where"
            " there are no other ranks; what is collective belongs before the request, or in a finalize function"
        )


class _Unpickler(reduction.pickle.Unpickler):  # type: ignore[misc]  # dill's, if multiprocess pickles with that
    """Puts the storages in ``memory`` where the pickle has their offsets, and stand-ins where it has process groups."""

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
    """Returns what went wrong."""
    pid = os.getpid()
    try:
        function, arguments, keywords = _Unpickler(pickle, memory).load()  # raises where a module is missing here
        function(*arguments, **keywords)
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error))
        return CheckpointError(f"the request failed: {summary}\n{traceback.format_exc()}")
    finally:
        if os.getpid() != pid:  # a fork that the function has made, and that has come back from it
            os._exit(0)
    return None
