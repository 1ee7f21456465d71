"""The trainer's end of the worker: it asks, is told how saves get on, and notices when the worker is gone."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

from asyncckpt.errors import (
    CheckpointError,
    ClosedError,
    OutOfMemoryError,
    SaveTimeoutError,
    WorkerDiedError,
    is_interrupt,
    located,
)
from asyncckpt.format.write_request import HeldImage, WriteRequest
from asyncckpt.link import messages
from asyncckpt.link.messages import Claim, Claimed
from asyncckpt.link.process import WorkerOptions, WorkerProcess, how_it_ended
from asyncckpt.protocol.commit import grace
from asyncckpt.shm.segment import Segment
from asyncckpt.storage.uploads import Uploaded
from asyncckpt.threads import Flag, no_thread

logger = logging.getLogger(__name__)

# What a worker needs at the end, when the first rank says nothing: a last question, and a look at what is in storage.
_LAST_LOOK_S = 5.0


def longest(timeout: float) -> float:
    """Seconds after which a save has ended that has to be committed after ``timeout``: its worker says so by then."""
    return timeout + 2 * grace(timeout) + _LAST_LOOK_S


class TrackedSave(Protocol):
    """A save that the worker was told of. The thread that learns of an event calls it."""

    request: WriteRequest
    begun_at: float  # when the worker was told, by time.monotonic
    copied: Flag  # nobody copies into its slot (any more)
    is_whole: bool  # its image is complete
    is_written: bool  # the worker has no more to do with its slot
    is_withdrawn: bool  # it will fail, on all ranks, for a newer one
    is_durable: bool  # it is committed
    is_replicated: bool  # other hosts have copies of it
    has_ended: bool  # the worker's part has ended, well or badly
    done: Flag  # its handle knows

    def on_written(self, inode: int | None, timings: Mapping[str, float]) -> None:
        """The worker lets go of the slot.

        Args:
            inode: The inode of a single file, which identifies it under its final name.
            timings: All timings so far; with ``write_s`` if it was written.
        """

    def on_replicated(self, failure: CheckpointError | None) -> None:
        """Other hosts have copies of its image; for ``failure`` they do not, and will not."""

    def on_end(self, outcome: messages.Committed | CheckpointError, *, heard: bool = True) -> None:
        """Its end. Not ``heard``: the worker is dead, and has not said how the save ended."""


class OpenSaves:
    """The saves that the worker was told of, by number, until they have ended and their slots are free."""

    def __init__(self) -> None:
        # Taken by itself: an exception of a signal handler can keep a condition, but not a lock, from being left.
        self.lock = threading.RLock()
        """Guards them."""
        self.changed = threading.Condition(self.lock)
        """Notified whenever a save gets on."""
        self._open: dict[int, TrackedSave] = {}
        self._copied: dict[int, TrackedSave] = {}  # those that are to be, until it is known whether they are
        self._progress_at = 0.0  # when some save last got on, by time.monotonic

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, save: TrackedSave) -> None:
        """Add a save. The worker is about to be told of it."""
        save.begun_at = time.monotonic()
        with self.lock:
            self._open[save.request.save_id] = save
            if save.request.is_copied:
                self._copied[save.request.save_id] = save

    def discard(self, save: TrackedSave) -> None:
        """Remove a save that the worker was not told of."""
        with self.lock:
            self._open.pop(save.request.save_id, None)
            self._copied.pop(save.request.save_id, None)

    def any_overdue(self) -> bool:
        """Whether the worker has not said in time how a save ended. It may be stopped, and go on at any moment."""
        with self.lock:
            return any(self.is_overdue(save) for save in self._open.values() if not save.has_ended)

    def is_overdue(self, save: TrackedSave) -> bool:
        """Return whether a silent worker has stopped: the worker's own limit ends a save earlier."""
        return time.monotonic() >= max(save.begun_at, self._progress_at) + longest(save.request.timeout)

    def on_copied(self, save: TrackedSave) -> None:
        """Nobody copies into its slot any more."""
        with self.lock:
            save.copied.set()
            self.changed.notify_all()

    def on_written(
        self, save_id: int, inode: int | None = None, timings: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """The worker lets go of its slot."""
        with self.lock:
            if (save := self._open.get(save_id)) is not None:  # else the worker died meanwhile
                save.on_written(inode, timings)
                self._changed(save)

    def on_end(self, save_id: int, outcome: messages.Committed | CheckpointError) -> None:
        """It has ended. Where another rank has failed it, its slot may still be being written."""
        with self.lock:
            save = self._open.get(save_id)
            if save is not None and not save.has_ended:  # else it was cancelled, or the worker died and took it along
                save.on_end(outcome)
                self._changed(save)

    def on_replicated(self, save_id: int, failure: CheckpointError | None) -> None:
        """Other hosts have copies of a save; with ``failure`` they have none. The save may have ended by then."""
        with self.lock:
            save = self._copied.pop(save_id, None)
            self.changed.notify_all()  # a slot may be free that was being read
        if save is not None:
            save.on_replicated(failure)

    def look_again(self) -> None:
        """Something that is waited for may be there."""
        with self.lock:
            self.changed.notify_all()

    def close(self) -> list[TrackedSave]:
        """The worker is gone: all slots are free. Return the saves that were open."""
        with self.lock:
            saves, self._open = list(self._open.values()), {}
            copied, self._copied = list(self._copied.values()), {}
            for save in saves:
                save.on_written(None, {})
            self.changed.notify_all()
        for save in copied:
            save.on_replicated(WorkerDiedError("the worker ended before other hosts had copies"))
        return saves

    def _changed(self, save: TrackedSave) -> None:
        self._progress_at = time.monotonic()
        if save.has_ended and save.is_written:
            del self._open[save.request.save_id]
        self.changed.notify_all()


T = TypeVar("T")


class _Open:
    """A question that is not answered yet."""

    def __init__(self) -> None:
        self.answered: SimpleQueue[None] = SimpleQueue()
        self.answer: Any = None
        self.segment: Segment | None = None


class Questions:
    """The questions to one worker. Any thread may ask; one takes the answers."""

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
            question: The content of a ``Question``.
            expect: The class of its answer.
            timeout: Seconds to wait.
            doing: The action that takes so long, for the error.
            fd: A descriptor that follows the question.

        Returns:
            The answer, and the memory that came with it.

        Raises:
            SaveTimeoutError: It has not come in time.
            CheckpointError: The worker has refused, or has ended.
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


_CHECK_S = 0.5  # how often a wait looks whether it makes sense
_END_S = 5.0  # how long one that is killed may take to end
_LISTEN_S = 1.0  # how long the listener listens before it looks which saves are overdue
Answer = TypeVar("Answer")
_Told: TypeAlias = Callable[[Any], object]


def _ignore(_: object) -> None:
    pass


class WorkerClient:
    """A running worker, to be ended by ``close``. Any thread may call.

    A listener thread takes its messages. When it ends, expected or not, every open save fails with ``WorkerDiedError``.
    """

    def __init__(self, options: WorkerOptions, on_uploaded: _Told = _ignore, begun: _Told = _ignore) -> None:
        """Start a worker. Raises ``WorkerDiedError`` when it is not ready in ``options.start_timeout`` seconds.

        ``begun`` is told of this before a thread keeps it: an exception may come before its maker has it.
        """
        self._owner, self._process, self._on_uploaded = os.getpid(), WorkerProcess(options), on_uploaded
        self._connection, self._endpoint = self._process.connection, options.endpoint
        self.pid = self._process.pid
        """The worker's process id."""
        self.saves, self._sending = OpenSaves(), threading.Lock()
        self._questions = Questions(self.tell, self._give_back)
        self._taken: dict[int, Callable[[CheckpointError | None], object]] = {}
        self._death: WorkerDiedError | None = None
        self._closing = self._detaching = self._is_told = False
        self.has_endpoint = False
        """Whether others can find the worker."""
        self._listener = threading.Thread(target=self._listen, name="asyncckpt-listener", daemon=True)
        try:
            self._process.wait_ready(options.start_timeout)
            begun(self)
            self._listener.start()
        except BaseException as error:
            self._process.end()
            if isinstance(error, RuntimeError):
                raise WorkerDiedError(no_thread(error).message) from error
            raise

    @property
    def alive(self) -> bool:
        """Whether the worker can still be asked for something."""
        return self._death is None and not self._closing

    # Questions. Each raises ``WorkerDiedError``, ``SaveTimeoutError`` after ``timeout`` seconds, and what it says.

    def ask(self, question: object, expect: type[Answer], timeout: float, doing: str, fd: int | None = None) -> Answer:
        """Ask the worker a question of ``messages.py``. Return its answer, an object of the class ``expect``.

        ``doing``: the action, for an error. ``fd``: goes with the question.
        """
        return self._questions.ask(question, expect, timeout, doing, fd)[0]

    def allocate(self, nbytes: int, timeout: float, end: int | None = None) -> tuple[int, Segment]:
        """Make a segment, and take its memory up to byte ``end`` (default: all). Return its number and memory.

        Raises ``OutOfMemoryError``.
        """
        doing = f"allocating {nbytes:,} bytes of shared memory"
        allocate = messages.Allocate(nbytes, nbytes if end is None else end)
        answer, segment = self._questions.ask(allocate, messages.Allocated, timeout, doing)
        if segment is None:
            raise CheckpointError("the worker sent no memory: please report this")
        return answer.segment, segment

    def listen(self, timeout: float) -> None:
        """Have the worker take its endpoint, if it has one. Raises ``JobTakenError`` where another worker has it."""
        trouble = self.ask(messages.Listen(), messages.Listening, timeout, "making the worker known").trouble
        self.has_endpoint = trouble is None and self._endpoint is not None
        if trouble is not None:
            logger.warning("a trainer that is started in the place of this one will not find it: %s", trouble)

    def claim(self, claim: Claim, timeout: float) -> Claimed:
        """Have the worker take the lock of a root, if it is free. Raises ``JobTakenError``: the root is of another."""
        return self.ask(claim, Claimed, timeout, "taking the lock of the folder")

    def adopt(self, segment: Segment, held: tuple[HeldImage, ...], timeout: float) -> int:
        """Have the worker take over a segment of a dead worker. Return its number in this one.

        Args:
            segment: The memory; it stays mapped here too.
            held: The images in it that the worker is to keep for now.
        """
        fd = segment.fileno()
        return self.ask(messages.Adopt(held), messages.Adopted, timeout, "handing over shared memory", fd).segment

    def cancel(self, save: TrackedSave, reason: CheckpointError, timeout: float) -> bool:
        """Take back a save that is not being written yet. False, and nothing changes, where it is too late for that.

        Args:
            save: Its slot is free then, or will be in a moment.
            reason: The error that it ends with.
            timeout: Seconds.
        """
        cancel = messages.Cancel(save_id := save.request.save_id, reason)
        answer = self.ask(cancel, messages.Cancelled, timeout, "taking a save back")
        if answer.in_time:
            self.saves.on_end(save_id, reason)
        return answer.in_time

    def begin(self, save: TrackedSave) -> None:
        """Announce a save that is being staged. The worker may read the bytes that have arrived from now on.

        After any other exception than ours nobody knows whether the worker was told: ``cancel`` it.
        """
        with self.saves.lock:
            self.check_usable()
            self.saves.add(save)
        try:
            self.tell(messages.Begin(save.request))
        except CheckpointError:
            self.saves.discard(save)
            raise

    def staged(self, save_id: int, timings: dict[str, float], replicas: dict[str, int]) -> None:
        """Hand the slot over; its state must say STAGED. From now on only the worker touches it."""
        self.tell(messages.Staged(save_id, timings, replicas))

    def take(self, request: messages.Take, taken: Callable[[CheckpointError | None], object]) -> None:
        """Have the worker take more memory of a segment.

        The listener calls ``taken`` when it has, or with the reason why not. Waiters of ``wait_for`` look again then.
        """
        self._taken[request.segment] = taken
        self.tell(request)

    def wait_for(
        self, condition: Callable[[], bool], timeout: float, doing: str, check: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until ``condition`` holds. Raises ``SaveTimeoutError``, or ``WorkerDiedError``: it never will.

        Args:
            condition: Looked at whenever a save gets on; the saves cannot change meanwhile.
            timeout: Seconds.
            doing: The action that is waited for, for the error.
            check: Called now and then. An error of it ends the wait.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            with self.saves.lock:
                self.saves.changed.wait_for(lambda: condition() or self._death is not None, min(left, _CHECK_S))
                if condition():
                    return
                if self._death is not None:
                    raise self._death
            if left <= _CHECK_S:
                break
            check()
        raise SaveTimeoutError(f"{doing} took longer than {timeout:g} s; the storage may be stalled")

    def wait_for_end(self, timeout: float) -> None:
        """Wait until it is known that the worker has ended, or ``timeout`` seconds have passed."""
        self._listener.join(timeout)

    def close(self, timeout: float) -> None:
        """End the worker once all staged saves are written. Safe to call twice: the second call waits for nothing.

        Raises ``SaveTimeoutError`` after ``timeout`` seconds; then the worker goes on, and leaves when it is done.
        """
        if self._may_end() and not self._is_told:
            self.abandon()
            if self._process.wait(timeout) is None:
                how = f"is still writing after {timeout:g} s; it goes on, and ends by itself"
                raise SaveTimeoutError(f"the worker {self.pid} {how}")
            self._listener.join(timeout)

    def detach(self, timeout: float | None = None) -> None:
        """Leave as a dead trainer does: the worker writes the staged saves, and lingers.

        This waits for no save, because other ranks may never come to it. ``timeout``: seconds for the listener to end
        all waits.
        """
        if self._may_end():
            self._closing = self._detaching = True
            self._process.detach()
            self._process.hang_up()
            if self._listener.ident is not None:  # else its start was interrupted
                self._listener.join(timeout)

    def abandon(self) -> None:
        """Let the worker finish by itself what it was given, without waiting."""
        if self._owner == os.getpid() and not self._is_told and not self._detaching:
            self._closing = True
            self._process.detach()  # another of this process may have to wait for its end
            try:
                with contextlib.suppress(ImportError):  # nothing can be imported as the interpreter ends
                    messages.send(self._connection, messages.Close())
            except OSError:
                self._connection.hang_up()  # so that the worker waits for nothing
            self._is_told = True  # not before: an exception may come in between, and the next call is to tell it

    def kill(self) -> None:
        """End the worker at once, and wait until all it had to do has failed."""
        if self._may_end():
            self._process.kill()
            self._listener.join(_END_S)
            self._process.hang_up()  # its socket stays open while it is in a call of storage that cannot be broken off
            self._listener.join()

    def check_usable(self) -> None:
        """Raise what keeps the worker from being asked: ``ClosedError``, or the ``WorkerDiedError`` it ended with."""
        self.check_owner()
        if self._death is not None:
            raise self._death
        if self._closing:
            raise ClosedError("the worker is being closed")

    def check_owner(self) -> None:
        """Raise ``ClosedError`` in a fork of the process that this was made in."""
        if self.is_forked:
            raise ClosedError("this checkpointer belongs to the process it was made in, not to a fork of it")

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that this was made in: then the worker is not its own."""
        return self._owner != os.getpid()

    def _may_end(self) -> bool:
        return self._owner == os.getpid() and not self._connection.closed

    def tell(self, message: messages.FromTrainer, fd: int | None = None) -> None:
        """Send a message of ``messages.py``, and the descriptor ``fd`` behind it. Raises as ``check_usable``."""
        self.check_usable()
        try:
            with self._sending:
                messages.send(self._connection, message)
                if fd is not None:
                    self._connection.send_descriptor(fd)
        except BaseException as error:
            if fd is not None:
                self._process.kill()  # it may wait for a descriptor that never comes
            if not isinstance(error, OSError) or is_interrupt(error):
                raise
            if not isinstance(error, ConnectionError):  # the worker is there, and would wait for this message
                self.kill()
                why = f"the worker {self.pid} cannot be told anything, and was killed: {error}"
                raise WorkerDiedError(f"{why}; the next save starts a new worker") from error
            # The listener is about to find out why; it knows more than "broken pipe".
            self._listener.join(timeout=10)
            raise self._death or WorkerDiedError(f"the worker {self.pid} does not listen any more") from error

    def _give_back(self, answer: object, segment: Segment | None) -> None:
        """Nobody waits for ``answer`` any more."""
        if segment is not None:
            segment.close()
        if isinstance(answer, messages.Allocated | messages.Adopted):
            with contextlib.suppress(OSError), self._sending:
                messages.send(self._connection, messages.Release(answer.segment))

    def _listen(self) -> None:
        try:
            self._take_messages()
        except Exception:  # whatever it is: without this thread no save would ever end
            logger.exception("the messages of the worker %d cannot be taken, so it has to go", self.pid)
            self._process.kill()
        finally:
            self._on_exit()

    def _take_messages(self) -> None:
        killed = False
        while True:
            try:
                if not self._connection.poll(_LISTEN_S):
                    if killed:
                        break  # not even that has ended it yet: it is in a call to storage, and will make no other
                    if self.saves.any_overdue():
                        self._process.kill()
                        killed = True
                    continue
                message: messages.FromWorker = messages.receive(self._connection)
            except (EOFError, ConnectionError):  # any other failure is of this end, and the worker lives
                break
            segment = None
            if isinstance(message, messages.Answer) and isinstance(message.answer, messages.Allocated):
                message, segment = self._allocated(message.number, message.answer)
            match message:
                case messages.Written(save_id, inode, timings):
                    self.saves.on_written(save_id, inode, timings)
                case messages.Taken(number, failure):
                    if (taken := self._taken.pop(number, None)) is not None:
                        taken(failure)
                    self.saves.look_again()
                case messages.Replicated(save_id, failure):
                    self.saves.on_replicated(save_id, failure)
                case messages.Committed(save_id):
                    self.saves.on_end(save_id, message)
                case messages.Failed(save_id, error):
                    self.saves.on_end(save_id, error)
                case Uploaded():
                    self._on_uploaded(message)
                case messages.Logged(level, text):
                    with contextlib.suppress(Exception):  # of the user's own handlers
                        logger.log(level, "the worker %d: %s", self.pid, text)
                case messages.Answer(answer=answer):
                    if isinstance(answer, messages.Cancelled) and answer.in_time and answer.slot_free:
                        self.saves.on_written(answer.save_id)  # whoever has asked may not wait any more
                    self._questions.on_answer(message, segment)

    def _allocated(self, number: int, answer: messages.Allocated) -> tuple[messages.Answer, Segment | None]:
        """Map a new segment. If this process has no room for it, the worker takes it back, and the question fails."""
        try:
            return messages.Answer(number, answer), self._connection.receive_segment()
        except OutOfMemoryError as error:
            self._give_back(answer, None)
            return messages.Answer(number, messages.Refused(error)), None

    def _on_exit(self) -> None:
        """Fail everything open, because the worker is gone, and say why."""
        code = self._process.wait(0 if self._detaching else _END_S)
        if code is None:
            self._process.detach()
            if self.saves and not self._detaching:
                self._process.kill()  # what it was to do has failed
        words = "" if self._closing else f"; {self._process.last_words()}; the next save starts a new worker"
        death = WorkerDiedError(f"the worker {self.pid} {how_it_ended(code)}{words}")
        with self.saves.lock:
            self._death = death
            saves = self.saves.close()
        self._questions.close(death)
        for save in saves:
            if not save.done.is_set():  # also of one whose end came, and could not be noted for want of memory
                loss = _loss(save, death, self.pid, self._detaching, self.saves.is_overdue(save))
                save.on_end(loss, heard=self._detaching)  # a worker left behind still writes
        self._process.close()


def _loss(save: TrackedSave, death: WorkerDiedError, worker: int, left: bool, overdue: bool) -> CheckpointError:
    """Return the error of a ``save`` that is open when the ``worker`` is gone."""
    request = save.request
    error: CheckpointError = death
    if left:
        error = ClosedError(
            "it is not known how this ended: its checkpointer was left before, and the worker"
            f" {worker} goes on with it, alone; a new checkpointer loads it if all ranks had staged it"
        )
    elif overdue:
        error = SaveTimeoutError(
            f"the worker {worker} did not say within {request.timeout:g} s how it went, and was killed; it may have"
            " been stopped, or the storage be stalled"
        )
    return located(error, path=request.path, rank=request.rank, step=request.step)
