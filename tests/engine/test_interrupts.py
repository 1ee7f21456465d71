"""Test exceptions from signal handlers: they may come at any call of a save, and the next save works as usual."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from support.checkpoints import complete_steps
from support.segments import mapped_segments
from support.states import same, zeros_like

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.staging.slot_copy import SlotStager, wait_for_copies

HERE = str(Path(__file__).parents[2])
# Python modules with locks that a save uses. Logging is left out, because after an interrupt no code releases its lock.
OTHERS = ("multiprocess/", "concurrent/futures/", "queue.py")

# Packages that acquire resources or report results. Calls that only inspect the state are left out: they are too many.
TAKING = ("/engine/", "/staging/", "/worker/", "/shm/", "/supervisor.py", "/objects.py")

Point = tuple[CodeType, int, CodeType]
"""A call: the calling code, its line, and the called code."""


def _ours(code: CodeType) -> bool:
    return code.co_filename.startswith((HERE, str(Path(HERE).resolve()))) and "/tests/" not in code.co_filename


@contextmanager
def _traced(on_call: Callable[[Point], None]) -> Iterator[None]:
    """Pass to ``on_call`` each call in this thread of our code, or from our code into ``OTHERS``."""

    def trace(frame: FrameType, event: str, argument: object) -> None:
        caller = frame.f_back
        if event == "call" and caller is not None:
            code = frame.f_code
            if _ours(code) or (_ours(caller.f_code) and any(part in code.co_filename for part in OTHERS)):
                on_call((caller.f_code, caller.f_lineno, code))

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def _points(act: Callable[[], object]) -> list[Point]:
    """Return the distinct calls that ``act`` makes from code in ``TAKING``."""
    found: dict[Point, None] = {}
    with _traced(lambda point: found.setdefault(point)):
        act()
    return [point for point in found if any(part in point[0].co_filename for part in TAKING)]


def _interrupted_at(point: Point, act: Callable[[], object]) -> bool:
    """Return whether ``act`` reached the point and was interrupted there."""
    reached = False

    def interrupt(at: Point) -> None:
        nonlocal reached
        if at == point and not reached:
            reached = True
            raise KeyboardInterrupt

    try:
        with _traced(interrupt):
            act()
    except KeyboardInterrupt:
        return True
    return reached


class Training:
    """A training that saves a different state at each step."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self.step = 0
        self.size = 100
        self.state: dict[str, Any] = {}

    def next_state(self) -> None:
        self.step += 1
        model = {"w": torch.full((self.size, 100), float(self.step)), "b": torch.arange(self.step, self.step + 5)}
        self.state = {"model": model, "lr": self.step / 7, "k": [1]}

    def save(self) -> Any:
        return self.checkpointer.save(self.step, self.state)

    def check(self) -> None:
        """Check that the next save completes soon and holds the right values."""
        self.next_state()
        begun = time.monotonic()
        self.save().result(60)
        assert time.monotonic() - begun < 30
        found = zeros_like(self.state)
        assert self.checkpointer.load(found, self.step, memory=False) == self.step
        assert same(found, self.state)
        self.checkpointer.wait(60)

    def holds(self) -> dict[str, int]:
        """Return the memory and the descriptors of this process and its worker."""
        worker = self.checkpointer._engine.worker
        assert worker is not None
        return {
            "segments": len(mapped_segments()),
            "worker's segments": len(mapped_segments(worker.pid)),
            "files": _descriptors(os.getpid()),
            "worker's files": _descriptors(worker.pid),
            "open saves": len(worker.saves._work),
            "open calls": len(worker._calls._open),
        }

    def check_holds(self, held: dict[str, int], where: object = None) -> None:
        """Wait until the process and its worker hold ``held``. The worker takes a moment to give resources back."""
        deadline = time.monotonic() + 30
        while (found := self.holds()) != held and time.monotonic() < deadline:
            time.sleep(0.005)  # a parallel test may also have queried all workers
        assert found == held, where


def _descriptors(pid: int) -> int:
    """Return the number of descriptors of memory and sockets. Descriptors of files come and go."""
    kinds = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds.append(os.readlink(fd))
        except OSError:
            continue
    return sum(kind.startswith(("/memfd:", "socket:")) for kind in kinds)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("overlap", "grows", "every"),
    [(False, 0, 1), (True, 0, 1), (False, 1, 1)],
    ids=["as planned", "overlapping", "another structure"],
)
def test_at_every_call_of_a_save(root: Path, overlap: bool, grows: int, every: int) -> None:
    """Interrupt a save at every call, or at each ``every``-th call if a new plan makes many calls."""
    with Checkpointer(root, Config(overlap=overlap, keep_last=2)) as checkpointer:
        training = Training(checkpointer)

        def another() -> None:
            training.size += grows
            training.next_state()

        for _ in range(3):
            training.check()
            another()
        points = _points(training.save)[::every]
        checkpointer.wait(60)
        training.check()
        held = training.holds()
        interrupted = 0
        for point in points:
            another()
            interrupted += _interrupted_at(point, training.save)
            wait_for_copies(30)
            training.check()
            training.check_holds(held, point)
        assert interrupted > len(points) * 0.9
        assert checkpointer._engine.worker is not None


@pytest.mark.parametrize("method", ["allocate", "describe"])
def test_when_the_worker_has_just_been_told(root: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The worker answers a call after the trainer has stopped waiting for the answer."""
    with Checkpointer(root) as checkpointer:
        training = Training(checkpointer)
        training.check()
        held = training.holds()
        send = SocketConnection.send

        def interrupted(connection: Any, message: Any) -> None:
            send(connection, message)
            if message[1] == method:
                raise KeyboardInterrupt

        for _ in range(3):
            training.size += 100  # more than the memory holds
            training.next_state()
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(SocketConnection, "send", interrupted)
                training.save()
            training.check()
            training.check_holds(held)


def test_a_save_in_answer_to_ctrl_c_is_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.ones(1000)}
    copy: Any = SlotStager.copy

    def slow(*args: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.3)
        copy(*args)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Checkpointer(root) as checkpointer:
        checkpointer.save(1, state)
        before = signal.signal(signal.SIGALRM, interrupted)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(SlotStager, "copy", slow)
                checkpointer.save(2, state)
        except KeyboardInterrupt:
            checkpointer.save(3, state)
            raise
        finally:
            signal.signal(signal.SIGALRM, before)
    assert complete_steps(str(root)) == [1, 3]


@pytest.mark.parametrize("failure", ["raise", "warn"])
def test_a_save_within_a_save_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, failure: Any) -> None:
    """The handler of a signal, for example, may call ``save`` during a save."""
    wait: Any = WorkerClient.wait_while_it_lives
    told: list[BaseException | None] = []

    def within(*args: Any) -> Any:
        for call in (lambda: checkpointer.save(9, {"w": torch.zeros(1000)}).result(), checkpointer.wait, engine.close):
            with pytest.raises(CheckpointError, match="inside of another call") as caught:
                call()
            told.append(caught.value)
        return wait(*args)

    with Checkpointer(root, Config(failure=failure)) as checkpointer:
        engine = checkpointer._engine
        with monkeypatch.context() as patched:
            patched.setattr(WorkerClient, "wait_while_it_lives", within)
            checkpointer.save(1, {"w": torch.ones(1000)}).result(60)
        assert len(told) == 3
        checkpointer.save(2, {"w": torch.ones(1000)}).result(60)
        found = {"w": torch.zeros(1000)}
        assert checkpointer.steps() == [1, 2] and checkpointer.load(found, 1) == 1
        assert bool((found["w"] == 1).all())


class _Preempted(TimeoutError):
    """An error that the training defines. It is an ``OSError``, like many errors that alarms raise."""


@contextmanager
def _signal_at(point: Point | None) -> Iterator[list[Point]]:
    """Let a signal handler raise at the first call like ``point``. Yield a list that then holds this call."""
    met: list[Point] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)
        raise _Preempted

    def send(at: Point) -> None:
        if at == point and not met:
            met.append(at)
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with _traced(send):
            yield met
    finally:
        signal.signal(signal.SIGUSR1, before)


def _not_passed(points: list[Point], act: Callable[[], object], again: Callable[[], object]) -> list[Any]:
    """Return the ``points`` where the handler's error does not come out of ``act`` unchanged."""
    lost: list[Any] = []
    reached = 0
    for point in points:
        met: list[Point] = []
        try:
            with _signal_at(point) as met:
                act()
            lost += [(point, "nothing")] * len(met)
        except _Preempted:
            pass
        except Exception as error:
            lost.append((point, error))
        reached += len(met)
        again()
    assert reached > len(points) * 0.9
    return lost


@pytest.mark.timeout(600)
def test_an_exception_of_a_handler_comes_out_of_a_save_as_it_is(root: Path) -> None:
    with Checkpointer(root, Config(failure="warn", keep_last=2)) as checkpointer:
        training = Training(checkpointer)

        def another() -> None:
            checkpointer.wait(60)
            training.size += 1
            training.next_state()

        for _ in range(3):
            training.check()
            another()
        points = _points(training.save)
        another()
        assert _not_passed(points, training.save, another) == []
        training.check()


@pytest.mark.timeout(600)
def test_an_exception_of_a_handler_comes_out_of_a_load_as_it_is(root: Path) -> None:
    """The load also takes no checkpoint for damaged, and sets none aside."""
    with Checkpointer(root) as checkpointer:
        training = Training(checkpointer)
        training.next_state()
        training.state["planned"] = {1: "a", (2, 3): [torch.ones(3), None]}  # planned by DCP's planner
        training.save().result(60)
        into = zeros_like(training.state)

        def load() -> object:
            return checkpointer.load(into, memory=False, fallback=True)

        load()
        found: dict[Point, None] = {}
        with _traced(lambda point: found.setdefault(point)):
            load()
        points = [point for point in found if point[2].co_name != "<genexpr>"]  # Python discards errors in these
        assert _not_passed(points, load, lambda: None) == []
        assert load() == 1 and same(into, training.state)
