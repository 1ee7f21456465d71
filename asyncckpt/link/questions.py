"""What a trainer asks its worker: each question has a number, and its answer has it too.

An exception may come at any instant of a wait: out of a signal handler (Ctrl-C), or because the time is up. Then nobody
waits for the answer any more, which still comes, and memory with it. That is given back by whoever sees it last: the
thread that takes the messages, or the one that has asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.link import messages
from asyncckpt.shm.segment import Segment

T = TypeVar("T")


class _Open:
    """A question that is not answered yet."""

    def __init__(self) -> None:
        self.answered: SimpleQueue[None] = SimpleQueue()
        self.answer: Any = None
        self.segment: Segment | None = None


class Questions:
    """Those to one worker. Any thread may ask; one takes the answers."""

    def __init__(
        self,
        send: Callable[[messages.FromTrainer, int | None], None],
        give_back: Callable[[Any, Segment | None], None],
    ) -> None:
        """Ask nothing yet.

        Args:
            send: Sends a message, and a descriptor behind it.
            give_back: Gives back what came with an answer that nobody waits for.
        """
        self._send, self._give_back = send, give_back
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}

    def ask(
        self, question: Any, expect: type[T], timeout: float, doing: str, fd: int | None = None
    ) -> tuple[T, Segment | None]:
        """Ask, and wait for the answer.

        Args:
            question: One of those that a ``Question`` may have.
            expect: The class of its answer.
            timeout: Seconds to wait.
            doing: What takes that long, for the error.
            fd: A descriptor that follows the question.

        Returns:
            The answer, and the memory that came with it.

        Raises:
            SaveTimeoutError: It has not come in time.
            CheckpointError: What the worker refused with, or has ended with.
        """
        number = next(self._numbers)
        mine = self._open[number] = _Open()
        try:
            self._send(messages.Question(number, question), fd)
            mine.answered.get(timeout=timeout)
            answer = mine.answer
            if isinstance(answer, messages.Refused):
                raise answer.error
            if not isinstance(answer, expect):
                raise CheckpointError(f"the worker answered {answer!r} to {question!r}: please report this")
        except BaseException as error:
            if self._open.pop(number, None) is None:  # it has been answered
                self._give_back(mine.answer, mine.segment)
            if isinstance(error, Empty):
                raise SaveTimeoutError(f"{doing} took longer than {timeout:g} s") from None
            raise
        return answer, mine.segment

    def on_answer(self, message: messages.Answer, segment: Segment | None) -> None:
        """An answer has come, with that memory."""
        waiting = self._open.get(message.number) or _Open()
        waiting.answer, waiting.segment = message.answer, segment
        # From here on it is there. The one of the two threads that takes the question away has left it to the other.
        if self._open.pop(message.number, None) is None:
            self._give_back(message.answer, segment)
        waiting.answered.put(None)

    def close(self, error: CheckpointError) -> None:
        """No answer comes any more."""
        for number in list(self._open):
            self.on_answer(messages.Answer(number, messages.Refused(error)), None)
