"""A process that runs functions of the user's own, one after the other: what our worker cannot do."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multiprocess.connection import Connection

from asyncckpt.errors import CheckpointError, WorkerDiedError
from asyncckpt.nvrx.parcel import pack_and_send
from asyncckpt.worker.client import same_modules
from asyncckpt.worker.wire import receive


class Task:
    """A function that the helper runs."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: Exception | None = None
        """What it failed with, once it is done."""

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it has; the end of the helper ends it too."""
        self._done.wait()

    def end(self, error: Exception | None) -> None:
        """It has ended."""
        self.error = error
        self._done.set()


class Helper:
    """The process. It ends by itself when the trainer closes it or dies, and all it was given is done."""

    def __init__(self) -> None:
        """Start it. Raises ``WorkerDiedError``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "asyncckpt.nvrx", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=same_modules(),
                )
            except OSError as error:
                ours.close()
                raise WorkerDiedError(f"the helper process did not start: {error}") from error
        self._connection = Connection(ours.detach())
        self._tasks: dict[int, Task] = {}
        self._lock = threading.Lock()
        self._number = 0
        self.alive = True
        self._listener = threading.Thread(target=self._listen, name="asyncckpt-helper", daemon=True)
        self._listener.start()

    def submit(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Task:
        """Have it call ``function``. When this returns, the caller may change what is in ``arguments``.

        Raises ``UnsavableStateError`` for what does not pickle, ``OutOfMemoryError``, ``WorkerDiedError``.
        """
        task = Task()
        with self._lock:
            self._number += 1
            number = self._number
            self._tasks[number] = task
        try:
            pack_and_send(self._connection, self._process.pid, number, (function, list(arguments), dict(keywords)))
        except OSError as error:
            self._process.kill()  # it may have got half a message
            self._listener.join()
            raise task.error or WorkerDiedError("the helper process does not listen any more") from error
        except BaseException:
            with self._lock:
                self._tasks.pop(number, None)
            raise
        return task

    def close(self, *, abort: bool = False) -> None:
        """End it, when it has done all it was given, or with ``abort`` at once."""
        if abort:
            self._process.kill()
        with socket.socket(fileno=self._connection.fileno()) as ours:
            try:
                ours.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it has ended already
            finally:
                ours.detach()
        self._listener.join()
        self._connection.close()

    def _listen(self) -> None:
        while True:
            try:
                number, error = receive(self._connection)
            except (EOFError, OSError):
                break
            with self._lock:
                task = self._tasks.pop(number)
            task.end(None if error is None else CheckpointError(error))
        code = self._process.wait()
        self.alive = False
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        with self._lock:
            tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.end(WorkerDiedError(f"the helper process {self._process.pid} {how} before the request was done"))
