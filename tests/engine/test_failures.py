"""Test failed saves: the errors in the training, and the saves after them."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.events import Heard
from support.ranks import told
from support.segments import mapped_segments
from support.states import same, small_state, zeros_like
from support.workers import FAULTY, Faulty, overdue, wait_for, wait_reached

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointError,
    ClosedError,
    SaveTimeoutError,
    StorageError,
    UnsavableStateError,
    WorkerDiedError,
)
from asyncckpt.extension import storage_for
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.root_lock import LOCK_NAME
from asyncckpt.link.takeover import is_running
from asyncckpt.planning.plan import Plan
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.staging.buffer import StagingBuffer
from asyncckpt.storage.partial import attempt_path


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_save_is_made_and_raises_what_nobody_was_told(
    root: Path, faulty_worker: Faulty, overlap: bool
) -> None:
    faulty_worker("write:eio")
    with Checkpointer(root, Config(overlap=overlap)) as checkpointer:
        save = checkpointer.save(1, small_state())
        while not save.done():
            time.sleep(0.01)
        state = small_state()
        with pytest.raises(StorageError, match="step 1"):
            checkpointer.save(2, state)
        expected = copy.deepcopy(state)
        state["model"]["weight"].zero_()  # the state is staged by now
        checkpointer.save(3, small_state()).result(60)
        assert checkpointer.failures == 1 and checkpointer.steps() == [2, 3]
        assert checkpointer.load(into := zeros_like(expected), 2) == 2 and same(into, expected)


def test_the_failure_of_a_save_that_raised_is_for_the_next_call(root: Path) -> None:
    """The failed call returns no handle."""
    checkpointer = Checkpointer(root)
    checkpointer.save(0, small_state()).result(60)
    assert checkpointer._engine.worker is not None
    resource.prlimit(checkpointer._engine.worker.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    save = checkpointer.save(1, small_state())
    while not save.done():
        time.sleep(0.01)
    with pytest.raises(StorageError, match="step 1"):
        checkpointer.save(2, small_state())
    with pytest.raises(StorageError, match="step 2"):
        checkpointer.wait(60)
    checkpointer.close()
    assert checkpointer.failures == 2 and checkpointer.steps() == [0]


def test_or_a_warning_is_enough(root: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    faulty_worker("write:eio")
    checkpointer = Checkpointer(root, Config(failure="warn"))
    save = checkpointer.save(1, small_state())
    while not save.done():
        time.sleep(0.01)
    checkpointer.save(2, small_state()).result(60)
    twice = checkpointer.save(2, small_state())  # this step exists already
    assert twice.done() and twice.staged() and twice.failure is not None
    with pytest.raises(StorageError, match="step 1"):
        save.result()  # the handle still raises
    checkpointer.wait(60)
    checkpointer.close()
    with pytest.raises(ClosedError):
        checkpointer.save(3, small_state())
    assert checkpointer.failures == 2 and checkpointer.steps() == [2]
    assert "saving failed" in caplog.text and "a save failed, and the training continues" in caplog.text


@pytest.mark.parametrize("saves_before", [0, 1])
def test_names_that_collide_are_an_error_of_ours(root: Path, saves_before: int) -> None:
    """After a save of another structure, the names are first compared with the old ones. The error is the same."""
    twice = {"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)}
    failures: tuple[Literal["raise", "warn"], ...] = ("raise", "warn")
    for failure in failures:
        with Checkpointer(root / failure, Config(failure=failure)) as checkpointer:
            for step in range(saves_before):
                checkpointer.save(step, small_state()).result(60)
            with pytest.raises(UnsavableStateError, match=r"duplicated flatten key a\.b"):
                checkpointer.save(7, twice).result(60)
            assert checkpointer.steps() == [*range(saves_before)]


def test_a_worker_that_dies_in_the_call_is_passed_over_too(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("begin:kill")
    with Checkpointer(root, Config(failure="warn")) as checkpointer:
        save = checkpointer.save(1, small_state())
        faulty_worker("")
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            save.result(60)
        checkpointer.save(2, small_state()).result(60)
        assert checkpointer.failures == 1


def test_workers_that_die_one_after_the_other(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:kill")
    with Checkpointer(root, Config(worker_restarts=2, restart_pause=0.3)) as checkpointer:

        def fails(step: int) -> str:
            with pytest.raises(WorkerDiedError) as caught:
                checkpointer.save(step, small_state()).result(60)
            return str(caught.value)

        assert "SIGKILL" in fails(1)
        assert "SIGKILL" in fails(2)  # the next save starts a new worker at once
        assert "another is started in 0." in fails(3)
        time.sleep(0.31)
        assert "SIGKILL" in fails(4)
        assert "3 times in a row" in fails(5)
    faulty_worker("")
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)


def test_a_commit_is_a_new_start(root: Path) -> None:
    with Checkpointer(root, Config(worker_restarts=1, restart_pause=60)) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, small_state()).result(60)
            worker = checkpointer._engine.worker
            assert worker is not None
            os.kill(worker.pid, signal.SIGKILL)
            worker._listener.join(10)
        assert checkpointer.steps() == [1, 2, 3, 4]


def _has_other_memory(inode: int) -> bool:
    return bool(set(mapped_segments()) - {inode})


def _has_another(checkpointer: Checkpointer, worker: WorkerClient) -> bool:
    return checkpointer._engine.worker not in (None, worker)


def test_a_worker_that_dies_takes_its_memory_along(root: Path) -> None:
    """A new worker allocates memory in the background, before the next save needs it."""
    heard = Heard()
    with Checkpointer(root, on_event=heard) as checkpointer:
        state = small_state()
        for step in (1, 2):
            checkpointer.save(step, state).result(60)
            (inode,) = mapped_segments()
            worker = checkpointer._engine.worker
            assert worker is not None
            os.kill(worker.pid, signal.SIGKILL)
            wait_for(partial(_has_other_memory, inode))
            checkpointer.prepare(state)  # runs after the work in the background
            assert len(mapped_segments()) == 1 and checkpointer._engine.worker is not worker
            assert heard.phases(None).count("worker restarted") == step
        checkpointer.load(into := zeros_like(state), 2)
        assert same(into, state)


def test_a_worker_that_dies_again_waits_for_the_next_save(root: Path) -> None:
    """Otherwise a worker that crashes at its start would be restarted forever."""
    with Checkpointer(root, Config(restart_pause=0)) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        for is_replaced in (True, False):
            worker = checkpointer._engine.worker
            assert worker is not None
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait_for_end(30)
            if is_replaced:
                wait_for(partial(_has_another, checkpointer, worker))
        time.sleep(0.5)
        assert checkpointer._engine.worker is worker
        checkpointer.save(2, small_state()).result(60)


def test_storage_that_stalls_stops_nobody(
    root: Path, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("write:hold")
    with Checkpointer(root, Config(commit_timeout=2.0)) as checkpointer:
        save = checkpointer.save(1, small_state())
        begun = time.monotonic()
        with pytest.raises(SaveTimeoutError, match="step 1") as caught:
            save.result(60)
        assert time.monotonic() - begun < 30 and caught.value.rank == 0
        (tmp_path / "gate").touch()
        checkpointer._engine.config = replace(checkpointer._engine.config, commit_timeout=60)  # must succeed
        checkpointer.save(2, small_state()).result(60)
        assert checkpointer.steps() == [2]
        deadline = time.monotonic() + 30
        while list(root.glob(".*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not list(root.glob(".*"))


@pytest.mark.parametrize("fault", ["begin:stop", "write:stop", "finalize:stop", "finalize:hold"])
def test_what_was_told_as_failed_is_never_saved(
    root: Path, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The worker is only slow, and continues after the save has timed out."""
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker(fault)
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, small_state())
        worker = checkpointer._engine.worker
        assert worker is not None
        with overdue(tmp_path / "gate"), pytest.raises(SaveTimeoutError, match="step 1"):
            save.result(60)
        (tmp_path / "gate").touch()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGCONT)
    # The closed checkpointer has ended its worker, so no work is pending.
    assert checkpointer.steps() == [] and [path.name for path in root.iterdir()] == [LOCK_NAME]


@pytest.mark.parametrize("fault", ["finalized:stop", "finalized:hold"])
def test_what_was_saved_is_told_as_saved(
    root: Path, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker(fault)
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, small_state())
        faulty_worker("")
        with overdue(tmp_path / "gate"):
            save.result(60)
        assert checkpointer.steps() == [1] and checkpointer.failures == 0
        checkpointer.save(2, small_state()).result(60)


STUCK = '''
import os, signal, sys, torch
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.link import process as worker_process
from support.ranks import say
real = worker_process.command
code = """
import runpy, sys
from asyncckpt.worker import saves
assert saves.SILENCE_S > 1.0
saves.SILENCE_S = 1.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
worker_process.command = lambda: [real()[0], "-c", code, sys.argv[2], "write:hold"]
checkpointer = Checkpointer(sys.argv[1], Config(commit_timeout=0.5))
checkpointer.save(1, {"w": torch.ones(1000)})
say(checkpointer._engine.worker.pid)
os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.mark.usefixtures("forkserver")
def test_a_write_that_never_returns_keeps_no_process(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    code, worker = told(STUCK, str(root), FAULTY)
    assert code == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_file_system_that_vanishes(
    root: Path, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system vanishes with all files during a save, and comes back empty."""
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("finalize:hold")
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, state := small_state())
        wait_reached(tmp_path / "gate")
        shutil.rmtree(root)
        (tmp_path / "gate").touch()
        with pytest.raises(StorageError, match="step 1"):
            save.result(60)
        checkpointer.save(2, state).result(60)
        assert checkpointer.load(zeros_like(state)) == 2


def test_no_space_for_it_is_seen_before_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="needs .* and the file system has"):
        storage_for(str(root)).begin_checkpoint(str(root / "a"), "attempt", 1 << 60)
    assert not list(root.iterdir())


def test_what_a_killed_worker_left_is_removed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker removes a folder if the user owns it, no process holds its lock, and it is old."""
    root.mkdir()
    hour_ago = time.time() - 3600
    held = storage_for(str(root)).begin_checkpoint(str(root / "step-00000001"), "0123456789ab-1", 1)
    folders = {
        "dead": Path(attempt_path(str(root / "step-00000002"), "0123456789ab-2")),
        "trash": root / ".step-00000003.asyncckpt-trash",
        "young": Path(attempt_path(str(root / "step-00000004"), "0123456789ab-4")),
        "other": root / ".other-program",
        "download": root / ".download.partial",
        "bin": root / ".trash",
        "precious": root / ".precious.0123456789ab-6.partial",
    }
    for folder in folders.values():
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"x" * 100)
        if folder == folders["precious"]:
            (folder / "mine.txt").touch()
            os.utime(folder / "mine.txt", (hour_ago, hour_ago))
        if folder != folders["young"]:
            os.utime(folder / "__0_0.distcp", (hour_ago, hour_ago))
        os.utime(folder, (hour_ago, hour_ago))
    os.utime(held.path, (hour_ago, hour_ago))
    if os.geteuid() == 0:
        folders["stranger's"] = Path(attempt_path(str(root / "step-00000005"), "0123456789ab-5"))
        folders["stranger's"].mkdir()
        os.chown(folders["stranger's"], 65534, 65534)
        os.utime(folders["stranger's"], (hour_ago, hour_ago))
    with Checkpointer(root) as checkpointer:
        checkpointer.save(6, {"w": torch.ones(3)}).result(60)
    left = {name for name, folder in folders.items() if folder.exists()}
    assert left == set(folders) - {"dead", "trash"}
    assert Path(held.path).exists()
    held.discard()


def test_one_that_was_being_replaced_gets_its_name_back(root: Path) -> None:
    """If the file system cannot exchange names, a kill can come while neither checkpoint has the name."""
    state = {"w": torch.ones(3), "step": 1}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result(60)
    old = root / ".step-00000001.0123456789ab-1.asyncckpt-old"
    (root / "step-00000001").rename(old)
    hour_ago = time.time() - 3600
    for each in (*old.iterdir(), old):
        os.utime(each, (hour_ago, hour_ago))
    with Checkpointer(root) as checkpointer:
        checkpointer.save(2, state).result(60)
        assert checkpointer.steps() == [1, 2]
        checkpointer.load(state, 1)


def test_the_first_error_is_the_one_that_is_raised(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:eio")
    with pytest.raises(RuntimeError, match="as trainings do"), Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state())
        raise RuntimeError("as trainings do")


def test_leaving_by_an_error_loses_nothing(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(RuntimeError, match="as trainings do"), Checkpointer(root) as checkpointer:
        checkpointer.save(1, state := small_state())
        raise RuntimeError("as trainings do")
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(into := zeros_like(state)) == 1 and same(into, state)
    assert "step 1 was loaded from memory" in caplog.text


def test_a_state_that_changes_while_it_is_planned_leaves_no_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[StagingBuffer] = []
    close = StagingBuffer.close

    def closing(self: StagingBuffer) -> None:
        closed.append(self)
        close(self)

    def changed(*_: object, **__: object) -> None:
        raise StructureChanged("a tensor has another shape")

    with Checkpointer(root) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(StagingBuffer, "close", closing)
            patch.setattr(Plan, "capture", changed)
            with pytest.raises(UnsavableStateError, match="while it is looked at"):
                checkpointer.save(1, small_state())
        (buffer,) = closed
        assert buffer.segment.closed
        checkpointer.save(1, small_state()).result(60)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_thread_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Refuse each thread in turn: the call fails and names the thread limit, or does without the thread."""
    start: Any = threading._start_new_thread  # type: ignore[attr-defined]
    refused, begun, tries = 0, 0, 0

    def refuse(*args: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == refused:
            raise RuntimeError("can't start new thread")
        return start(*args)

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    failures = 0
    while begun >= refused:
        refused, begun, tries = refused + 1, 0, tries + 1
        into = {"w": torch.zeros(3_000_000)}
        with contextlib.ExitStack() as opened:
            try:
                checkpointer = opened.enter_context(Checkpointer(tmp_path / str(tries), Config(overlap=overlap)))
                checkpointer.save(1, {"w": torch.ones(3_000_000)}).result(60)
                checkpointer.load(into)
                assert bool((into["w"] == 1).all())
            except CheckpointError as error:
                failures += 1
                assert "no thread can be started" in str(error) and "RLIMIT_NPROC" in str(error)
    assert failures >= 3 and tries > failures + 1
