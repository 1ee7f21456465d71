"""Calls between processes: one form of message and one dispatcher for all clients of a worker.

A call has the name of a method of an API class, and the arguments. The process at the other end carries it out on an
object that implements the API. It sends back the result, or the ``CheckpointError`` that the method raised. A call that
is only *told* gets no answer. The API classes are in ``link/api.py``, and in ``transfer/api.py`` for other hosts.

File descriptors follow the message on the same socket. A method that takes a descriptor receives it by itself. A
method that sends descriptors returns ``with_files(...)``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast

from asyncckpt.errors import CheckpointError, SaveTimeoutError, decode, encode
from asyncckpt.link.socket_connection import OtherVersionError, SocketConnection
from asyncckpt.shm.segment import Descriptor, Segment

P = ParamSpec("P")
T = TypeVar("T")


PROTOCOL = 1
"""The version of the calls, and of the data and the memory that they describe. Every answer has it.

Increase it with each change that makes an older process misread an answer, a segment or an image. The call ``retire``
never changes, so that a worker of another version can be asked to leave.
"""

CallMessage: TypeAlias = tuple[int, str, tuple[Any, ...], dict[str, Any]]
"""A call as it is sent: the number of its answer (0: there is none), the method, and the arguments."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    """The answer to a call.

    It is sent as a tuple of these values and the ``PROTOCOL``.

    Args:
        number: The number of the call; 0: the begin of a session, or a sign of life before a slow answer.
        value: The result of the method.
        error: The error of the method, encoded; None: it has returned.
    """

    number: int
    value: Any = None
    error: bytes | None = None

    @classmethod
    def refused(cls, number: int, error: CheckpointError) -> Answer:
        """Return the answer of a method that has raised ``error``."""
        return cls(number, None, encode(error))

    @classmethod
    def received(cls, message: Any) -> Answer | None:
        """Return the answer in a received message; None if it is no answer of this ``PROTOCOL``."""
        match message:
            case (int(number), value, bytes() | None as error, int(protocol)) if protocol == PROTOCOL:
                return cls(number, value, error)
        return None

    def sent(self) -> tuple[int, Any, bytes | None, int]:
        """Return the message to send."""
        return self.number, self.value, self.error, PROTOCOL

    def result(self) -> Any:
        """Return the value. Raises the ``CheckpointError`` of the method."""
        if self.error is not None:
            raise decode(self.error)
        return self.value


Files: TypeAlias = Iterable[Descriptor | Segment]


@dataclass(frozen=True)
class _WithFiles:
    value: Any
    files: Files


def with_files(value: T, files: Files) -> T:
    """Return the result of a method, so that ``carry_out`` sends ``value``, and then the descriptors of ``files``.

    Each ``Descriptor`` is closed when it is sent. A ``Segment`` stays open.
    """
    return cast(T, _WithFiles(value, files))


def send_answer(connection: SocketConnection, answer: Answer, files: Files = ()) -> None:
    """Send an answer, and then the descriptors of the files. Raises ``OSError`` if the other end is gone."""
    connection.send(answer.sent())
    for file in files:
        try:
            connection.send_descriptor(file.fileno())
        finally:
            if isinstance(file, Descriptor):
                file.close()


class Messages(Protocol):
    """A connection that sends and receives messages. Its methods raise ``OSError`` or ``EOFError`` at its end."""

    def send(self, message: Any, /) -> None:
        """Send a message."""

    def receive(self) -> Any:
        """Receive the next message."""


def call_of(
    number: int, method: Callable[Concatenate[Any, P], object], *given: P.args, **named: P.kwargs
) -> CallMessage:
    """Return the call of ``method`` of an API class with these arguments."""
    return number, method.__name__, given, named


def tell(
    connection: Messages, method: Callable[Concatenate[Any, P], object], *given: P.args, **named: P.kwargs
) -> None:
    """Call a method at the other end, and do not wait for it. Raises ``OSError`` if the other end is gone."""
    connection.send((0, method.__name__, given, named))


def call(
    connection: SocketConnection,
    timeout: float,
    method: Callable[Concatenate[Any, P], T],
    *given: P.args,
    **named: P.kwargs,
) -> T:
    """Call a method at the other end, and return its result. One thread at a time may call.

    Args:
        connection: The connection to a worker.
        timeout: Timeout in seconds. After a timeout, the caller has to close the connection.
        method: The method of the API class.
        given: Its arguments.
        named: Its named arguments.

    Raises:
        SaveTimeoutError: The worker does not answer.
        CheckpointError: The error of the method.
        EOFError, OSError: The worker has left, or it has another version.
    """
    number = next(_numbers)
    connection.send(call_of(number, method, *given, **named))
    await_answer(connection, timeout)
    answer = receive_answer(connection)
    if answer.number != number:
        raise OtherVersionError(f"the answer {answer.number} came where the answer {number} was expected")
    result: T = answer.result()
    return result


def await_answer(connection: SocketConnection, timeout: float) -> None:
    """Wait until something arrives. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
    if not connection.poll(timeout):
        raise SaveTimeoutError(f"a worker did not answer at its endpoint within {timeout:g} s; it may be stopped")


def receive_answer(connection: Messages) -> Answer:
    """Receive an answer. Raises ``OSError``, ``EOFError``."""
    if (answer := Answer.received(connection.receive())) is None:
        raise OtherVersionError("the other process sent a message that is no answer of this version")
    return answer


def _no_answer(answer: Answer, _: Files) -> None:
    raise OtherVersionError(f"the call {answer.number} expects an answer")


def carry_out(message: Any, api: type, target: object, answer: Callable[[Answer, Files], object] = _no_answer) -> None:
    """Carry out a call, and answer it.

    Args:
        message: The received message.
        api: The class with the methods that the other end may call.
        target: The object that implements them.
        answer: Sends an answer, and then the descriptors of the files.

    Raises:
        OtherVersionError: The message is no call, the API has no such method, or the method has other arguments.
        CheckpointError: The error of a call without an answer.
    """
    match message:
        case (int(number), str(method), tuple(given), dict(named)) if method in _public(api):
            pass
        case _:
            raise OtherVersionError("the other process sent a message that is no call of this version")
    try:
        result = getattr(target, method)(*given, **named)
    except CheckpointError as error:
        if not number:
            raise
        answer(Answer.refused(number, error), ())
        return
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # raised by the call itself
            raise OtherVersionError(f"the method {method} has other arguments in this version") from error
        raise
    if number:
        found = result if isinstance(result, _WithFiles) else _WithFiles(result, ())
        answer(Answer(number, found.value), found.files)


@functools.cache
def _public(api: type) -> frozenset[str]:
    return frozenset(name for name in vars(api) if not name.startswith("_"))
