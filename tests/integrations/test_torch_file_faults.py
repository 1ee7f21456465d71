"""``torch_save`` with failures of storage, the worker, or the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from support.ranks import told
from support.segments import mapped_segments
from support.states import same
from support.workers import FAULTY, Faulty, overdue

from asyncckpt.config import Config
from asyncckpt.engine.shared import shared
from asyncckpt.errors import (
    SaveDroppedError,
    SaveTimeoutError,
    StorageError,
    WorkerDiedError,
)
from asyncckpt.extension import Engine, storage_for
from asyncckpt.integrations.torch_file import torch_save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


@pytest.mark.parametrize("point", ["begin", "create", "write", "sync", "finalize"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_harms_nothing(point: str, existing: bool, path: Path, faulty_worker: Faulty) -> None:
    faulty_worker(f"{point}:enospc")
    if existing:
        torch.save("what was there", path)
    with pytest.raises(StorageError, match="No space left"):
        torch_save(torch.ones(1000), path).result(60)
    assert [each.name for each in path.parent.iterdir()] == (["model.pt"] if existing else [])
    assert not existing or torch.load(path) == "what was there"
    torch_save(torch.ones(1000), path).result(60)
    assert torch.equal(torch.load(path), torch.ones(1000))


@pytest.mark.parametrize("point", ["create", "write", "sync", "finalize"])
def test_a_worker_that_is_killed(point: str, path: Path, faulty_worker: Faulty) -> None:
    faulty_worker(f"{point}:kill")
    shared.get(alone=True).start()
    faulty_worker("")
    torch.save("what was there", path)
    state = {"a": torch.randn(1000)}
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        torch_save(state, path).result(60)
    assert torch.load(path) == "what was there"
    assert list(path.parent.iterdir()) == [path]
    torch_save(state, path).result(60)
    assert same(torch.load(path), state) and len(mapped_segments()) == 1  # in a new segment
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["finalize:stop", "finalize:hold"])
@pytest.mark.parametrize("existing", [False, True])
def test_what_was_told_as_failed_is_never_saved(
    path: Path,
    tmp_path: Path,
    faulty_worker: Faulty,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    existing: bool,
) -> None:
    """The worker is only slow, and continues after the save has timed out."""
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker(fault)
    if existing:
        torch.save("what was there", path)
    with Engine(alone=True) as engine:
        save = engine.save_file(path, torch.ones(1000))
        worker = engine.worker
        assert worker is not None
        with overdue(tmp_path / "gate"), pytest.raises(SaveTimeoutError, match="did not report the outcome"):
            save.result(60)
        (tmp_path / "gate").touch()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGCONT)
    # The worker has exited with the engine, so all its writes have ended.
    assert list(path.parent.glob("*model.pt*")) == ([path] if existing else [])
    assert not existing or torch.load(path) == "what was there"


@pytest.mark.parametrize("fault", ["finalized:stop", "finalized:hold", "finalized:kill"])
def test_what_was_saved_is_told_as_saved(
    path: Path, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    torch.save("what was there", path)
    faulty_worker(fault)
    with Engine(alone=True) as engine:
        save = engine.save_file(path, torch.ones(1000))
        with overdue(tmp_path / "gate") if not fault.endswith("kill") else contextlib.nullcontext():
            save.result(60)
        assert torch.equal(torch.load(path), torch.ones(1000)) and engine.failures == 0


def test_what_others_write_is_not_removed(path: Path) -> None:
    opened = storage_for(str(path)).begin_file(str(path), "0123456789ab-1", 1, 60.0)
    opened.create("", large=False).close()
    attempt = Path(opened.path)
    recent = path.with_name(".new.pt.0123456789ab-2.partial")
    recent.touch()
    os.utime(attempt, (0, 0))
    torch_save(torch.ones(3), path).result(60)
    assert attempt.exists() and recent.exists()
    opened.release()
    torch_save(torch.ones(3), path).result(60)
    assert not attempt.exists() and recent.exists()


def test_a_full_disk_is_seen_before_writing(path: Path) -> None:
    with pytest.raises(StorageError, match="the file needs .* and the file system has"):
        storage_for(str(path)).begin_file(str(path), "0123456789ab-1", 1 << 60, 60.0)


def test_one_that_is_skipped(
    path: Path, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("write:hold")
    with Engine(Config(when_busy="skip", slots=1), alone=True) as engine:
        first = engine.save_file(path, torch.ones(1000))
        second = engine.save_file(path, torch.zeros(1000))
        with pytest.raises(SaveDroppedError):
            second.result(60)
        (tmp_path / "gate").touch()
        first.result(60)
        assert torch.load(path)[0] == 1


TRAINER = """
import os, signal, sys, torch
from asyncckpt.engine import shared as engines
from asyncckpt import torch_save
from asyncckpt.link import process as worker_process
from support.ranks import say
real = worker_process.command
worker_process.command = lambda: [real()[0], sys.argv[2], "begin:hold"]
state = {"w": torch.arange(100_000), "list": [torch.ones(3)]}
torch_save(state, sys.argv[1])
state["w"].zero_()
(engine,) = engines.shared._engines.values()
say(engine.worker.pid)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("forkserver")
def test_a_trainer_that_is_killed_when_it_has_staged(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    code, pid = told(TRAINER, str(path), FAULTY)
    assert code == -signal.SIGKILL and not path.exists()
    worker = psutil.Process(pid)
    gate.touch()
    worker.wait(60)
    assert same(torch.load(path), {"w": torch.arange(100_000), "list": [torch.ones(3)]})


FORGETFUL = """
import sys, torch
from asyncckpt.integrations.torch_file import torch_save
torch_save({"w": torch.arange(1000)}, sys.argv[1])
"""


def test_the_end_of_the_process_waits_for_it(path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORGETFUL, str(path)], timeout=200, cwd="/", check=True)
    assert same(torch.load(path), {"w": torch.arange(1000)})
