"""Calls between processes: the methods that may be called, their results and errors, and descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import pytest

from asyncckpt.errors import OutOfMemoryError, SaveTimeoutError
from asyncckpt.link import calls
from asyncckpt.link.calls import Answer, call_of, carry_out, send_answer, with_files
from asyncckpt.link.socket_connection import OtherVersionError, SocketConnection
from asyncckpt.shm.segment import Descriptor


class Api(Protocol):
    """The calls of the client."""

    def add(self, first: int, second: int = 1) -> int:
        """Return the sum."""

    def file(self) -> str:
        """Send a file. Return its text."""

    def fail(self) -> None:
        """Raise an error."""


class Target(Api):
    """Implements the calls, and more."""

    def add(self, first: int, second: int = 1) -> int:
        return first + second

    def file(self) -> str:
        memory = Descriptor.of(os.memfd_create, "test", os.MFD_CLOEXEC)
        os.write(memory.fileno(), b"text")
        return with_files("text", [memory])

    def fail(self) -> None:
        raise OutOfMemoryError("as the test wants", path="here", rank=3, step=7)

    def other(self) -> None:
        """Not in the API."""
        raise AssertionError


class Connections:
    """The two ends of a connection."""

    def __init__(self) -> None:
        self.ours, self.theirs = (SocketConnection(each) for each in socket.socketpair())

    def serve(self) -> None:
        """Carry out one call."""
        carry_out(self.theirs.receive(), Api, Target(), partial(send_answer, self.theirs))

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def connected() -> Iterator[Connections]:
    made = Connections()
    yield made
    made.close()


def _called(connected: Connections, method: Any, *given: Any, **named: Any) -> Any:
    connected.ours.send(call_of(1, method, *given, **named))
    connected.serve()
    return calls.receive_answer(connected.ours).result()


def test_results_and_errors_come_back(connected: Connections) -> None:
    assert _called(connected, Api.add, 2, second=3) == 5
    assert _called(connected, Api.add, 2) == 3
    with pytest.raises(OutOfMemoryError, match="as the test wants") as raised:
        _called(connected, Api.fail)
    assert (raised.value.path, raised.value.rank, raised.value.step) == ("here", 3, 7)


def test_descriptors_follow_the_answer(connected: Connections) -> None:
    assert _called(connected, Api.file) == "text"
    with connected.ours.receive_descriptor() as file:
        assert os.pread(file.fileno(), 10, 0) == b"text"


def test_a_call_that_is_told_has_no_answer(connected: Connections) -> None:
    """The process that carries out the call raises its error."""
    calls.tell(connected.ours, Api.add, 1)
    connected.serve()
    calls.tell(connected.ours, Api.fail)
    with pytest.raises(OutOfMemoryError):
        connected.serve()
    assert not connected.ours.poll(0)


def test_a_worker_that_does_not_answer(connected: Connections) -> None:
    with pytest.raises(SaveTimeoutError, match="within 0.01 s"):
        calls.call(connected.ours, 0.01, Api.add, 1)


@pytest.mark.parametrize(
    "message",
    [
        (1, "other", (), {}),
        (1, "__init__", (), {}),
        (1, "__class__", (), {}),
        (1, "add", (), {}),
        (1, "add", (1, 2, 3), {}),
        (1, "add", (1,), {"third": 3}),
        (1, ["add"], (1,), {}),
        ("1", "add", (1,), {}),
        (1, "add", (1,)),
        (1, "add", (1,), {}, None),
        Answer(1).sent(),
        Answer(1),
        "text",
    ],
    ids=str,
)
def test_only_methods_of_the_api_are_called(connected: Connections, message: object) -> None:
    """Another version may have other methods, other arguments, or other messages."""
    connected.ours.send(message)
    with pytest.raises(OtherVersionError):
        connected.serve()


def test_an_error_inside_a_method_is_no_other_version(monkeypatch: pytest.MonkeyPatch, connected: Connections) -> None:
    monkeypatch.setattr(Target, "add", lambda self, first: first + None)
    with pytest.raises(TypeError, match="NoneType"):
        _called(connected, Api.add, 1)


@pytest.mark.parametrize("message", [call_of(0, Api.add, 1), (1, None), (1, None, "text"), None, "text"], ids=str)
def test_only_an_answer_is_taken_for_one(connected: Connections, message: object) -> None:
    connected.theirs.send(message)
    with pytest.raises(OtherVersionError):
        calls.receive_answer(connected.ours)


def test_an_answer_to_an_earlier_call_is_refused(connected: Connections) -> None:
    """An exception ended the wait for that answer."""
    connected.theirs.send(Answer(0, 5).sent())
    with pytest.raises(OtherVersionError, match="where the answer"):
        calls.call(connected.ours, 10, Api.add, 1)


def test_an_end_that_answers_nothing_refuses_a_call_that_wants_an_answer() -> None:
    with pytest.raises(OtherVersionError):
        carry_out(call_of(1, Api.add, 1), Api, Target())
    carry_out(call_of(0, Api.add, 1), Api, Target())
