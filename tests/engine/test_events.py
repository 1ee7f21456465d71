"""Events: all that happens is told, in its order, and nobody who listens can slow a save or have it fail."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.events import Heard, all_heard
from support.workers import wait_for

import asyncckpt
from asyncckpt import Checkpointer, Config
from asyncckpt import events as events_module
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
    assert planned.source == "kept" and heard.events[0].source == "new"
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
    assert [event.phase for event in heard.events if event.step is None] == ["worker restarted"]
    errors = {event.step: event.error or "" for event in heard.events if event.phase in ("failed", "skipped")}
    assert errors[1].startswith("CheckpointExistsError: ") and errors[2].startswith("WorkerDiedError: ")
    assert errors[3].startswith("SaveDroppedError: ")


def test_loads_are_told(tmp_path: Path, heard: Heard) -> None:
    with Checkpointer(tmp_path, QUICK, on_event=heard) as checkpointer:
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load({"w": torch.zeros(100_000, dtype=torch.int64)})
        checkpointer.save(3, STATE).result(60)
        checkpointer.load({"w": torch.zeros(100_000, dtype=torch.int64)})
        assert checkpointer.loaded is not None
    failed, *_, loaded = heard.events
    assert failed.phase == "load failed" and (failed.error or "").startswith("CheckpointNotFoundError: ")
    assert (loaded.phase, loaded.step, loaded.source) == ("loaded", 3, "storage")
    assert loaded.nbytes == checkpointer.loaded.nbytes >= STATE["w"].nbytes
    assert loaded.seconds == checkpointer.loaded.seconds


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
    (event,) = heard.events
    assert (event.phase, event.version, event.path) == ("published", 1, "events")
    assert (event.nbytes or 0) >= STATE["w"].nbytes and set(event.timings) == {"plan_s", "wait_s", "stage_s"}


def test_who_is_named_in_the_environment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_CKPT_ON_EVENT", "support.events:all_heard,support.events:Heard")
    asyncckpt.async_save(STATE, checkpoint_id=tmp_path / "it").result(60)
    wait_for(lambda: len(all_heard.events) == 4)
    assert all_heard.phases(None) == SAVE
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

    with Checkpointer(tmp_path, Config(linger=0, on_event=(raises, heard))) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save(2, STATE)
    assert heard.phases(1) == heard.phases(2) == SAVE
    assert len(called) == 8
    logged = [record for record in caplog.records if record.name == "asyncckpt.events"]
    assert len(logged) == 1 and logged[0].levelno == logging.ERROR and "raises" in logged[0].getMessage()


def test_who_blocks_holds_up_nothing(
    tmp_path: Path, heard: Heard, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_CLOSE_S", 0.2)
    may_go_on = threading.Event()

    def blocks(event: Event) -> None:
        may_go_on.wait(60)

    try:
        with Checkpointer(tmp_path, Config(linger=0, on_event=(blocks, heard))) as checkpointer:
            for step in range(3):
                checkpointer.save(step, STATE).result(60)
        assert [heard.phases(step) for step in range(3)] == [SAVE] * 3
        assert "still busy with an event" in caplog.text
    finally:
        may_go_on.set()
        wait_for(lambda: "asyncckpt-events" not in {thread.name for thread in threading.enumerate()})


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
    assert caplog.text.count("does not keep up") == 1


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="on_event"):
        Config(on_event=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        Config(on_event=3)  # type: ignore[arg-type]
