"""Test that one job at a time saves to a root, also from a host that cannot see the worker's endpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import alone, faulty
from support.workers import send_away

from asyncckpt import Checkpointer, cli, supervisor
from asyncckpt.config import Config
from asyncckpt.errors import JobTakenError, StorageError
from asyncckpt.extension import Claim
from asyncckpt.link import endpoint, root_lock
from asyncckpt.link.api import Claimed, SessionApi
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.root_lock import LOCK_NAME, RootLock
from asyncckpt.loading.tiers import Tiers
from asyncckpt.storage.file_system import lock_alone

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.fixture
def elsewhere(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function that simulates another host: no endpoint is found, and process IDs have no meaning."""

    def go() -> None:
        monkeypatch.setenv(endpoint.FOLDER_VARIABLE, str(tmp_path / "other runtime"))
        monkeypatch.setattr(root_lock, "pid_scope", lambda: "another host")
        monkeypatch.setattr(root_lock, "NOTICE_S", 0.2)

    yield go
    send_away(tmp_path / "other runtime")
    monkeypatch.setenv(endpoint.FOLDER_VARIABLE, str(runtime))


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((100,), value)}


@pytest.mark.parametrize("is_here", [True, False])
def test_a_second_job_in_the_same_folder_is_refused(
    root: Path, tmp_path: Path, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    with Checkpointer(root) as first:
        first.save(1, state(1)).result(60)
        worker = first._engine.worker
        if is_here:  # a job with another runtime folder
            monkeypatch.setenv(endpoint.FOLDER_VARIABLE, str(tmp_path / "other runtime"))
        else:
            elsewhere()
        with Checkpointer(root, Config(job_id="second")) as second:
            with pytest.raises(JobTakenError, match=socket.gethostname()) as raised:
                second.save(2, state())
            assert worker is not None and str(worker.pid) in str(raised.value) and str(os.getpid()) in str(raised.value)
            assert raised.value.path == str(root)
            assert second.load(into := state()) == 1 and into["w"][0] == 1  # a load takes no claim
            assert cli.main(["verify", str(root / "step-00000001")]) == 0
            first.close()
            second.save(2, state(2)).result(60)
            assert second.steps() == [1, 2]


def test_a_folder_belongs_to_the_job_that_saved_first(root: Path) -> None:
    def save(step: int, job_id: str | None) -> None:
        with Checkpointer(root, Config(job_id=job_id)) as checkpointer:
            checkpointer.save(step, state()).result(60)

    save(1, None)
    save(2, "first")
    with pytest.raises(JobTakenError, match="'first'.*'second'"):
        save(3, "second")
    with Checkpointer(root, Config(job_id="second")) as checkpointer, pytest.raises(JobTakenError, match=LOCK_NAME):
        checkpointer.load(state())
    save(3, None)  # a save without a job ID does not change the owner
    with pytest.raises(JobTakenError, match="'first'"):
        save(4, "second")
    (root / LOCK_NAME).unlink()
    save(4, "second")


def _die_while_it_is_written(root: str, gate: str) -> None:
    os.environ["ASYNCCKPT_TEST_GATE"] = gate
    faulty("write:hold")
    Checkpointer(root).save(1, state(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_worker_of_a_dead_trainer_is_waited_for(
    root: Path,
    tmp_path: Path,
    elsewhere: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The training restarts on another host while the old worker still writes the last image."""
    alone(_die_while_it_is_written, str(root), str(tmp_path / "gate"))
    elsewhere()
    deadline = time.monotonic() + 60
    while not json.loads((root / LOCK_NAME).read_text())["leaving"]:
        assert time.monotonic() < deadline, "the worker does not notice that its trainer is dead"
        time.sleep(0.01)
    with monkeypatch.context() as patch, Checkpointer(root) as checkpointer:
        patch.setattr(supervisor, "take_root", lambda wanted, ask, _: root_lock.take_root(wanted, ask, 1.0))
        with pytest.raises(JobTakenError, match="still writes"):
            checkpointer.prepare(state())
        assert checkpointer.steps() == []
        assert "waits until the worker" in caplog.text
    real, holders = WorkerClient.call, []

    def claim(self: WorkerClient, timeout: float, method: Any, *given: Any) -> Any:
        answer = real(self, timeout, method, *given)
        if method is SessionApi.claim:
            holders.append(answer.holder)
            (tmp_path / "gate").touch()
        return answer

    monkeypatch.setattr(WorkerClient, "call", claim)
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(state())
        assert holders[0] is not None and checkpointer.steps() == [1]  # the old worker lingers with its image
        checkpointer.save(2, state(2)).result(60)
    assert checkpointer.steps() == [1, 2]


def test_one_that_has_not_noticed_its_trainers_death_is_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on this host sees the trainer's death before the worker reports it."""
    monkeypatch.setattr(root_lock, "NOTICE_S", 0.0)
    root.mkdir()
    with subprocess.Popen(["true"]) as trainer:
        pass
    claim = Claim(str(root), None)
    first = RootLock.take(claim, trainer.pid)
    assert isinstance(first, RootLock)
    asked = iter(range(3))

    def ask() -> Claimed:
        if next(asked) == 2:
            first.release()
        found = RootLock.take(claim, os.getpid())
        if isinstance(found, RootLock):
            found.release()
            return Claimed()
        return Claimed(found)

    assert root_lock.take_root(claim, ask, 60.0) is None and next(asked, None) is None
    held = RootLock.take(claim, trainer.pid)
    assert isinstance(held, RootLock)
    with pytest.raises(JobTakenError, match="still writes"):
        root_lock.take_root(claim, lambda: Claimed(held._holder), 0.0)
    held.release()


def test_a_load_waits_for_the_worker_of_a_dead_trainer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load also waits while the worker is between two writes, or before the first."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
    trainer = subprocess.Popen(["sleep", "600"])
    lock = RootLock.take(Claim(str(root), None), trainer.pid)
    assert isinstance(lock, RootLock)
    assert not root_lock.is_finishing(str(root)) and Tiers(str(root), None).newest(0.0) == 1
    trainer.kill()
    trainer.wait()
    assert root_lock.is_finishing(str(root))
    with pytest.raises(StorageError, match="still writing here"):
        Tiers(str(root), None).newest(0.0)
    real, polls = time.sleep, iter(range(3))

    def sleep(seconds: float) -> None:
        if next(polls) == 1:
            (root / "step-00000001").rename(root / "step-00000002")
            lock.release()
        real(seconds)

    monkeypatch.setattr("asyncckpt.loading.source.time.sleep", sleep)
    assert Tiers(str(root), None).newest(60.0) == 2


def test_where_there_is_no_lock_there_is_one_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / LOCK_NAME).mkdir(parents=True)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state()).result(60)
        assert (worker := checkpointer._engine.worker) is not None
        worker.kill()
        checkpointer.save(2, state()).result(60)
    assert caplog.text.count("another job can save there") == 1


def test_a_file_system_without_locks_and_a_file_that_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    claim, path = Claim(str(root), None), root / LOCK_NAME
    lock = RootLock.take(claim, 7)
    assert isinstance(lock, RootLock)
    held = RootLock.take(claim, 8)
    assert not isinstance(held, RootLock) and (held.trainer, held.leaving) == (7, False)
    lock.announce_end()
    held = RootLock.take(claim, 8)
    assert not isinstance(held, RootLock) and held.leaving
    lock.release()
    path.write_bytes(b"\xff garbage")

    def lock_one_that_goes(fd: int) -> bool | None:
        monkeypatch.setattr("asyncckpt.storage.file_system.lock_alone", lock_alone)
        path.unlink()
        return lock_alone(fd)

    monkeypatch.setattr("asyncckpt.storage.file_system.lock_alone", lock_one_that_goes)
    lock = RootLock.take(claim, 7)
    assert isinstance(lock, RootLock) and path.exists() and not isinstance(RootLock.take(claim, 8), RootLock)
    lock.release()
    monkeypatch.setattr("asyncckpt.storage.file_system.lock_alone", lambda fd: None)
    with pytest.raises(OSError, match="no locks"):
        RootLock.take(claim, 7)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="no file"):
        RootLock.take(claim, 7)


def test_whose_a_root_is_counts_when_the_lock_is_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job saves and ends between the read of the file and the lock."""
    root.mkdir()

    def late(fd: int) -> bool | None:
        with monkeypatch.context() as patch:
            patch.setattr("asyncckpt.storage.file_system.lock_alone", lock_alone)
            other = RootLock.take(Claim(str(root), "other"), os.getpid())
            assert isinstance(other, RootLock)
            other.release()
        return lock_alone(fd)

    monkeypatch.setattr("asyncckpt.storage.file_system.lock_alone", late)
    with pytest.raises(JobTakenError):
        RootLock.take(Claim(str(root), "mine"), os.getpid())


def test_a_file_system_without_lasting_inode_numbers_has_no_locks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stable inode numbers, no process can tell whether a locked file still has its name."""
    root.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "samestat", lambda *_: False)
        with pytest.raises(OSError, match="a new inode number each time"):
            RootLock.take(Claim(str(root), None), os.getpid())
        with pytest.raises(OSError, match="a new inode number each time"):
            endpoint.Endpoint(endpoint.endpoint_name("job", 0), os.getpid())
