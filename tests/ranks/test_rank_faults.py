"""The fault matrix: each fault in each phase of a save, on the first rank or on another rank."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from support.checkpoints import verify
from support.ranks import LIMIT_S, Job, faulty, say
from support.states import equal, replicas

from asyncckpt import Checkpointer, Config
from asyncckpt.errors import CheckpointError, SaveTimeoutError, StorageError
from asyncckpt.extension import Rounds
from asyncckpt.link import process as worker_process
from asyncckpt.link.api import SessionApi
from asyncckpt.planning import draft
from asyncckpt.ranks import group
from asyncckpt.staging import slot_copy as staging

pytestmark = pytest.mark.usefixtures("forkserver")


# Short timeouts, because saves of a stalled rank run into them. No other save may need as long.
SHORT_S = 12.0
LONG_S = 20.0
START_S = 15.0
PATIENCE_S = 20.0
# The timeout for ranks that are only slow.
SLOW_S = 8.0

TRAINERS = {"plan": (draft.Draft, "lay_out"), "stage": (staging.SlotStager, "copy")}
WORKERS = {"exception": "eio", "kill worker": "kill", "kill trainer": "orphan", "stall": "stop"}


def _fail_in_trainer(checkpointer: Checkpointer, phase: str, fault: str) -> None:
    """Make the next call of a phase fail on this rank."""
    owner, name = TRAINERS[phase]
    real = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, real)
        if fault == "exception":
            raise OSError("as the test wants")
        if fault == "kill worker":
            worker = checkpointer._engine.worker
            assert worker is not None
            os.kill(worker.pid, signal.SIGKILL)
            worker._listener.join(10)
        if fault == "kill trainer":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stall":
            time.sleep(1.6 * SHORT_S)
        return real(*args, **kwargs)

    setattr(owner, name, failing)


def _limit(checkpointer: Checkpointer, seconds: float) -> None:
    """Limit the time of later saves, but neither requests to a worker nor the wait for its exit."""
    engine = checkpointer._engine
    assert engine._group is not None
    engine.config = replace(engine.config, timeout=seconds, commit_timeout=seconds)
    engine._saves._config = engine._group._config = engine.config


def _save_with_a_fault(root: str, phase: str, bad: int, fault: str) -> tuple[str, int | None, float, bool]:
    """Return the result of the second save, the rank in its error, its seconds, and whether the next save works."""
    mine = dist.get_rank() == bad
    if mine and phase not in TRAINERS:
        # The first save works. The first rank needs a higher count, because it writes small files too.
        nth = {"write": 7 if bad == 0 else 4, "report": 2, "finalize": 2}[phase]
        lost = fault == "exception" and (phase == "report" or (phase == "finalize" and bad == 1))
        faulty(f"{phase}:{'lose' if lost else WORKERS[fault]}:{nth}")
    checkpointer = Checkpointer(root, Config(timeout=LONG_S, commit_timeout=LONG_S, start_timeout=START_S))
    checkpointer.save(1, replicas(1)).result(60)
    if fault == "stall":
        _limit(checkpointer, SHORT_S)
        dist.barrier()  # only the faulty rank is late
    worker = checkpointer._engine.worker
    assert worker is not None
    if mine and phase in TRAINERS:
        _fail_in_trainer(checkpointer, phase, fault)
    state = replicas(2, 25 if phase == "plan" else 24)  # another structure needs a new plan
    begun = time.monotonic()
    kind, rank = "saved", None
    try:
        checkpointer.save(2, state).result(90)
    except CheckpointError as error:
        kind, rank = type(error).__name__, error.rank
    took = time.monotonic() - begun
    if fault == "stall" and mine and phase not in TRAINERS:
        with contextlib.suppress(ProcessLookupError):  # its trainer may have killed it
            os.kill(worker.pid, signal.SIGCONT)
    works = False
    if fault in ("exception", "kill worker"):
        dist.barrier()
        checkpointer.save(3, replicas(3)).result(30)
        works = True
    try:
        checkpointer.close()
    except CheckpointError as error:
        assert fault == "stall" or isinstance(error, SaveTimeoutError), error  # noqa: PT017
    return kind, rank, took, works


@pytest.mark.parametrize("fault", ["exception", "kill worker", "kill trainer", "stall"])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("phase", ["plan", "stage", "write", "report", "finalize"])
def test_matrix(tmp_path: Path, phase: str, bad: int, fault: str) -> None:
    root = tmp_path / "root"
    ended = Job(2, _save_with_a_fault, str(root), phase, bad, fault, folder=tmp_path).wait()
    other = ended[1 - bad]
    assert other.error is None and not other.killed, other.error
    kind, rank, took, works = other.result
    if fault == "kill trainer":
        assert ended[bad].killed
    else:
        assert ended[bad].error is None, ended[bad].error
        assert (ended[bad].result[0] == "saved") == (kind == "saved")  # all ranks or none
        assert works or fault == "stall"
    # A stalled worker is killed. The other rank's worker looks for the store for a while, because a new worker may host
    # it.
    assert took < (2 * SHORT_S + PATIENCE_S if fault == "stall" else 2.5 * LONG_S)

    # The staged save of a killed trainer is committed, unless the trainer dies while staging. If a worker is gone or
    # stopped after its report, the save fails unless the first rank already has all reports.
    survives = fault == "kill trainer" and phase not in TRAINERS
    is_only_lost = fault == "exception" and (phase == "report" or (phase, bad) == ("finalize", 1))
    if survives or is_only_lost:  # a lost connection to the first rank is made again
        assert kind == "saved"
    if kind != "saved":
        assert rank == bad, (kind, rank)
        expected = {
            "exception": {"StorageError", "CheckpointError", "RankFailedError", "WorkerDiedError"},
            "kill worker": {"WorkerDiedError"},
            # The first rank's worker lingers for a while after its trainer's death.
            "kill trainer": {"RankFailedError", "WorkerDiedError", "SaveTimeoutError"},
            # A silent worker is killed. The other rank may learn of that first.
            "stall": {"SaveTimeoutError", "WorkerDiedError"},
        }
        assert kind in expected[fault]

    _wait_for_workers(root)
    with Checkpointer(root) as checkpointer:
        steps = checkpointer.steps()
        assert steps == [1, *([2] if kind == "saved" else []), *([3] if works else [])]
        for step in steps:
            assert not verify(str(root / f"step-{step:08d}")).damages
        into = replicas(9, 25 if steps[-1] == 2 and phase == "plan" else 24)
        assert checkpointer.load(into) == steps[-1]
        assert equal(into, replicas(steps[-1], len(into["model"])))


def _outlive(root: str, gate: str, fault: str, trainer_dies: bool) -> str:
    """Save while the first rank's worker makes no progress. Send the result to the test when it is known."""
    os.environ["ASYNCCKPT_TEST_GATE"] = gate
    if dist.get_rank() == 0:
        faulty(fault)
    # All workers must start within the commit timeout, and a start takes seconds on a loaded machine.
    checkpointer = Checkpointer(root, Config(timeout=2 * SLOW_S, commit_timeout=2 * SLOW_S, start_timeout=START_S))
    group.SILENCE_S = SLOW_S  # type: ignore[attr-defined]
    save = checkpointer.save(1, replicas(1))
    if dist.get_rank() == 0:
        worker = checkpointer._engine.worker
        assert worker is not None
        say(worker.pid)
        while trainer_dies and not os.path.exists(gate + ".reached"):
            time.sleep(0.005)
        if trainer_dies:
            os.kill(os.getpid(), signal.SIGKILL)
    kind = "saved"
    try:
        save.result(LIMIT_S - 10)  # a stopped store costs several waits
    except CheckpointError as error:
        kind = type(error).__name__
    assert save.done()
    say(kind)
    with contextlib.suppress(CheckpointError):
        checkpointer.close()
    return kind


@pytest.mark.parametrize("trainer_dies", [False, True])
@pytest.mark.parametrize("fault", ["finalize:hold", "finalize:stop", "finalized:hold", "finalized:stop"])
def test_a_first_rank_that_is_only_slow(tmp_path: Path, fault: str, trainer_dies: bool) -> None:
    """The worker continues when no rank waits any more. Storage still agrees with the result on all ranks."""
    root, gate = tmp_path / "root", tmp_path / "gate"
    job = Job(2, _outlive, str(root), str(gate), fault, trainer_dies, folder=tmp_path)
    worker = job.hear(0)
    kind = job.hear(1)
    if not trainer_dies:
        assert job.hear(0) == kind
    gate.touch()
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)
    job.wait()
    _wait_for_workers(root)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.steps() == ([1] if kind == "saved" else [])
    if fault.startswith("finalized"):
        assert kind == "saved"
    else:  # a client cannot tell a stopped store from a dead one
        assert kind == "SaveTimeoutError" or (fault == "finalize:stop" and kind == "WorkerDiedError")


def _fail_early(root: str, bad: int) -> tuple[list[str], float]:
    """One rank's save fails before it asks the others. The others must not wait for it."""
    checkpointer = Checkpointer(root, Config(timeout=90, start_timeout=START_S, failure="raise"))
    mine = dist.get_rank() == bad
    if mine:
        worker_process.command = lambda: ["/nonexistent/python"]
    begun = time.monotonic()
    kinds = []
    for step in (2, 3):
        try:
            checkpointer.save(step, replicas(step)).result(30)
            kinds.append("saved")
        except CheckpointError as error:
            kinds.append(f"{type(error).__name__} of rank {error.rank}")
        if mine and step == 2:
            worker_process.command = real_command
        if step == 2:
            took = time.monotonic() - begun
            dist.barrier()
    checkpointer.close()
    return kinds, took


real_command = worker_process.command


@pytest.mark.parametrize("bad", [0, 1])
def test_one_that_fails_before_it_asks(tmp_path: Path, bad: int) -> None:
    ended = Job(2, _fail_early, str(tmp_path / "root"), bad, folder=tmp_path).wait()
    assert not any(end.error for end in ended), ended
    for end in ended:
        kinds, took = end.result
        assert kinds[0].startswith("WorkerDiedError") and kinds[1] == "saved", kinds
        assert took < 60  # a worker starts in less time


def _fail_late(root: str, told: int) -> tuple[list[str], list[int]]:
    """A save fails after all ranks have returned from the call. One rank asks the handle, and the other does not."""
    checkpointer = Checkpointer(root, Config(timeout=LONG_S, start_timeout=START_S))
    checkpointer.save(1, replicas(1)).result(30)
    dist.barrier()
    if dist.get_rank() == 0:
        assert checkpointer._engine.worker is not None
        resource.prlimit(checkpointer._engine.worker.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    dist.barrier()
    save = checkpointer.save(2, replicas(2))
    kinds = []
    while not save.done():
        time.sleep(0.01)
    if dist.get_rank() == told:
        with contextlib.suppress(StorageError):
            save.result()
    if dist.get_rank() == 0:
        assert checkpointer._engine.worker is not None
        resource.prlimit(checkpointer._engine.worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    dist.barrier()
    for step in (3, 4):
        try:
            checkpointer.save(step, replicas(step)).result(30)
            kinds.append("saved")
        except CheckpointError as error:
            kinds.append(f"{type(error).__name__} of step {error.step}")
    checkpointer.close()
    return kinds, checkpointer.steps()


@pytest.mark.parametrize("told", [0, 1])
def test_what_one_rank_was_not_told_costs_no_save(tmp_path: Path, told: int) -> None:
    ended = Job(2, _fail_late, str(tmp_path / "root"), told, folder=tmp_path).wait()
    assert not any(end.error for end in ended), ended
    for rank, end in enumerate(ended):
        assert end.result == (["saved" if rank == told else "StorageError of step 2", "saved"], [1, 3, 4])


def _lose_the_worker(root: str, bad: int) -> tuple[list[int], int]:
    checkpointer = Checkpointer(root, Config(timeout=LONG_S, start_timeout=START_S))
    checkpointer.save(1, replicas(1)).result(30)
    worker = checkpointer._engine.worker
    assert worker is not None
    dist.barrier()  # both ranks know that the first save is committed
    if dist.get_rank() == bad:
        os.kill(worker.pid, signal.SIGKILL)
        worker._listener.join(10)
    dist.barrier()
    checkpointer.watch_signals()
    assert not checkpointer.terminating()
    checkpointer.save(2, replicas(2)).result(30)
    assert not checkpointer.terminating()
    checkpointer.close()
    return checkpointer.steps(), checkpointer.failures


@pytest.mark.parametrize("bad", [0, 1])
def test_a_worker_that_died_between_saves_is_replaced(tmp_path: Path, bad: int) -> None:
    ended = Job(2, _lose_the_worker, str(tmp_path / "root"), bad, folder=tmp_path).wait()
    assert [end.result for end in ended] == [([1, 2], 0)] * 2, ended


def _fail_the_worker(root: str) -> list[int]:
    """Begin rank 1's next save when rank 0 looks for missing ranks. Rank 1's worker is replaced by then, or not yet."""
    looked, is_first = Path(f"{root}.looked"), dist.get_rank() == 0
    with Checkpointer(root, Config(timeout=LONG_S, start_timeout=START_S)) as checkpointer:
        checkpointer.save(1, replicas(1)).result(30)
        worker = checkpointer._engine.worker
        assert worker is not None
        dist.barrier()  # both ranks know that the first save is committed
        if is_first:
            check: Any = Rounds._check_missing

            def look(*args: Any) -> None:
                looked.touch()
                check(*args)

            Rounds._check_missing = look  # type: ignore[assignment, method-assign]
        else:
            worker.tell(SessionApi.give_back, 999, 0, ())  # a segment that the worker does not have
            worker._listener.join(10)
        dist.barrier()
        while not is_first and not looked.exists():
            time.sleep(0.01)
        checkpointer.save(2, replicas(2)).result(30)
    return checkpointer.steps()


def test_a_worker_that_failed_between_saves_is_replaced(tmp_path: Path) -> None:
    """The worker exits after an exception, so it can tell the other ranks.

    Its trainer lives, and takes part in the next save.
    """
    ended = Job(2, _fail_the_worker, str(tmp_path / "root"), folder=tmp_path).wait()
    assert [end.result for end in ended] == [[1, 2]] * 2, ended


def _wait_for_workers(root: Path) -> None:
    """Wait until no worker has a file open under ``root``."""
    deadline = time.monotonic() + 60
    while True:
        left = [
            process
            for process in psutil.process_iter(["cmdline"])
            if "worker" in " ".join(process.info["cmdline"] or []) and _holds(process, str(root))
        ]
        if not left:
            return
        assert time.monotonic() < deadline, f"workers still write: {left}"
        time.sleep(0.05)


def _holds(process: psutil.Process, root: str) -> bool:
    try:
        return any(os.readlink(fd).startswith(root) for fd in Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:
        return False


def _hear_late(root: str) -> tuple[float, str]:
    """Return how long a late rank waits after the first rank's worker dies, and the error that it gets."""
    if dist.get_rank() == 0:
        faulty("create:kill")
    else:
        real = Rounds.outcome

        def late(self: Rounds, name: str, *args: Any, **kwargs: Any) -> Any:
            if name.startswith("memory"):
                time.sleep(3)
                Rounds.outcome = real  # type: ignore[method-assign]
            return real(self, name, *args, **kwargs)

        Rounds.outcome = late  # type: ignore[method-assign]
    config = Config(timeout=LONG_S, commit_timeout=LONG_S, start_timeout=START_S)
    with Checkpointer(root, config) as checkpointer:
        checkpointer._engine.start()
        faulty("none:eio")
        begun, told = time.monotonic(), ""
        try:
            checkpointer.save(1, replicas(1)).result(LIMIT_S)
        except CheckpointError as error:
            told = type(error).__name__
        took = time.monotonic() - begun
        checkpointer.save(2, replicas(2)).result(LIMIT_S)
        return took, told


def test_who_is_late_hears_that_the_first_worker_has_died(tmp_path: Path) -> None:
    """The replacement worker tells the late rank, and the next save works."""
    for ended in Job(2, _hear_late, str(tmp_path / "root"), folder=tmp_path).wait():
        assert ended.error is None, ended.error
        took, told = ended.result
        assert told and took < LONG_S / 2, ended.result
    assert [name for name in os.listdir(tmp_path / "root") if name.startswith("step")] == ["step-00000002"]


def _decide_in_vain(root: str) -> tuple[float, str]:
    """Save while the first rank cannot announce the result. Return the seconds, and the error."""
    config = Config(slots=2, when_busy="skip", timeout=LONG_S, commit_timeout=LONG_S, start_timeout=START_S)
    with Checkpointer(root, config) as checkpointer:
        checkpointer.save(1, replicas(1)).result(LIMIT_S)
        real: Any = Rounds.conclude_soon

        def refuse(*_: Any) -> Future[None]:
            Rounds.conclude_soon = real  # type: ignore[method-assign]
            refused: Future[None] = Future()
            refused.set_exception(SaveTimeoutError("as the test wants"))
            return refused

        if dist.get_rank() == 0:
            Rounds.conclude_soon = refuse  # type: ignore[assignment, method-assign]
        begun, told = time.monotonic(), ""
        try:
            checkpointer.save(2, replicas(2)).result(LIMIT_S)
        except CheckpointError as error:
            told = str(error)
        took = time.monotonic() - begun
        checkpointer.save(3, replicas(3)).result(LIMIT_S)
        return took, told


def test_a_decision_that_cannot_be_told_fails_the_save_at_once(tmp_path: Path) -> None:
    for ended in Job(2, _decide_in_vain, str(tmp_path / "root"), folder=tmp_path).wait():
        assert ended.error is None, ended.error
        took, told = ended.result
        assert "as the test wants" in told and took < LONG_S / 2, ended.result
    steps = sorted(name for name in os.listdir(tmp_path / "root") if name.startswith("step"))
    assert steps == ["step-00000001", "step-00000003"]
