"""Test that events are complete and in order, and that a listener can neither slow nor fail a save."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.events import Heard, all_heard
from support.ranks import script
from support.workers import wait_for

import asyncckpt
from asyncckpt import Checkpointer, Config
from asyncckpt import events as events_module
from asyncckpt.engine.saves import SaveOperation
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, WorkerDiedError
from asyncckpt.events import Event, Listener
from asyncckpt.weights import WeightPublisher

QUICK = Config(linger=0, timeout=60)
STATE = {"w": torch.arange(100_000)}
SAVE = ["planned", "staged", "written", "committed"]


@pytest.fixture
def heard() -> Iterator[Heard]:
    yield Heard()


@pytest.mark.parametrize("overlap", [False, True])
def test_each_phase_of_a_save_is_told_in_its_order(tmp_path: Path, heard: Heard, overlap: bool) -> None:
    with Checkpointer(tmp_path, Config(linger=0, overlap=overlap), on_event=heard) as checkpointer:
        for step in range(5):
            checkpointer.save(step, STATE)
            checkpointer.synchronize_staging()
    for step in range(5):
        assert heard.phases(step) == SAVE
    planned, staged, written, committed = (event for event in heard.events if event.step == 4)
    assert planned.source == "kept" and heard.events[0].phase == "worker started" and heard.events[1].source == "new"
    assert staged.seconds == staged.timings["copy_s"] and written.seconds == written.timings["write_s"]
    assert planned.nbytes == committed.nbytes and (planned.nbytes or 0) > STATE["w"].nbytes
    assert committed.path == str(tmp_path / "step-00000004") and committed.rank == 0
    assert {"plan_s", "copy_s", "stall_s", "write_s", "commit_s", "durable_s"} <= committed.timings.keys()
    assert 0 < committed.timings["stall_s"] < (committed.seconds or 0) < 60
    assert planned.at <= staged.at <= written.at <= committed.at <= time.time()


def test_a_refused_save_a_dead_worker_and_a_skipped_save(tmp_path: Path, heard: Heard) -> None:
    config = Config(linger=0, slots=1, when_busy="skip", restart_pause=0)
    with Checkpointer(tmp_path, config, on_event=heard) as checkpointer:
        checkpointer.save(1, STATE).result(60)
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(1, STATE)
        worker = checkpointer._engine.worker
        assert worker is not None
        os.kill(worker.pid, signal.SIGSTOP)
        stopped = checkpointer.save(2, STATE)
        checkpointer.save(3, STATE)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            stopped.result(60)
        checkpointer.save(4, STATE).result(60)
    assert heard.phases(1) == [*SAVE, "failed"]
    assert heard.phases(2) == ["planned", "staged", "failed"]
    assert heard.phases(3) == ["skipped"]
    assert heard.phases(4) == SAVE
    assert [event.phase for event in heard.events if event.step is None] == ["worker started", "worker restarted"]
    errors = {event.step: event.error or "" for event in heard.events if event.phase in ("failed", "skipped")}
    assert errors[1].startswith("CheckpointExistsError: ") and errors[2].startswith("WorkerDiedError: ")
    assert errors[3].startswith("SaveDroppedError: ")


def test_loads_are_told(tmp_path: Path, heard: Heard) -> None:
    with Checkpointer(tmp_path, QUICK, on_event=heard) as checkpointer:
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load({"w": torch.zeros(100_000, dtype=torch.int64)})
        checkpointer.save(3, STATE).result(60)
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load({}, step=9)
        checkpointer.load({"w": torch.zeros(100_000, dtype=torch.int64)})
        assert checkpointer.loaded is not None
    failed, *_, refused, loaded = heard.events
    assert (refused.phase, refused.step) == ("load failed", 9)
    assert failed.phase == "load failed" and (failed.error or "").startswith("CheckpointNotFoundError: ")
    assert (loaded.phase, loaded.step, loaded.source) == ("loaded", 3, "storage")
    assert loaded.nbytes == checkpointer.loaded.nbytes >= STATE["w"].nbytes
    assert loaded.seconds == checkpointer.loaded.seconds


class _Refuses:
    """A model that refuses every state."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(STATE)

    def load_state_dict(self, state: object) -> None:
        raise RuntimeError("as the test wants")


def test_a_state_that_is_refused_by_its_owner_is_told(tmp_path: Path, heard: Heard) -> None:
    with Checkpointer(tmp_path, QUICK, on_event=heard) as checkpointer:
        checkpointer.save(3, {"model": _Refuses()}).result(60)
        with pytest.raises(RuntimeError, match="as the test wants"):
            checkpointer.load({"model": _Refuses()})
    assert heard.events[-1].phase == "load failed" and "as the test wants" in (heard.events[-1].error or "")


def test_a_worker_that_is_quick_does_not_change_the_order(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_return = SaveOperation.on_return

    def slow(self: SaveOperation) -> None:
        self.future.result(60)
        on_return(self)

    for overlap in (False, True):
        heard.events.clear()
        monkeypatch.setattr(SaveOperation, "on_return", slow)
        with Checkpointer(tmp_path / str(overlap), Config(linger=0, overlap=overlap), on_event=heard) as checkpointer:
            checkpointer.save(1, STATE)
        assert heard.phases(1) == SAVE


def test_a_replaced_save_and_one_that_another_took_over(tmp_path: Path, heard: Heard) -> None:
    config = Config(linger=0, slots=2, when_busy="latest")
    with Checkpointer(tmp_path, config, on_event=heard) as checkpointer:
        checkpointer.save(0, STATE).result(60)
        worker = checkpointer._engine.worker
        assert worker is not None
        first = checkpointer.save(1, {"w": torch.arange(100_000)})
        checkpointer.save(2, STATE)
        for step in range(3, 20):  # some of these find all slots taken by a staged save that is not yet written
            checkpointer.save(step, STATE)
        first.result(60)
    ends = [heard.phases(step) for step in range(20)]
    assert all(each in (SAVE, ["planned", "staged", "skipped"]) for each in ends) and SAVE in ends


def test_an_upload_that_fails_is_told(tmp_path: Path, heard: Heard) -> None:
    config = Config(linger=0, local_root=str(tmp_path / "local"))
    with Checkpointer(tmp_path / "root", config, on_event=heard) as checkpointer:
        (tmp_path / "root/step-00000007").mkdir()
        (tmp_path / "root/step-00000007/mine").touch()
        checkpointer.save(7, STATE)
        with pytest.raises(CheckpointExistsError):
            checkpointer.wait_uploads(60)
    (event,) = (event for event in heard.events if event.phase == "upload failed")
    assert event.step == 7 and (event.error or "").startswith("CheckpointExistsError: ")


_DIES = """
import os, signal, sys, torch
from asyncckpt import Checkpointer, Config
checkpointer = Checkpointer(sys.argv[1], Config(linger=60))
checkpointer.save(5, {"w": torch.arange(100_000)})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("forkserver")
def test_memory_that_is_taken_over_is_told(tmp_path: Path, heard: Heard) -> None:
    assert script(_DIES, str(tmp_path)) == -signal.SIGKILL
    with Checkpointer(tmp_path, Config(linger=60), on_event=heard) as checkpointer:
        checkpointer.load({"w": torch.zeros(100_000, dtype=torch.int64)})
        checkpointer.save(6, STATE).result(60)
    loaded, taken, *_ = heard.events
    assert (loaded.phase, loaded.step, loaded.source) == ("loaded", 5, "memory")
    assert taken.phase == "memory taken over" and (taken.nbytes or 0) > STATE["w"].nbytes


def test_uploads_and_publications_are_told(tmp_path: Path, heard: Heard) -> None:
    config = Config(linger=0, local_root=str(tmp_path / "local"))
    with Checkpointer(tmp_path / "root", config, on_event=heard) as checkpointer:
        save = checkpointer.save(7, STATE)
        assert not checkpointer.publish(save).skipped
        checkpointer.wait_uploads(60)
    published, uploaded = (
        next(event for event in heard.events if event.phase == phase) for phase in ("published", "uploaded")
    )
    assert (published.step, published.version) == (7, 7)
    assert uploaded.step == 7 and uploaded.path == str(tmp_path / "root/step-00000007")
    assert (uploaded.seconds or 0) > 0 and (uploaded.nbytes or 0) > STATE["w"].nbytes


def test_published_weights_are_told(heard: Heard) -> None:
    with WeightPublisher("events", config=Config(linger=0, on_event=heard)) as publisher:
        publisher.publish(STATE, 1)
    _, event = heard.events
    assert (event.phase, event.version, event.path) == ("published", 1, "events")
    assert (event.nbytes or 0) >= STATE["w"].nbytes and set(event.timings) == {"plan_s", "wait_s", "stage_s"}


def test_who_is_named_in_the_environment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_CKPT_ON_EVENT", "support.events:all_heard,support.events:Heard")
    asyncckpt.async_save(STATE, checkpoint_id=tmp_path / "it").result(60)
    wait_for(lambda: len(all_heard.events) == 5)
    assert all_heard.phases(None) == ["worker started", *SAVE]
    assert Config.from_env().listeners == Config.from_env().listeners


@pytest.mark.parametrize("name", ["nowhere:it", "os", "os:nothing", ""])
def test_a_name_of_nobody_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_CKPT_ON_EVENT", name)
    with pytest.raises(ValueError, match="on_event cannot be"):
        Config.from_env()


def test_who_raises_is_logged_once_and_told_all_the_same(
    tmp_path: Path, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def raises(event: Event) -> None:
        called.append(event)
        raise RuntimeError("as the test wants")

    with Checkpointer(tmp_path, Config(linger=0, on_event=raises), on_event=[heard]) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save(2, STATE)
    assert heard.phases(1) == heard.phases(2) == SAVE
    assert len(called) == 9
    logged = [record for record in caplog.records if record.name == "asyncckpt.events"]
    assert len(logged) == 1 and logged[0].levelno == logging.ERROR and "raises" in logged[0].getMessage()


def test_who_blocks_holds_up_nothing(
    tmp_path: Path, heard: Heard, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "NOTICE_S", 0.2)
    may_go_on = threading.Event()

    def blocks(event: Event) -> None:
        may_go_on.wait(60)

    try:
        with Checkpointer(tmp_path, Config(linger=0, on_event=(blocks, heard))) as checkpointer:
            for step in range(3):
                checkpointer.save(step, STATE).result(60)
        assert [heard.phases(step) for step in range(3)] == [SAVE] * 3
        assert "is still busy" in caplog.text
    finally:
        may_go_on.set()
        wait_for(lambda: not _threads())


def test_who_does_not_keep_up_is_not_told_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events_module, "_MOST_WAITING", 10)
    may_go_on, told = threading.Event(), []

    def slow(event: Event) -> None:
        may_go_on.wait(60)
        told.append(event)

    listener = Listener(slow)
    for step in range(100):
        listener.tell(Event(phase="planned", rank=0, step=step))
    may_go_on.set()
    listener.close(60)
    assert 10 <= len(told) <= 11 and [event.step for event in told] == list(range(len(told)))
    assert caplog.text.count("is slower than the events") == 1


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_is_raised_the_next_is_told(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def exits(event: Event) -> None:
        told.append(event.step)
        if event.step == 0:
            raise error

    listener = Listener(exits)
    for step in range(3):
        listener.tell(Event(phase="planned", rank=0, step=step))
    listener.close(60)
    assert told == [0, 1, 2] and type(error).__name__ in caplog.text


def test_after_the_end_nothing_is_told() -> None:
    told: list[Event] = []
    listener = Listener(told.append)
    listener.tell(Event(phase="planned", rank=0))
    listener.close(60)
    listener.tell(Event(phase="committed", rank=0))
    listener.close(60)
    assert [event.phase for event in told] == ["planned"] and not _threads()


def test_who_was_not_closed_is_collected_and_its_thread_ends(tmp_path: Path) -> None:
    class Owner:
        def __init__(self) -> None:
            self.heard = threading.Event()
            self.checkpointer = Checkpointer(tmp_path, QUICK, on_event=self.on_event)

        def on_event(self, event: Event) -> None:
            self.heard.set()

    owner = Owner()
    with pytest.raises(CheckpointNotFoundError):
        owner.checkpointer.load({})
    assert owner.heard.wait(60)
    owned = weakref.ref(owner)
    del owner
    wait_for(lambda: gc.collect() is not None and owned() is None and not _threads())


def test_a_fork_tells_by_a_thread_of_its_own() -> None:
    told: list[str] = []
    listener = Listener(lambda event: told.append(event.phase))
    listener.tell(Event(phase="planned", rank=0))
    wait_for(lambda: bool(told))
    if (pid := os.fork()) == 0:
        listener.tell(Event(phase="committed", rank=0))
        listener.close(60)
        os._exit(0 if told == ["planned", "committed"] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    listener.close(60)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "asyncckpt-events"]


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="on_event"):
        Config(on_event=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        Config(on_event=3)  # type: ignore[arg-type]
