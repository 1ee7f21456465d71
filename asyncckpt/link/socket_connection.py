"""The connections of workers: messages and file descriptors over a Unix socket.

An *asynchronous exception* is raised by a signal handler or by another thread, between any two steps of Python code.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Iterator
from itertools import tee
from multiprocessing.connection import Connection
from operator import itemgetter
from typing import Any

from asyncckpt.errors import OutOfMemoryError, unless_interrupt
from asyncckpt.shm.segment import Descriptor, Segment

# Time for which to retry when the kernel refuses to send, for example for lack of memory, and pause between retries.
_TRY_S, _PAUSE_S = 1.0, 0.01
_NUMBER = struct.Struct("i")
# The header of a message, as in multiprocessing: its length, or -1 and then its length.
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!iQ")
_LONG_BYTES = 1 << 31
# The steps from the result of ``recvmsg`` to the descriptor. Each step is written in C, see ``receive_descriptor``.
_STEPS = itemgetter(1), itemgetter(0), itemgetter(2), _NUMBER.unpack, itemgetter(0), Descriptor


class OtherVersionError(EOFError):
    """A message of another version of asyncckpt has arrived."""


class _Message:
    """A message that is being sent, and the number of bytes sent by each call."""

    def __init__(self, text: bytes) -> None:
        self.text = memoryview(text)
        self.sent: list[int] = []


class SocketConnection(Connection):
    """A connection that keeps its ``socket``.

    ``close`` closes the socket object, not a descriptor number. So the descriptor is closed exactly once. The
    descriptor is closed even if an asynchronous exception comes before the caller has the connection.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take over a connected socket."""
        connected.settimeout(None)  # overrides socket.setdefaulttimeout
        self.socket = connected
        self._unsent: list[_Message] = []  # more than one if an exception interrupted the sending of a message
        super().__init__(connected.fileno())

    def send(self, obj: Any) -> None:
        """Send the message ``obj``. Raises ``OSError`` when the other end is gone."""
        # Use the plain pickler. Connection.send makes a pickler for closures, which takes 0.3 ms a message.
        self.send_bytes(pickle.dumps(obj))

    def receive(self) -> Any:
        """Wait for the next message.

        Raises ``OtherVersionError``; ``EOFError`` or ``OSError`` when the other end is gone.
        """
        received = self.recv_bytes()
        try:
            return pickle.loads(received)
        except (AttributeError, ImportError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
            raise OtherVersionError("the other process sent a message of another version") from error

    def _send_bytes(self, buf: memoryview) -> None:
        """Send a message, and before it the rest of an earlier message that an asynchronous exception interrupted.

        Without that rest, the receiver would take this message for the end of the earlier message.
        """
        length = len(buf)
        head = _LENGTH.pack(length) if length < _LONG_BYTES else _LONG_LENGTH.pack(-1, length)
        until = time.monotonic() + _TRY_S
        self._unsent.append(_Message(b"".join((head, buf))))
        while self._unsent:
            message = self._unsent[0]
            while (done := sum(message.sent)) < len(message.text):
                # No asynchronous exception comes between sending and noting the bytes, because both happen in C.
                try:
                    message.sent.extend(map(self.socket.send, (message.text[done:],)))
                except unless_interrupt(OSError) as error:
                    _pause(error, until)
            with contextlib.suppress(ValueError):  # another thread has removed it: ``close`` is told without a lock
                self._unsent.remove(message)

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed even if the kernel reports an error
            self.socket.close()

    def hang_up(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the socket down at once. Any thread may call. ``how``: both directions, or one."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(how)

    def has_other_end(self) -> bool:
        """Return whether the other end is open, even if messages from there have not been received yet."""
        poll = select.poll()
        try:
            poll.register(self.socket, select.POLLRDHUP)
        except ValueError:  # this end is closed
            return False
        return not poll.poll(0)

    def send_descriptor(self, fd: int) -> None:
        """Send a copy of the descriptor ``fd`` to the process at the other end. Raises ``OSError``."""
        until = time.monotonic() + _TRY_S
        while True:
            try:
                socket.send_fds(self.socket, [b"\0"], [fd])
                return
            except unless_interrupt(OSError) as error:
                _pause(error, until)

    def receive_descriptor(self) -> Descriptor:
        """Wait for a descriptor. Raises ``EOFError``, ``OSError``; ``EMFILE`` if this process may open no more files.

        No asynchronous exception comes between the arrival of the descriptor and its owner, so it never leaks.
        """
        room, flags = socket.CMSG_SPACE(_NUMBER.size), socket.MSG_CMSG_CLOEXEC
        messages: Iterator[Any] = map(self.socket.recvmsg, (1,), (room,), (flags,))
        received, again = tee(messages)
        for step in _STEPS:
            received = map(step, received)
        try:
            descriptor: Descriptor = next(received)
        except IndexError:
            _, _, said, _ = next(again)
            if said & socket.MSG_CTRUNC:  # the kernel has dropped the descriptor
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None
            raise EOFError("the message came without a descriptor") from None
        return descriptor

    def receive_segment(self, *, writable: bool = True) -> Segment:
        """Wait for a memory file, and map it, ``writable`` or not. The file is received from the socket in any case.

        Raises ``EOFError``, ``OSError``; ``OutOfMemoryError`` if this process has no room for it.
        """
        try:
            file = self.receive_descriptor()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise OutOfMemoryError(
                f"shared memory of the worker cannot be mapped: {error.strerror}; close file descriptors, or raise the"
                " limit (ulimit -n)"
            ) from error
        return Segment.attach(file, writable=writable)


def _pause(error: OSError, until: float) -> None:
    """Pause before the next retry of sending. Raise ``error`` if the other end is gone, or after ``until``."""
    if isinstance(error, ConnectionError) or error.errno == errno.EBADF or time.monotonic() > until:
        raise error
    time.sleep(_PAUSE_S)
