"""Test the handle of a save: waits, callbacks and actions."""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue

import pytest

from asyncckpt import Save
from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.save_handle import SaveState, wait_for_actions


def test_the_step_waits_and_not_the_host() -> None:
    fenced: list[bool] = []
    save = Save(state := SaveState("somewhere", 1))
    with pytest.raises(SaveTimeoutError, match="not queued"):
        save.synchronize_staging(0.01)
    state.copies_queued([lambda: fenced.append(True)])
    save.synchronize_staging(0.01)
    assert fenced == [True] and not save.staged()
    with pytest.raises(SaveTimeoutError, match="not staged"):
        save.wait_staged(0.01)


def test_with_the_hosts_tensors_alone_the_host_waits() -> None:
    save = Save(state := SaveState("somewhere", 1))
    state.copies_queued([])
    with pytest.raises(SaveTimeoutError, match="not staged"):
        save.synchronize_staging(0.01)
    failed = Save.finished("somewhere", CheckpointError("the device is lost"))
    failed.synchronize_staging(0.01)


def test_nobody_can_cancel_it() -> None:
    """``asyncio`` cancels a future when it stops waiting. The save would then count as ended."""
    save = Save(state := SaveState("somewhere", 1))
    assert not save.future.cancel() and not save.done()
    state.end(None)
    assert save.result(1) == state.path


def test_callbacks_keep_nobody() -> None:
    """A slow callback delays no other save. A callback may wait for another save."""
    one, other = SaveState("one", 1), SaveState("other", 2)
    go, called = threading.Event(), SimpleQueue[str]()

    def slow(_: object) -> None:
        called.put(str(other.future.result(60)) if go.wait(60) else "late")

    def fails(_: object) -> None:
        raise ValueError("a callback's own")

    one.future.add_done_callback(slow)
    one.future.add_done_callback(fails)
    other.future.add_done_callback(lambda done: called.put(threading.current_thread().name))
    one.end(None)
    other.end(None)
    go.set()
    assert [called.get(timeout=60) for _ in range(2)] == ["other", "asyncckpt-callbacks"]
    one.future.add_done_callback(lambda _: called.put("at once"))
    assert called.get(timeout=60) == "at once"


def test_what_follows_a_save_is_done_when_it_is_durable(caplog: pytest.LogCaptureFixture) -> None:
    """Actions run in the order in which saves end, not after a failure, and before ``wait_for_actions`` returns."""
    one, other, failed = (SaveState(name, 1) for name in ("one", "other", "failed"))
    go, done = threading.Event(), list[str]()
    one.when_durable(lambda: done.append("slow") if go.wait(60) else None, "waiting")
    one.when_durable(lambda: wait_for_actions(60), "waiting for itself")
    late = one.when_durable(lambda: done.append("cancelled"), "being late")
    broken = other.when_durable(lambda: 1 // 0, "dividing")
    exiting = other.when_durable(lambda: sys.exit("enough"), "exiting")
    undone = failed.when_durable(lambda: done.append("failed"), "removing")
    one.end(None)
    failed.end(CheckpointError("the disk is full"))
    other.end(None)
    with pytest.raises(SaveTimeoutError, match=r"not done after 0.01 s"):
        wait_for_actions(0.01)
    assert late.cancel() and not done
    go.set()
    wait_for_actions(60)
    assert done == ["slow"] and undone.result(60) is None
    assert isinstance(broken.exception(60), ZeroDivisionError) and isinstance(exiting.exception(60), SystemExit)
    assert "dividing failed" in caplog.text and "removing" not in caplog.text  # the failure of the save is logged
    other.when_durable(lambda: done.append("at once"), "")
    wait_for_actions(60)
    assert done == ["slow", "at once"]
    wait_for_actions(0)  # no action is under way


def test_a_future_is_done_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens at the end of the interpreter, or at the process's limit of threads."""
    state, other = SaveState("somewhere", 1), SaveState("else", 1)
    future, followed = state.future, other.when_durable(list, "nothing")

    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuses)
        state.end(CheckpointError("the disk is full"))
        other.end(None)
        wait_for_actions(0)
    assert isinstance(future.exception(1), CheckpointError) and state.future is future
    assert followed.done()


def test_who_is_interrupted_while_it_waits_for_the_future_keeps_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt leaves the future's lock taken. A thread that ends the save must not wait for this lock."""
    state = SaveState("somewhere", 1)
    future = state.future
    assert future._condition.acquire()
    other = threading.Thread(target=lambda: state.end(None))
    other.start()
    other.join(10)
    assert not other.is_alive() and Save(state).result(1) == state.path
    future._condition.release()
    assert future.result(10) == state.path


def test_a_future_that_was_left_locked_keeps_no_other() -> None:
    """A locked future delays no save that ends later, for example after a restart in the process."""
    states = [SaveState("somewhere", number) for number in range(2)]
    locked, other = (state.future for state in states)
    assert locked._condition.acquire()
    for state in states:
        state.end(None)
    assert other.result(30) == "somewhere"
    locked._condition.release()
    assert locked.result(30) == "somewhere"
