"""Test a worker that ``asyncckpt worker`` starts before its trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.abilities import need_command
from support.recovery import empty, is_of, source, train
from support.workers import wait_for

from asyncckpt import Checkpointer, cli
from asyncckpt.config import Config
from asyncckpt.link.endpoint import FOLDER_VARIABLE, connect, endpoint_name
from asyncckpt.link.takeover import retire_idle_workers

pytestmark = pytest.mark.usefixtures("forkserver")

LIMIT_S = 60.0
ENDS = (0, -signal.SIGTERM)
"""The exit codes of a worker that gets SIGTERM. Python removes its signal handlers at the end of the process."""
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@contextlib.contextmanager
def _started(root: Path, *arguments: str, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker for ``root`` as a user does, with its standard error piped. ``before``: a command prefix."""
    command = [*before, sys.executable, "-m", "asyncckpt", "worker", "--root", str(root), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def _wait_until_it_listens(root: Path, rank: int = 0, job: str = "") -> None:
    def listens() -> bool:
        if (connection := connect(endpoint_name(f"{os.path.realpath(root)}\n{job}", rank))) is None:
            return False
        connection.close()
        return True

    wait_for(listens)


def _pid(checkpointer: Checkpointer) -> int:
    worker = checkpointer._engine.worker
    assert worker is not None
    return worker.pid


@pytest.mark.parametrize("before", [(), CONTAINER], ids=["beside", "container"])
def test_trainers_attach_to_it(root: Path, before: Sequence[str]) -> None:
    """The first trainer dies, and the next one loads from memory. The worker takes its options, and ends with it."""
    need_command(*before, "true")
    with _started(root, before=before) as worker:
        _wait_until_it_listens(root)
        (its,) = psutil.Process(worker.pid).children() or [psutil.Process(worker.pid)]
        assert train(root, 2) == its
        with Checkpointer(root, Config(nice=11)) as checkpointer:
            assert checkpointer.load(state := empty()) == 2 and is_of(state, 2) and source(checkpointer) == "memory"
            checkpointer.save(3, state).result(LIMIT_S)
            assert _pid(checkpointer) == its.pid and its.nice() == 11
        assert worker.wait(LIMIT_S) == 0
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty(), memory=False) == 3


def test_it_starts_for_a_rank_and_a_job_of_its_own(root: Path) -> None:
    """A trainer in the same folder without a job ID starts its own worker."""
    with _started(root, "--rank", "1") as other, _started(root, "--job-id", "mine") as mine:
        _wait_until_it_listens(root, 1)
        _wait_until_it_listens(root, job="mine")
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, empty()).result(LIMIT_S)
            assert _pid(checkpointer) not in (mine.pid, other.pid)
        with Checkpointer(root, Config(job_id="mine")) as checkpointer:
            checkpointer.save(2, empty()).result(LIMIT_S)
            assert _pid(checkpointer) == mine.pid
        assert mine.wait(LIMIT_S) == 0 and other.poll() is None


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "command", "time"])
def test_it_ends_where_no_trainer_comes(root: Path, how: str) -> None:
    with _started(root, *(["--wait", "0.5"] if how == "time" else [])) as worker:
        if how != "time":
            _wait_until_it_listens(root)
        if how == "command":
            assert cli.main(["workers", "--end", str(worker.pid)]) == 0
        elif how != "time":
            worker.send_signal(signal.Signals[how])
        assert worker.wait(LIMIT_S) == 0
    assert not root.exists()


def test_it_outlives_signals_to_its_trainer(root: Path) -> None:
    """A launcher sends signals to all processes of a job, and restarts the trainer."""
    with _started(root) as worker:
        _wait_until_it_listens(root)
        with pytest.raises(RuntimeError), Checkpointer(root) as checkpointer:
            checkpointer.save(1, empty()).result(LIMIT_S)
            worker.send_signal(signal.SIGTERM)
            worker.send_signal(signal.SIGINT)
            checkpointer.save(2, empty()).result(LIMIT_S)
            raise RuntimeError("the training is told to end")
        with Checkpointer(root) as checkpointer:
            assert checkpointer.load(empty()) == 2 and source(checkpointer) == "memory"
            checkpointer.save(3, empty()).result(LIMIT_S)
            assert _pid(checkpointer) == worker.pid
        assert worker.wait(LIMIT_S) == 0


def test_it_stays_where_another_job_needs_memory(root: Path) -> None:
    """The worker has no memory to give back."""
    with _started(root) as worker:
        _wait_until_it_listens(root)
        assert not retire_idle_workers(LIMIT_S)
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, empty()).result(LIMIT_S)
            assert _pid(checkpointer) == worker.pid


@pytest.mark.parametrize("arguments", [("--rank", "-1"), ("--wait", "-1"), ("--wait", "nan")])
def test_numbers_below_0_are_refused(root: Path, arguments: tuple[str, str]) -> None:
    with _started(root, *arguments) as worker:
        said = worker.communicate(timeout=LIMIT_S)[1].decode()
    assert worker.returncode == 2 and "is below 0" in said


def test_a_relative_runtime_folder_is_that_of_the_shell(
    root: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's working directory is "/"."""
    monkeypatch.chdir(runtime.parent)
    monkeypatch.setenv(FOLDER_VARIABLE, runtime.name)
    with _started(root) as worker:
        _wait_until_it_listens(root)
        worker.terminate()
        assert worker.wait(LIMIT_S) == 0


def test_a_second_one_says_that_there_is_one(root: Path) -> None:
    with _started(root) as worker:
        _wait_until_it_listens(root)
        with _started(root) as second:
            said = second.communicate(timeout=LIMIT_S)[1].decode()
        assert second.returncode == 2 and str(worker.pid) in said, said
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(LIMIT_S) == 0


def test_a_trainer_with_other_transports_starts_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old worker says why it ends."""
    with _started(root) as worker:
        _wait_until_it_listens(root)
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, empty()).result(LIMIT_S)
            assert _pid(checkpointer) != worker.pid
        said = worker.communicate(timeout=LIMIT_S)[1].decode()
        assert worker.returncode == 0 and "other transports" in said, said


def test_a_trainer_that_comes_as_it_ends_starts_its_own(root: Path) -> None:
    """The trainer's save works at any delay between the two."""
    for delay in (0.0, 0.02, 0.1):
        with _started(root) as worker:
            _wait_until_it_listens(root)
            ending = threading.Timer(delay, worker.terminate)
            ending.start()
            with Checkpointer(root, Config(keep_last=2)) as checkpointer:
                checkpointer.save((checkpointer.latest() or 0) + 1, empty()).result(LIMIT_S)
            ending.join()
            assert worker.wait(LIMIT_S) in ENDS


def test_one_that_lingers_for_a_dead_trainer_ends_by_a_signal(root: Path) -> None:
    """The worker ignores signals until all images are written."""
    with _started(root) as worker:
        _wait_until_it_listens(root)
        assert train(root, 1) is not None

        def has_ended() -> bool:
            worker.terminate()
            return worker.poll() is not None

        wait_for(has_ended)
        assert worker.returncode in ENDS
