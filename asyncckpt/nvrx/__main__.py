"""``python -m asyncckpt.nvrx FD``: the helper process, started by ``helper.py``; ``FD`` is its socket."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from queue import SimpleQueue
from typing import Any

from multiprocess.connection import Connection, wait

from asyncckpt.nvrx.parcel import receive_and_unpack
from asyncckpt.worker.wire import send


def main(fd: int) -> None:
    """Run what comes, one after the other, until the trainer has closed the socket or died."""
    # Launchers signal every process of a job; this one ends when its trainer does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fd)
    queue: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
    # While a request runs the next must be taken off the socket, or the trainer would wait.
    threading.Thread(target=_receive, args=[connection, queue], daemon=True).start()
    while (request := queue.get()) is not None:
        number, error = request[0], _run(request[1])
        del request  # its tensors hold memory
        try:
            send(connection, (number, error))
        except OSError:
            pass  # the trainer is gone; what it has asked for is done all the same


def _receive(connection: Connection, queue: SimpleQueue[tuple[int, Any] | None]) -> None:
    try:
        # A fork of the trainer may hold the socket open beyond its end.
        parent = os.pidfd_open(os.getppid())
        while connection in wait([connection, parent]):
            queue.put(receive_and_unpack(connection))
    except (EOFError, OSError):
        pass
    finally:
        queue.put(None)


def _run(value: Any) -> str | None:
    """Returns what went wrong."""
    pid = os.getpid()
    try:
        if isinstance(value, BaseException):
            raise value
        function, arguments, keywords = value
        function(*arguments, **keywords)
    except BaseException as error:
        return f"the request failed: {''.join(traceback.format_exception_only(error))}\n{traceback.format_exc()}"
    finally:
        if os.getpid() != pid:  # a fork that the function has made, and that has come back from it
            os._exit(0)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
