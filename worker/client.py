"""The trainer's end: starts the worker, talks to it, and notices when it is gone."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue

from multiprocess.connection import Connection
from multiprocess.reduction import recv_handle, send_handle

from asyncckpt.errors import CheckpointError, ClosedError, SaveTimeoutError, WorkerDiedError
from asyncckpt.shm.segment import Segment
from asyncckpt.worker.messages import (
    Adopt,
    Adopted,
    Allocate,
    Allocated,
    Begin,
    Cancel,
    Cancelled,
    Close,
    Committed,
    Describe,
    Described,
    Failed,
    FileLayout,
    FromTrainer,
    FromWorker,
    Held,
    Host,
    Hosting,
    Join,
    Layout,
    Meeting,
    Open,
    Opened,
    Order,
    Ready,
    Refused,
    Release,
    Staged,
    WeightLayout,
    Written,
)
from asyncckpt.worker.rounds import grace
from asyncckpt.worker.wire import receive, send

logger = logging.getLogger(__name__)

_LAST_WORDS_BYTES = 4096
# How long the listener listens before it looks which saves are overdue.
_LISTEN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How the worker process runs; the fields mean what they mean in ``Config``."""

    direct_io: bool = True
    io_threads: int = 2
    nice: int = 10
    io_class: str = "best-effort"
    start_timeout: float = 60.0
    linger: float = 0.0
    door: str | None = None
    """Its name, see ``door.py``; None: it has no door, and never lingers."""


class Pending:
    """A save the worker was told of.

    ``future``: its end. ``slot_free``: the worker has no more to do with its slot. ``copied``: nobody copies into that.
    ``whole``: its image is complete.
    ``inode``: of a single file, once it is written. ``unheard``: the worker is dead, and has not said how it ended.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.future: Future[Committed] = Future()
        self.slot_free = False
        self.copied = threading.Event()
        self.whole = False
        self.inode: int | None = None
        self.unheard = False
        # The worker's own limit ends a save; this one is for a worker that has stopped.
        self.overdue_at = time.monotonic() + order.timeout + 2 * grace(order.timeout)


class WorkerClient:
    """A running worker. Made ready by the constructor; ended by ``close``.

    Any thread may call. A listener thread takes the worker's messages; when the worker
    ends, expected or not, it fails everything that is pending with ``WorkerDiedError``.
    """

    def __init__(self, options: WorkerOptions) -> None:
        """Start a worker. Raises ``WorkerDiedError`` when it is not ready in ``options.start_timeout`` seconds."""
        self._owner = os.getpid()
        self._stderr = os.memfd_create("asyncckpt-stderr", os.MFD_CLOEXEC)
        self._connection, self._process = _spawn(options, self._stderr)
        self.changed = threading.Condition()
        self._pending: dict[int, Pending] = {}
        self._sending = threading.Lock()
        self._asking = threading.Lock()  # one question at a time, so that each gets its own answer
        self._replies: SimpleQueue[tuple[FromWorker, Segment | None]] = SimpleQueue()
        self._death: WorkerDiedError | None = None
        self._closing = False
        self._deserting = False
        self.has_door = False
        """Whether others can find the worker."""
        self.started_s = self._await_ready(options.start_timeout)
        self._listener = threading.Thread(target=self._listen, name="asyncckpt-listener", daemon=True)
        self._listener.start()
        _live_clients.add(self)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker can still be asked for something."""
        return self._death is None and not self._closing

    def allocate(self, nbytes: int, timeout: float) -> tuple[int, Segment]:
        """Have the worker make a segment. Returns its number there, and the segment mapped here (to be closed).

        Raises ``OutOfMemoryError``, ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        reply, segment = self._ask(Allocate(nbytes), timeout, f"allocating {nbytes:,} bytes of shared memory")
        if isinstance(reply, Refused):
            raise reply.error
        if not isinstance(reply, Allocated) or segment is None:
            raise CheckpointError(f"the worker answered {reply!r} to an allocation: please report this")
        return reply.segment, segment

    def open(self, timeout: float) -> None:
        """Have the worker take its door, where it has one.

        Raises ``JobTakenError`` when another worker has it, ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        reply, _ = self._ask(Open(), timeout, "making the worker known")
        if isinstance(reply, Refused):
            raise reply.error
        trouble = reply.trouble if isinstance(reply, Opened) else None
        self.has_door = trouble is None
        if trouble is not None:
            logger.warning("a trainer that is started in the place of this one will not find it: %s", trouble)

    def adopt(self, segment: Segment, held: tuple[Held, ...], timeout: float) -> int:
        """Have the worker take over a segment whose worker is gone, with the images in it. Returns its number there.

        Raises ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        reply, _ = self._ask(Adopt(held), timeout, "handing over shared memory", segment.fileno())
        if not isinstance(reply, Adopted):
            raise CheckpointError(f"the worker answered {reply!r} to an adoption: please report this")
        return reply.segment

    def host(self, port: int, timeout: float) -> int:
        """Have the worker host the store that joins the ranks. Returns its port.

        Raises ``WorkerDiedError``, also where ``port`` is taken, and ``SaveTimeoutError``.
        """
        reply, _ = self._ask(Host(port), timeout, "hosting the store that joins the ranks")
        if isinstance(reply, Refused):
            raise reply.error
        if not isinstance(reply, Hosting):
            raise CheckpointError(f"the worker answered {reply!r} to hosting a store: please report this")
        return reply.port

    def join(self, meeting: Meeting, timeout: float) -> None:
        """Have the worker commit together with those of the other ranks."""
        self._send(Join(meeting, timeout))

    def describe(self, segment: int, layout: Layout | FileLayout | WeightLayout, timeout: float) -> None:
        """Tell what stands where in a segment. All that is constant must be written by now.

        When this returns, who asks the worker is told so. Raises ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        reply, _ = self._ask(Describe(segment, layout), timeout, "describing shared memory")
        if not isinstance(reply, Described):
            raise CheckpointError(f"the worker answered {reply!r} to a description: please report this")

    def begin(self, order: Order) -> Pending:
        """Announce a save whose slot is being staged. What the slot is told to hold may be read from now on."""
        pending = Pending(order)
        with self.changed:
            self.check_usable()
            self._pending[order.save_id] = pending
        self._send(Begin(order))
        return pending

    def copied(self, pending: Pending) -> None:
        """Nobody copies into its slot any more."""
        pending.copied.set()
        with self.changed:
            self.changed.notify_all()

    def staged(self, pending: Pending, timings: dict[str, float]) -> None:
        """Hand the slot over; its state must say STAGED. From now on only the worker touches it."""
        pending.whole = True
        self._send(Staged(pending.order.save_id, timings))

    def cancel(self, pending: Pending, reason: CheckpointError, timeout: float) -> bool:
        """Take a save back that is not staged, or not being written yet: its future fails with ``reason``.

        Its slot is free, or will be in a moment. False, and nothing changes, when it is too late for that.
        """
        reply, _ = self._ask(Cancel(pending.order.save_id, reason), timeout, "taking a save back")
        if not (isinstance(reply, Cancelled) and reply.in_time):
            return False
        if reply.slot_free:
            self._free(pending.order.save_id)
        self._finish(pending.order.save_id, reason)
        return True

    def release(self, segment: int) -> None:
        """Have the worker forget a segment. No save in it may be pending."""
        self._send(Release(segment))

    def wait_for(self, condition: Callable[[], bool], timeout: float, doing: str) -> None:
        """Wait until ``condition`` holds, which is looked at whenever a save gets on.

        Raises ``SaveTimeoutError`` after ``timeout`` seconds, and ``WorkerDiedError`` when there is nobody to wait for.
        """
        with self.changed:
            self.changed.wait_for(lambda: condition() or self._death is not None, timeout)
            if condition():
                return
            if self._death is not None:
                raise self._death
        raise SaveTimeoutError(f"{doing} took longer than {timeout:g} s; the storage may be stalled")

    def wait_for_end(self, timeout: float) -> None:
        """Wait until it is known that the worker has ended, or ``timeout`` seconds have passed."""
        self._listener.join(timeout)

    def close(self, timeout: float) -> None:
        """End the worker once all that was handed over is written.

        Raises ``SaveTimeoutError`` if that takes longer than ``timeout`` seconds; then the worker goes on by itself,
        and leaves when it is done. Safe to call twice.
        """
        if self._owner != os.getpid() or self._connection.closed:
            return
        self._closing = True
        try:
            send(self._connection, Close())
        except OSError:
            pass  # it has ended already
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise SaveTimeoutError(
                f"the worker {self.pid} is still writing after {timeout:g} s; it goes on, and ends by itself"
            ) from error
        self._listener.join()
        self._drop()

    def desert(self, timeout: float) -> None:
        """Wait until all that was handed over is written, then leave as one that dies does: the worker lingers.

        Raises ``SaveTimeoutError`` after ``timeout`` seconds; the worker goes on all the same.
        """
        if self._owner != os.getpid() or self._connection.closed:
            return
        try:
            if self._death is None:
                self.wait_for(lambda: not self._pending, timeout, "writing what was staged")
        except WorkerDiedError:
            pass  # whose saves it was has been told
        finally:
            self._closing = self._deserting = True
            _deserted.append(self._process)
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)
            self._listener.join()
            self._drop()

    def abandon(self) -> None:
        """Let the worker finish by itself what it was given, without waiting."""
        if self._owner == os.getpid() and not self._closing:
            self._closing = True
            with contextlib.suppress(OSError, ImportError):  # nothing can be imported as the interpreter ends
                send(self._connection, Close())

    def kill(self) -> None:
        """End the worker at once, and wait until all it had to do has failed."""
        if self._owner == os.getpid() and not self._connection.closed:
            self._process.kill()
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
        if self._owner != os.getpid():
            raise ClosedError("this checkpointer belongs to the process it was made in, not to a fork of it")

    def _drop(self) -> None:
        _live_clients.discard(self)
        self._connection.close()
        stderr, self._stderr = self._stderr, -1
        if stderr >= 0:
            os.close(stderr)

    def _send(self, message: FromTrainer, fd: int | None = None) -> None:
        self.check_usable()
        try:
            with self._sending:
                send(self._connection, message)
                if fd is not None:
                    send_handle(self._connection, fd, self.pid)
        except OSError as error:
            # The listener is about to find out why; it knows more than "broken pipe".
            self._listener.join(timeout=10)
            raise self._death or WorkerDiedError(f"the worker {self.pid} does not listen any more") from error

    def _ask(
        self, question: FromTrainer, timeout: float, doing: str, fd: int | None = None
    ) -> tuple[FromWorker, Segment | None]:
        deadline = time.monotonic() + timeout
        with self._asking:
            self._send(question, fd)
            while True:
                try:
                    return self._replies.get(timeout=min(0.5, max(0.0, deadline - time.monotonic())))
                except Empty:
                    if self._death is not None:
                        raise self._death from None
                    if time.monotonic() >= deadline:
                        # A late answer must not be taken for that to the next question.
                        self.abandon()
                        raise SaveTimeoutError(f"{doing} took longer than {timeout:g} s") from None

    def _await_ready(self, timeout: float) -> float:
        begun = time.perf_counter()
        reply: FromWorker | None = None
        try:
            if self._connection.poll(timeout):
                reply = receive(self._connection)
        except (EOFError, OSError):
            pass
        if isinstance(reply, Ready):
            return time.perf_counter() - begun
        self._process.kill()
        self._process.wait()
        words = self._last_words()
        self._connection.close()
        os.close(self._stderr)
        raise WorkerDiedError(f"the worker process did not get ready within {timeout:g} s; {words}")

    def _listen(self) -> None:
        killed = False
        while True:
            try:
                if not self._connection.poll(_LISTEN_S):
                    if killed:
                        break  # not even that has ended it yet: it is in a call to storage, and will make no other
                    if self._is_overdue():
                        self._process.kill()
                        killed = True
                    continue
                message: FromWorker = receive(self._connection)
                segment = None
                if isinstance(message, Allocated):
                    segment = Segment.attach(recv_handle(self._connection))
            except (EOFError, OSError):
                break
            match message:
                case Written(save_id, inode):
                    self._free(save_id, inode)
                case Committed(save_id):
                    self._finish(save_id, message)
                case Failed(save_id, error):
                    self._finish(save_id, error)
                case _:
                    self._replies.put((message, segment))
        self._mourn()

    def _is_overdue(self) -> bool:
        """Whether the worker has not said in time how a save ended. It may be stopped, and go on at any moment."""
        with self.changed:
            return any(time.monotonic() >= save.overdue_at for save in self._pending.values() if not save.future.done())

    def _free(self, save_id: int, inode: int | None = None) -> None:
        with self.changed:
            pending = self._pending.get(save_id)
            if pending is None:  # the worker died meanwhile
                return
            pending.slot_free = True
            pending.inode = inode
            if pending.future.done():
                del self._pending[save_id]
            self.changed.notify_all()

    def _finish(self, save_id: int, outcome: Committed | CheckpointError) -> None:
        """A save has ended. Where another rank has failed it, its slot may still be being written."""
        with self.changed:
            pending = self._pending.get(save_id)
            if pending is None or pending.future.done():  # it was cancelled, or the worker died and took it along
                return
            if isinstance(outcome, Committed):
                pending.future.set_result(outcome)
            else:
                pending.future.set_exception(outcome)
            if pending.slot_free:
                del self._pending[save_id]
            self.changed.notify_all()

    def _mourn(self) -> None:
        """The worker is gone: everything pending fails, and says why."""
        try:
            code = self._process.wait(timeout=0 if self._deserting else 5)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        except subprocess.TimeoutExpired:
            how = "closed its socket"
            if self._pending and not self._deserting:
                self._process.kill()  # what it was to do has failed
        except ValueError:
            how = f"was killed by signal {-code}"
        words = "" if self._closing else f"; {self._last_words()}; the next save starts a new worker"
        with self.changed:
            self._death = WorkerDiedError(f"the worker {self.pid} {how}{words}")
            pending, self._pending = list(self._pending.values()), {}
            for save in pending:
                save.slot_free = True
            self.changed.notify_all()
        for save in pending:
            if not save.future.done():
                # One that is left behind still writes, and nobody will know how that ends.
                save.unheard = not self._deserting
                save.future.set_exception(self._loss(save, self._death))

    def _loss(self, save: Pending, death: WorkerDiedError) -> CheckpointError:
        """What to say of a save that is pending when there is no worker any more."""
        order = save.order
        error: CheckpointError = death
        if self._deserting:
            error = SaveTimeoutError(f"this process has left; its worker {self.pid} is still writing, and goes on")
        elif time.monotonic() >= save.overdue_at:
            error = SaveTimeoutError(
                f"the worker {self.pid} did not say within {order.timeout:g} s how it went, and was killed; it may have"
                " been stopped, or the storage be stalled"
            )
        return type(error)(error.message, path=order.path, rank=order.rank, step=order.step)

    def _last_words(self) -> str:
        end = os.lseek(self._stderr, 0, os.SEEK_END)
        text = os.pread(self._stderr, _LAST_WORDS_BYTES, max(0, end - _LAST_WORDS_BYTES)).decode(errors="replace")
        return f"its last words: {text.strip()}" if text.strip() else "it said nothing"


def deserted() -> set[int]:
    """The process ids of workers that this process has left, and that linger."""
    _deserted[:] = [process for process in _deserted if process.poll() is None]
    return {process.pid for process in _deserted}


def _spawn(options: WorkerOptions, stderr: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start the process, in a session of its own; returns our end of its socket."""
    deserted()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    arguments = asdict(options) | {"fd": theirs.fileno(), "trainer": os.getpid()}
    # torch warns, with a stack, of each connection that breaks; we say it in a sentence.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | same_modules()
    with theirs:
        try:
            process = subprocess.Popen(
                [*command(), json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        except OSError as error:
            ours.close()
            os.close(stderr)
            raise WorkerDiedError(f"the worker process did not start: {error}") from error
    return Connection(ours.detach()), process


def same_modules() -> dict[str, str]:
    """The environment for a Python that finds the same modules as this one, in the same order, whatever this process
    did to its path.
    """
    path = [os.path.abspath(entry) for entry in sys.path if os.path.exists(entry or os.curdir)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def command() -> list[str]:
    """What is run as the worker; tests put a faulty one in its place."""
    return [sys.executable, "-m", "asyncckpt.worker"]


_live_clients: weakref.WeakSet[WorkerClient] = weakref.WeakSet()
# Workers that linger while this process lives on. Kept, so that Python takes note of their end.
_deserted: list[subprocess.Popen[bytes]] = []


def _after_fork_in_child() -> None:
    """A fork (a data loader's worker, say) must not hold the trainer's end of a socket open."""
    for client in list(_live_clients):
        client._connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
