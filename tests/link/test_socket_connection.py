"""Connections of workers: each received descriptor has an owner from the first."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.interrupts import Interrupted, interrupted_everywhere

from asyncckpt.link.socket_connection import SocketConnection


@pytest.fixture
def ends() -> Iterator[tuple[SocketConnection, SocketConnection]]:
    one, other = map(SocketConnection, socket.socketpair())
    with one, other:
        yield one, other


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_descriptor_comes_behind_a_message(ends: tuple[SocketConnection, SocketConnection]) -> None:
    one, other = ends
    with open("/proc/self/stat") as file:
        one.send_bytes(b"here it is")
        one.send_descriptor(file.fileno())
        assert other.recv_bytes() == b"here it is"
        with other.receive_descriptor() as received:
            assert os.path.samestat(os.fstat(received.fileno()), os.fstat(file.fileno()))
            assert not os.get_inheritable(received.fileno())


@pytest.mark.parametrize("says", [True, False], ids=["a message in its place", "the end"])
def test_none_comes(ends: tuple[SocketConnection, SocketConnection], says: bool) -> None:
    one, other = ends
    one.socket.send(b"x" * says) if says else one.close()
    with pytest.raises(EOFError):
        other.receive_descriptor()


# Python closes the file, and warns.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_an_exception_at_any_instruction_loses_none(ends: tuple[SocketConnection, SocketConnection]) -> None:
    one, other = ends
    with open("/proc/self/stat") as file:
        before = _descriptors()

        def receive() -> None:
            one.send_descriptor(file.fileno())
            other.receive_descriptor().close()

        for tried, _ in enumerate(interrupted_everywhere(receive, "asyncckpt/link/socket_connection.py")):
            other.socket.setblocking(False)
            while True:
                try:
                    other.receive_descriptor().close()  # descriptors that were sent, but not received
                except BlockingIOError:
                    break
            other.socket.setblocking(True)
            assert _descriptors() == before, tried
        assert tried > 10


# Python warns of an exception in ``__del__`` too.
@pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_at_any_instruction_leaves_no_connection() -> None:
    before = _descriptors()

    def connect() -> None:
        for each in [SocketConnection(end) for end in socket.socketpair()]:
            each.close()

    for tried, _ in enumerate(interrupted_everywhere(connect, "asyncckpt/link/socket_connection.py")):
        assert _descriptors() == before, tried
    assert tried > 10


def test_an_exception_at_any_instruction_leaves_no_half_message(
    ends: tuple[SocketConnection, SocketConnection],
) -> None:
    one, other = ends
    other.socket.setblocking(False)  # a message is sent completely, or never
    large = b"x" * 20_000
    for tried, _ in enumerate(interrupted_everywhere(lambda: one.send_bytes(large), "connection.py")):
        one.send_bytes(b"next")
        while (message := other.recv_bytes()) != b"next":
            assert message == large, tried
    assert tried > 10


def test_ctrl_c_in_a_message_that_the_other_end_does_not_take(
    ends: tuple[SocketConnection, SocketConnection],
) -> None:
    """The message is longer than the socket's buffer, and the worker does not read."""
    one, other = ends
    large = b"x" * (4 << 20)

    def interrupt(signum: int, frame: object) -> None:
        raise Interrupted

    def interrupt_when_full() -> None:
        full = select.poll()
        full.register(one.socket, select.POLLOUT)
        other.poll(60)
        while full.poll(0):
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        thread = threading.Thread(target=interrupt_when_full)
        thread.start()
        with pytest.raises(Interrupted):
            one.send_bytes(large)
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join()
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(other.recv_bytes() for _ in range(2)), daemon=True)
    reader.start()
    one.send_bytes(b"next")
    reader.join(30)
    assert received == [large, b"next"]


@pytest.mark.parametrize("says", [True, False])
def test_whose_other_end_is_gone(ends: tuple[SocketConnection, SocketConnection], says: bool) -> None:
    one, other = ends
    other.send_bytes(b"not received" * says)
    assert one.has_other_end()
    other.close()
    assert not one.has_other_end()


class _Refusing:
    """A socket that refuses ``times`` sends with an error of the kernel."""

    def __init__(self, real: socket.socket, times: int) -> None:
        self._real, self._times = real, times

    def __getattr__(self, name: str) -> Any:
        if name in ("send", "sendmsg") and self._times > 0:
            self._times -= 1
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return getattr(self._real, name)


def test_what_the_kernel_refuses_to_send_at_first_is_sent(ends: tuple[SocketConnection, SocketConnection]) -> None:
    one, other = ends
    real: Any = one.socket
    with open("/proc/self/stat") as file:
        one.socket = _Refusing(real, 2)  # type: ignore[assignment]
        one.send_bytes(b"here it is")
        one.socket = _Refusing(real, 2)  # type: ignore[assignment]
        one.send_descriptor(file.fileno())
        one.socket = real
        assert other.recv_bytes() == b"here it is"
        other.receive_descriptor().close()


def test_what_the_kernel_refuses_to_send_for_long_is_an_error(ends: tuple[SocketConnection, SocketConnection]) -> None:
    one, other = ends
    real: Any = one.socket
    one.socket = _Refusing(real, 10_000)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No buffer space"):
        one.send_bytes(b"here it is")
    one.socket = real
    other.close()
    with pytest.raises(BrokenPipeError):
        one.send_bytes(b"there it was")
