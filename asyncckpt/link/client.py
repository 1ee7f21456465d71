"""The trainer's client of its worker: call its methods, follow the saves, and detect the worker's death."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncckpt.budgets import ANSWER_S, CHECK_S, LONG_S, NOTICE_S, TELL_S
from asyncckpt.errors import (
    CheckpointError,
    ClosedError,
    OutOfMemoryError,
    SaveTimeoutError,
    WorkerDiedError,
    decode,
    is_interrupt,
)
from asyncckpt.link.api import Committed, Failed, SessionApi, TrainerApi
from asyncckpt.link.calls import Answer, CallMessage, call_of, carry_out
from asyncckpt.link.process import WorkerOptions, WorkerProcess, how_it_ended
from asyncckpt.link.socket_connection import OtherVersionError
from asyncckpt.link.trainer_saves import RunningSaves
from asyncckpt.protocol.commit import grace
from asyncckpt.protocol.trainer import CancelAnswered, CopiesMade, TimePassed, WorkerGone
from asyncckpt.shm.segment import Segment
from asyncckpt.storage.uploads import Uploaded
from asyncckpt.threads import Flag, make, no_thread

logger = logging.getLogger(__name__)


def longest(timeout: float) -> float:
    """Return the seconds within which a worker reports the end of a save with that commit ``timeout``.

    If the first rank is silent, the worker asks once more, and then looks at storage.
    """
    return timeout + 2 * grace(timeout) + NOTICE_S


P = ParamSpec("P")
T = TypeVar("T")


_ALLOCATE, _ADOPT = SessionApi.allocate.__name__, SessionApi.adopt.__name__


class _OpenCall:
    """A call without an answer yet."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.answered = Flag()
        self.value: Any = None
        self.error: CheckpointError | None = None
        self.segment: Segment | None = None
        # One item for two threads: for the caller when it gives up, and for the listener when the answer comes. The
        # thread that finds no item is the second, and releases the memory of the answer.
        self.waits = [True]


class OpenCalls:
    """The calls to one worker that are not answered yet. Any thread may call. One thread receives the answers."""

    def __init__(self, send: Callable[[CallMessage, int | None], None], release: Callable[[int], None]) -> None:
        """Call nothing yet.

        Args:
            send: Sends a call, and then a descriptor.
            release: Tells the worker to release a segment that no thread waits for any more.
        """
        self._send, self._release = send, release
        self._numbers = itertools.count(1)
        self._open: dict[int, _OpenCall] = {}

    def call(self, timeout: float, call: CallMessage, fd: int | None = None) -> tuple[Any, Segment | None]:
        """Send a call, and wait for the answer.

        Args:
            timeout: Seconds to wait.
            call: The call. Its number does not matter.
            fd: A descriptor that follows the call.

        Returns:
            The result, and the memory that came with it.

        Raises:
            SaveTimeoutError: The answer has not come in time.
            CheckpointError: The error of the method, or the worker has ended.
        """
        number = next(self._numbers)
        method = call[1]
        mine = self._open[number] = _OpenCall(method)
        try:
            self._send((number, *call[1:]), fd)
            if not mine.answered.wait(timeout):
                raise SaveTimeoutError(f"the worker did not answer the call {method} within {timeout:g} s")
            if mine.error is not None:
                raise mine.error
        except BaseException:
            if not _taken(mine.waits):  # the answer has come meanwhile
                self._give_back(mine)
            raise
        return mine.value, mine.segment

    def on_answer(self, answer: Answer, receive_segment: Callable[[], Segment]) -> None:
        """Take note of an answer, and receive the memory that comes with it.

        If this process has no room for the memory, the worker releases it, and the call fails.
        """
        call = self._open[answer.number]
        call.value, call.error = answer.value, None if answer.error is None else decode(answer.error)
        if call.method == _ALLOCATE and call.error is None:
            try:
                call.segment = receive_segment()
            except OutOfMemoryError as error:
                self._release(answer.value)
                call.error = error
        self._end(answer.number, call)

    def close(self, error: CheckpointError) -> None:
        """Fail all open calls, because no answer comes any more. After an exception, call this again."""
        for number, call in list(self._open.items()):
            call.error = error
            self._end(number, call)

    def _end(self, number: int, call: _OpenCall) -> None:
        if not _taken(call.waits):  # the caller has given up
            self._give_back(call)
        call.answered.set()
        self._open.pop(number, None)

    def _give_back(self, call: _OpenCall) -> None:
        """Release the memory of an answer that no thread waits for."""
        if call.segment is not None:
            call.segment.close()
        if call.method in (_ALLOCATE, _ADOPT) and call.error is None:
            self._release(call.value)


def _taken(items: list[bool]) -> bool:
    """Take the item of a list. Return False if another thread has taken it."""
    try:
        return items.pop()
    except IndexError:
        return False


_LISTEN_S = 1.0  # interval at which the listener looks for overdue saves
_SLOT_S = 0.25  # ``_LISTEN_S`` while a save waits for a slot, because a reader may end its lease at any time


def _ignore(_: object) -> None:
    pass


def _nothing() -> None:
    pass


class WorkerClient:
    """A running worker, to be ended by ``close``. Any thread may call.

    A listener thread receives its messages. When the worker ends, expected or not, every open save fails with
    ``WorkerDiedError``.
    """

    def __init__(
        self,
        options: WorkerOptions,
        on_uploaded: Callable[[Uploaded], object] = _ignore,
        begun: Callable[[WorkerClient], object] = _ignore,
        on_death: Callable[[], object] = _nothing,
        attached: WorkerProcess | None = None,
    ) -> None:
        """Start a worker, or use a worker that runs already.

        Args:
            options: The options of the worker.
            attached: The worker that runs already.
            on_uploaded: Called with each ``Uploaded``.
            begun: Called with this client before a thread refers to it. An asynchronous exception may keep the caller
                from ever getting the client.
            on_death: Called when the worker has died, after all its saves have failed.

        Raises:
            WorkerDiedError: The worker is not ready in ``options.start_timeout`` seconds.
            JobTakenError: Another worker has its endpoint.
        """
        self._owner, self._on_death = os.getpid(), on_death
        self._process = WorkerProcess(options) if attached is None else attached
        self._connection = self._process.connection
        self.pid = self._process.pid
        """The worker's process id."""
        self.saves = RunningSaves(self.tell, self._kill_stopped)
        """The saves that the worker writes, or will write."""
        self._sending = threading.Lock()
        self._calls = OpenCalls(self._send, self._release)
        self._from_worker = _FromWorker(self, on_uploaded)
        self._death: WorkerDiedError | None = None
        self._closing = self._detaching = self._is_told = self._is_killed = False
        self._why_killed = ""
        self._ended = Flag()  # set when the worker has ended, and all its saves have failed
        # Created in advance, because there may be no memory for this when the worker dies.
        ends = self._note_death, self._end_saves, self.saves.take_posted, self._end_calls, self._ended.set
        self._ends: tuple[Callable[[], object], ...] = (*ends, self._tell_death)
        self.has_endpoint = False
        """Whether others can find the worker."""
        self._listener = threading.Thread(target=self._listen, name="asyncckpt-listener", daemon=True)
        try:
            # The listener also sends. Without a timeout it could not detect a worker that has stopped. A worker that
            # takes memory does not receive.
            self._connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(LONG_S), 0))
            trouble = None if self._process.is_attached else self._process.wait_ready(options.start_timeout)
            self.has_endpoint = trouble is None and options.endpoint is not None
            begun(self)
            self._listener.start()
            _clients.add(self)
            if trouble is not None:
                logger.warning("a restarted trainer will not find the worker: %s", trouble)
        except BaseException as error:
            self._process.end()
            if isinstance(error, RuntimeError):
                raise WorkerDiedError(no_thread(error).message) from error
            raise

    @property
    def alive(self) -> bool:
        """Whether the worker still takes requests."""
        return self._death is None and not self._closing

    def call(self, timeout: float, method: Callable[Concatenate[Any, P], T], *given: P.args, **named: P.kwargs) -> T:
        """Call a method of ``SessionApi`` in the worker, and return its result.

        Args:
            timeout: Timeout in seconds.
            method: The method.
            given: Its arguments.
            named: Its named arguments.

        Raises:
            SaveTimeoutError: The worker does not answer in time.
            WorkerDiedError: The worker is dead.
            CheckpointError: The error of the method.
        """
        result: T = self._called(timeout, call_of(0, method, *given, **named))[0]
        return result

    def tell(self, method: Callable[Concatenate[Any, P], object], *given: P.args, **named: P.kwargs) -> None:
        """Call a method of ``SessionApi`` in the worker, and do not wait for it. Raises as ``check_usable``."""
        self._send((0, method.__name__, given, named))

    def allocate(self, nbytes: int, timeout: float, end: int | None = None) -> tuple[int, Segment]:
        """Make a segment of ``nbytes``, and take its memory up to byte ``end`` (default: all).

        ``timeout``: timeout in seconds. Returns the segment's number and memory. Raises as ``call``, and
        ``OutOfMemoryError``.
        """
        allocate = call_of(0, SessionApi.allocate, nbytes, nbytes if end is None else end)
        number, segment = self._called(timeout, allocate)
        if segment is None:
            raise CheckpointError("the worker sent no memory: please report this")
        return number, segment

    def adopt(self, segment: Segment, timeout: float) -> int:
        """Have the worker take over a segment of weights of a dead worker. Return its number in this worker.

        ``timeout``: timeout in seconds. Raises as ``call``.
        """
        number: int = self._called(timeout, call_of(0, SessionApi.adopt), segment.fileno())[0]
        return number

    def _called(self, timeout: float, call: CallMessage, fd: int | None = None) -> tuple[Any, Segment | None]:
        self.check_usable()  # a call that is never sent would stay open until the worker ends
        return self._calls.call(timeout, call, fd)

    def take(self, segment: int, begin: int, end: int, taken: Callable[[CheckpointError | None], object]) -> None:
        """Have the worker take more memory of a segment.

        Args:
            segment: The number of the segment.
            begin: The first byte of the memory.
            end: The end of the memory.
            taken: A thread calls this with None when the memory is taken, or else with the reason why not. After that,
                waiting saves look for a slot.
        """
        self._from_worker.on_taken[segment] = taken
        self.tell(SessionApi.take, segment, begin, end)

    def wait_while_it_lives(self, flag: Flag, timeout: float) -> bool:
        """Wait until a save has set ``flag``. Return whether it is set after ``timeout`` seconds.

        Raises the ``WorkerDiedError`` of the worker if the flag will never be set.
        """
        deadline = time.monotonic() + timeout
        while not flag.wait(max(0.0, min(deadline - time.monotonic(), CHECK_S))):
            if not self._listener.is_alive() and not flag.is_set():
                raise self._death or ClosedError("the connection to the worker is closed")
            if time.monotonic() >= deadline:
                return False
        return True

    def settle(self, timeout: float) -> None:
        """Wait until all posted events of other threads are handled, at most ``timeout`` seconds."""
        if self._listener.is_alive():
            with contextlib.suppress(CheckpointError):
                self.wait_while_it_lives(self.saves.mark(), timeout)

    def wait_told(self) -> None:
        """Wait for a short time until the other ranks have been told of failures."""
        self.saves.wait_for_jobs(TELL_S)

    def wait_for_end(self, timeout: float) -> None:
        """Wait until the end of the worker is noticed, at most ``timeout`` seconds."""
        self._ended.wait(timeout)

    def close(self, timeout: float) -> None:
        """End the worker once all staged saves are written. Safe to call twice: the second call does not wait.

        Raises ``SaveTimeoutError`` after ``timeout`` seconds. The worker then continues, and leaves when it is done.
        """
        if self._may_end() and not self._is_told:
            self.abandon()
            if self._process.wait(timeout) is None:
                how = f"is still writing after {timeout:g} s; it goes on, and ends by itself"
                raise SaveTimeoutError(f"the worker {self.pid} {how}")
            self._ended.wait(timeout)

    def detach(self, timeout: float | None = None) -> None:
        """Leave as a dead trainer does: the worker writes the staged saves, and lingers.

        This method does not wait for saves, because other ranks may never reach them. ``timeout``: seconds for the
        listener to end all waits.
        """
        if self._may_end():
            self._closing = self._detaching = True
            self._process.detach()
            self._process.hang_up()
            if self._listener.ident is not None:  # otherwise its start was interrupted
                self._ended.wait(timeout)

    def abandon(self) -> None:
        """Let the worker finish its staged saves and end by itself. Do not wait."""
        if self._owner == os.getpid() and not self._is_told and not self._detaching:
            self._closing = True
            self._process.detach()  # a later checkpointer of this process may have to wait for the worker's end
            try:
                with contextlib.suppress(ImportError):  # pickle cannot import while the interpreter shuts down
                    self._connection.send(call_of(0, SessionApi.close))
            except OSError:
                self._connection.hang_up()  # so that the worker does not wait for more messages
            self._is_told = True  # set last: if an exception comes before, the next call sends the message again

    def kill(self) -> None:
        """Kill the worker, and wait until all its saves have failed."""
        if self._may_end():
            self._process.kill()
            self._ended.wait(NOTICE_S)
            self._process.hang_up()  # a worker in an uninterruptible storage call keeps its socket open
            self._ended.wait()

    def check_usable(self) -> None:
        """Raise ``ClosedError`` if the worker is being closed, or its ``WorkerDiedError`` if it is dead."""
        self.check_owner()
        if self._death is not None:
            raise self._death
        if self._closing:
            raise ClosedError("the worker is being closed")

    def check_owner(self) -> None:
        """Raise ``ClosedError`` in a fork of the process that made this client."""
        if self.is_forked:
            raise ClosedError("this checkpointer belongs to the process it was made in, not to a fork of it")

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the process that made this client. A fork does not own the worker."""
        return self._owner != os.getpid()

    def _may_end(self) -> bool:
        return self._owner == os.getpid() and not self._connection.closed

    def _send(self, call: CallMessage, fd: int | None = None) -> None:
        """Send a call, and then the descriptor ``fd``. Raises as ``check_usable``."""
        self.check_usable()
        try:
            with self._sending:
                self._connection.send(call)
                if fd is not None:
                    self._connection.send_descriptor(fd)
        except BaseException as error:
            if fd is not None:
                self._process.kill()  # otherwise the worker may wait forever for the descriptor
            if not isinstance(error, OSError) or is_interrupt(error):
                raise
            if not isinstance(error, ConnectionError):  # the worker lives, and would wait for this message
                self._why_killed = f"cannot be told anything, and was killed: {error}"
                self._process.kill()
            # The listener is about to find the cause of death, which says more than "broken pipe".
            if threading.current_thread() is self._listener:
                self._death = self._how_it_died(self._process.wait(NOTICE_S))
                raise self._death from error
            self._ended.wait(ANSWER_S)
            raise self._death or WorkerDiedError(f"the worker {self.pid} takes no more calls") from error

    def _release(self, segment: int) -> None:
        """Tell the worker to release a segment. The worker may be dead."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.send(call_of(0, SessionApi.release, segment))

    def _listen(self) -> None:
        try:
            self._take_messages()
        except Exception:  # of any kind, because without this thread no save would ever end
            logger.exception("a message of the worker %d failed, and the worker is ended", self.pid)
            self._process.kill()
        finally:
            self._on_exit()

    def _take_messages(self) -> None:
        """Handle messages, and events that other threads post, until the worker is gone."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        poll.register(self.saves, select.POLLIN)
        looked_at = time.monotonic()
        posted = self.saves.fileno()
        while True:
            pause_s = _SLOT_S if self.saves.is_waiting else _LISTEN_S
            ready = {fd for fd, _ in poll.poll(1000 * pause_s)}
            self.saves.take_posted()
            if not ready - {posted}:
                # Let time pass only after all messages are read: perhaps this process was stopped, not the worker.
                if time.monotonic() - looked_at >= pause_s:
                    looked_at = time.monotonic()
                    if self._is_killed:
                        break  # the killed worker is still in a call to storage, and will make no further call
                    self.saves.handle(TimePassed())
                continue
            try:
                message = self._connection.receive()
            except OtherVersionError:
                raise
            except (EOFError, ConnectionError):  # any other error is on this end, and the worker lives
                break
            if (answer := Answer.received(message)) is not None:
                self._calls.on_answer(answer, self._connection.receive_segment)
            else:
                carry_out(message, TrainerApi, self._from_worker)

    def _kill_stopped(self) -> None:
        self._process.kill()
        self._is_killed = True

    def _how_it_died(self, code: int | None) -> WorkerDiedError:
        words = "" if self._closing else f"; {self._process.last_words()}; another is started"
        return WorkerDiedError(f"the worker {self.pid} {self._why_killed or how_it_ended(code)}{words}")

    def _on_exit(self) -> None:
        """Fail all open saves and calls, because the worker is gone."""
        for end in self._ends:
            make(end)
        while not self.saves.is_idle():  # a thread still copies, or finds out how a save has ended
            make(self._take_last)

    def _take_last(self) -> None:
        self.saves.wait_posted(_LISTEN_S)
        self.saves.take_posted()

    def _tell_death(self) -> None:
        if not self._closing:
            self._on_death()

    def _note_death(self) -> None:
        code = self._process.wait(0 if self._detaching else NOTICE_S)
        if code is None:
            self._process.detach()
            if not self.saves.is_idle() and not self._detaching:
                self._process.kill()  # its saves have failed
        self._death = self._death or self._how_it_died(code)

    def _end_saves(self) -> None:
        self._death = self._death or WorkerDiedError(f"the worker {self.pid} has exited")
        self.saves.post(WorkerGone(self._death, self._detaching, self.pid))

    def _end_calls(self) -> None:
        if self._death is not None:
            self._calls.close(self._death)
        self._process.close()


class _FromWorker(TrainerApi):
    """Carries out the calls of the worker. Only the listener calls these methods."""

    def __init__(self, client: WorkerClient, on_uploaded: Callable[[Uploaded], object]) -> None:
        self.on_taken: dict[int, Callable[[CheckpointError | None], object]] = {}
        self._pid, self._saves, self._on_uploaded = client.pid, client.saves, on_uploaded

    def taken(self, segment: int, error: CheckpointError | None) -> None:
        if (taken := self.on_taken.pop(segment, None)) is not None:
            self._saves.run(partial(taken, error), then=TimePassed())

    def cancelled(self, save_id: int, in_time: bool, slot_free: bool) -> None:
        self._saves.handle(CancelAnswered(save_id, in_time, slot_free))

    def written(self, save_id: int, inode: int | None, timings: dict[str, float]) -> None:
        self._saves.on_written(save_id, inode, timings)

    def replicated(self, save_id: int, failure: CheckpointError | None) -> None:
        self._saves.handle(CopiesMade(save_id, failure))

    def ended(self, outcome: Committed | Failed) -> None:
        self._saves.on_ended(outcome)

    def uploaded(self, uploaded: Uploaded) -> None:
        self._on_uploaded(uploaded)

    def logged(self, level: int, text: str) -> None:
        with contextlib.suppress(Exception):  # errors of the user's log handlers
            logger.log(level, "the worker %d: %s", self._pid, text)


_clients: weakref.WeakSet[WorkerClient] = weakref.WeakSet()


def _settle_all() -> None:
    """Hand over the last copies when the process ends. The copying threads have ended, and the listeners still run."""
    for client in list(_clients):
        if not client.is_forked:
            client.settle(NOTICE_S)


threading._register_atexit(_settle_all)  # type: ignore[attr-defined]
