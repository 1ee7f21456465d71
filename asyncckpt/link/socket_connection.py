"""The connections of workers: messages over a Unix socket, and descriptors beside them."""

from __future__ import annotations

import contextlib
import errno
import os
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

# How long to try again where the kernel refuses to send, for want of memory, say; and how often.
_TRY_S, _PAUSE_S = 1.0, 0.01
_NUMBER = struct.Struct("i")
# What stands before a message, as multiprocessing has it: its length, or -1 and then its length.
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!iQ")
_LONG_BYTES = 1 << 31
# From what ``recvmsg`` returns to the descriptor: each step is written in C, see ``receive_descriptor``.
_STEPS = itemgetter(1), itemgetter(0), itemgetter(2), _NUMBER.unpack, itemgetter(0), Descriptor


class _Message:
    """A message on its way, and how much of it was sent each time."""

    def __init__(self, text: bytes) -> None:
        self.text = memoryview(text)
        self.sent: list[int] = []


class SocketConnection(Connection):
    """A connection that keeps its ``socket``.

    That, and not a number, is what is closed: it is closed once, and also where an exception of a signal handler or of
    another thread comes before anybody has this.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Over a socket that is connected, which is this one's from now on."""
        connected.settimeout(None)  # whatever socket.setdefaulttimeout says
        self.socket = connected
        self._unsent: list[_Message] = []  # more than one where an exception came while one was sent
        super().__init__(connected.fileno())

    def _send_bytes(self, buf: memoryview) -> None:
        """Send a message, and before it the rest of one where an exception of a signal handler or of another thread
        came: half a message would take what follows for its own.
        """
        length = len(buf)
        head = _LENGTH.pack(length) if length < _LONG_BYTES else _LONG_LENGTH.pack(-1, length)
        until = time.monotonic() + _TRY_S
        self._unsent.append(_Message(b"".join((head, buf))))
        while self._unsent:
            message = self._unsent[0]
            while (done := sum(message.sent)) < len(message.text):
                # No such exception comes between the sending and the note of it: that is written in C.
                try:
                    message.sent.extend(map(self.socket.send, (message.text[done:],)))
                except unless_interrupt(OSError) as error:
                    _pause(error, until)
            with contextlib.suppress(ValueError):  # who tells a worker to end does not wait for another that tells it
                self._unsent.remove(message)

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed, whatever the kernel says
            self.socket.close()

    def hang_up(self, how: int = socket.SHUT_RDWR) -> None:
        """End all talk, at once, in whatever thread; ``how``: or that of one direction."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(how)

    def has_other_end(self) -> bool:
        """Whether the other end is open, whatever has come from there and was not received."""
        poll = select.poll()
        try:
            poll.register(self.socket, select.POLLRDHUP)
        except ValueError:  # it was closed here
            return False
        return not poll.poll(0)

    def send_descriptor(self, fd: int) -> None:
        """Let the process at the other end have ``fd``, too. Raises ``OSError``."""
        until = time.monotonic() + _TRY_S
        while True:
            try:
                socket.send_fds(self.socket, [b"\0"], [fd])
                return
            except unless_interrupt(OSError) as error:
                _pause(error, until)

    def receive_descriptor(self) -> Descriptor:
        """Wait for a descriptor. Raises ``EOFError``, ``OSError``; ``EMFILE`` if this process may have no more.

        No exception of a signal handler or of another thread comes between its arrival and there being an owner.
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
            raise EOFError("there came no descriptor") from None
        return descriptor

    def receive_segment(self, *, writable: bool = True) -> Segment:
        """Wait for a memory file, and map it, ``writable`` or not. The file is taken off the socket in any case.

        Raises ``EOFError``, ``OSError``; ``OutOfMemoryError`` if this process has no room for it.
        """
        try:
            file = self.receive_descriptor()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise OutOfMemoryError(
                f"shared memory of the worker cannot be mapped: {error.strerror} (ulimit -n); close some, or raise"
                " that limit"
            ) from error
        return Segment.attach(file, writable=writable)


def _pause(error: OSError, until: float) -> None:
    """Wait a little before the next try to send. Raises ``error`` if the other end is gone, or after ``until``."""
    if isinstance(error, ConnectionError) or error.errno == errno.EBADF or time.monotonic() > until:
        raise error
    time.sleep(_PAUSE_S)
