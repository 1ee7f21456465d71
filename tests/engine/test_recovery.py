"""Test that the next trainer after a crash loads from memory, or else from storage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from support.checkpoints import complete_steps, step_folder, verify
from support.ranks import alone, say
from support.recovery import NUMBERS, archive, empty, is_of, mixed, source, train
from support.workers import Faulty

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.engine.saves import SaveOperation
from asyncckpt.errors import CheckpointNotFoundError, JobTakenError
from asyncckpt.link import calls, takeover
from asyncckpt.link.endpoint import FOLDER_VARIABLE, endpoint_name
from asyncckpt.link.process import WorkerOptions, WorkerProcess
from asyncckpt.link.takeover import Takeover, is_running
from asyncckpt.loading import memory_source
from asyncckpt.staging.buffer_pool import BufferPool
from asyncckpt.storage.local import LocalStorage

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.mark.parametrize("death", ["kill", "raise", "staged"])
def test_the_next_trainer_loads_from_memory(root: Path, death: str) -> None:
    worker = train(root, 2, death)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2
        assert source(checkpointer) == "memory" and is_of(state, 2)
        assert checkpointer.load(state := empty(), 1) == 1
        assert source(checkpointer) == "memory" and is_of(state, 1)
        assert checkpointer.load(state := empty(), memory=False) == 2
        assert source(checkpointer) == "storage" and is_of(state, 2)
        checkpointer.prepare(state)
        assert (
            checkpointer._engine.worker is not None
            and worker is not None
            and checkpointer._engine.worker.pid == worker.pid
        )
        assert checkpointer.load(state := empty()) == 2 and source(checkpointer) == "memory" and is_of(state, 2)
        state["w"].fill_(3)
        state["step"] = 3
        checkpointer.save(3, state).result(60)
        assert checkpointer.load(state := empty()) == 3 and is_of(state, 3)
        assert source(checkpointer) == "storage"
    assert complete_steps(str(root)) == [1, 2, 3]


@pytest.mark.parametrize("death", ["kill", "staged"])
@pytest.mark.parametrize("what", ["fingerprint", "protocol"])
def test_a_worker_of_another_version_leaves(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, death: str, what: str
) -> None:
    """Its images are loaded if both versions have the same protocol. Staged saves are written in any case."""
    worker = train(root, 2, death)
    assert worker is not None
    if what == "fingerprint":
        monkeypatch.setattr(takeover, "fingerprint", lambda: "of another version")
    with Checkpointer(root) as checkpointer:
        with monkeypatch.context() as patched:
            if what == "protocol":
                patched.setattr(calls, "PROTOCOL", calls.PROTOCOL + 1)
            assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert source(checkpointer) == ("memory" if what == "fingerprint" else "storage")
        assert ("images are not loaded" in caplog.text) == (what == "protocol")
        state["w"].fill_(3)
        state["step"] = 3
        checkpointer.save(3, state).result(60)
        while is_running(worker.pid):
            time.sleep(0.01)
    assert complete_steps(str(root)) == [1, 2, 3]


def test_a_worker_of_another_protocol_with_a_trainer_is_named_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, empty()).result(60)
        with monkeypatch.context() as patched:
            patched.setattr(calls, "PROTOCOL", calls.PROTOCOL + 1)
            patched.setattr(takeover, "NOTICE_S", 0.3)
            with pytest.raises(JobTakenError, match=r"of another version .* has a trainer"):
                Takeover.find(endpoint_name(f"{os.path.realpath(root)}\n", 0), 30)
        assert caplog.text.count("is asked to exit") == 1
        checkpointer.save(2, empty()).result(60)


@pytest.mark.parametrize("death", ["kill", "staged"])
def test_a_set_with_a_state_at_its_top_is_loaded_from_memory(root: Path, death: str) -> None:
    worker = train(root, 2, death, files=mixed)
    with Checkpointer(root) as checkpointer:
        for step in (2, 1):
            assert checkpointer.load(state := empty(), step) == step
            assert source(checkpointer) == "memory" and is_of(state, step)
        checkpointer.prepare(mixed(state))
        now = checkpointer._engine.worker
        assert now is not None and worker is not None and now.pid == worker.pid
        assert checkpointer.load(state := empty()) == 2 and source(checkpointer) == "memory" and is_of(state, 2)
        state["w"].fill_(3)
        state["step"] = 3
        checkpointer.save(3, mixed(state)).result(60)
        assert complete_steps(str(root)) == [1, 2, 3]
    for step in (1, 2, 3):
        path = step_folder(str(root), step)
        assert not verify(path).damages
        assert is_of(torch.load(f"{path}/model/state.pt"), step)


def test_damage_of_a_set_in_memory_is_found(root: Path) -> None:
    train(root, 2, files=mixed)
    takeover = Takeover.find(endpoint_name(f"{os.path.realpath(root)}\n", 0), 30)
    assert takeover is not None
    with takeover:
        for held in takeover.images:
            assert not held.request.small_files  # they may be large, and nobody reads them here
            (file,) = held.layout.data_files()
            place = held.layout.data(held.request.slot, file).offset + file.length // 2
            takeover.segments[held.request.segment].view[place] ^= 1
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert source(checkpointer) == "storage"


_RELATIVE = """
import sys, torch
from asyncckpt import Checkpointer
state = {"w": torch.zeros(3)}
with Checkpointer("run") as checkpointer:
    if checkpointer.latest() is not None:
        print(checkpointer.load(state), checkpointer.loaded.source)
        checkpointer.save(2, state)
        sys.exit()
    checkpointer.save(1, state).result(60)
    raise RuntimeError("its worker lingers")
"""


@pytest.mark.parametrize("variable", ["TMPDIR", FOLDER_VARIABLE])
def test_the_runtime_folder_may_be_relative(tmp_path: Path, variable: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    (tmp_path / "here").mkdir(0o700)
    for expected in ("", "1 memory\n"):
        command = [sys.executable, "-c", _RELATIVE]
        its = environment | {variable: "here"}
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=its, check=False, timeout=120)
        assert ended.stdout == expected, ended.stderr
    assert complete_steps(str(tmp_path / "run")) == [1, 2]


@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [(memory_source, "history", None), (LocalStorage, "is_finalized", None), (LocalStorage, "is_finalized", 2)],
)
def test_what_is_committed_between_two_looks_is_loaded_from_memory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, step: int | None
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    train(root, 2, "staged", fault="finalize:hold:2")
    real = getattr(owner, name)

    def look_and_commit(*args: Any, **options: Any) -> Any:
        seen = real(*args, **options)
        gate.touch()
        deadline = time.monotonic() + 60
        while complete_steps(str(root)) != [1, 2]:
            assert time.monotonic() < deadline, "the worker does not commit"
            time.sleep(0.005)
        return seen

    monkeypatch.setattr(owner, name, look_and_commit)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty(), step) == 2
        assert source(checkpointer) == "memory" and is_of(state, 2)


def test_no_storage_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(root, 2)
    monkeypatch.setattr(os, "preadv", None)
    for file in root.glob("*/__0*"):
        file.write_bytes(b"")
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)


def test_the_memory_is_used_again(root: Path) -> None:
    train(root, 2)
    with Checkpointer(root) as checkpointer:
        checkpointer.load(state := empty())
        takeover = checkpointer._engine._supervisor._predecessor
        assert takeover is not None
        inode = os.fstat(next(iter(takeover.segments.values())).fileno()).st_ino
        checkpointer.save(3, state).result(60)
        (known,) = checkpointer._engine._buffers.known
        assert known.buffer is not None and os.fstat(known.buffer.segment.fileno()).st_ino == inode


def test_one_that_crashes_again_before_it_saves_loses_nothing(root: Path) -> None:
    """The newest image stays in the inherited memory until a newer image exists."""
    train(root, 2)
    for _ in range(2):
        checkpointer = Checkpointer(root)
        checkpointer.load(state := empty())
        checkpointer.prepare(state)
        checkpointer._close(linger=True)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert source(checkpointer) == "memory"


def test_another_structure_does_not_fit(root: Path) -> None:
    worker = train(root, 2)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(3, {"v": torch.ones(NUMBERS), "step": 3}).result(60)
        assert (
            checkpointer._engine.worker is not None
            and worker is not None
            and checkpointer._engine.worker.pid == worker.pid
        )
        checkpointer.load(into := {"v": torch.zeros(NUMBERS), "step": 0})
        assert into["step"] == 3 and bool(torch.as_tensor(into["v"]).all())


def test_nor_is_it_kept_where_its_memory_is_needed(root: Path) -> None:
    """Another structure needs the memory of the held image, so only storage has the step."""
    train(root, 2)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest() == 2
        checkpointer.prepare({"v": torch.ones(NUMBERS)})
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert source(checkpointer) == "storage"


def test_half_staged_it_is_not_there(root: Path) -> None:
    train(root, 3, "staging")
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert checkpointer.steps() == [1, 2]


def test_what_storage_refused_is_in_memory(root: Path) -> None:
    """The disk is full when the trainer dies. The staged image still loads, and can be saved again."""
    train(root, 2, fault="create:enospc:5")  # each save makes four files
    assert complete_steps(str(root)) == [1]
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert source(checkpointer) == "memory"
        checkpointer.save(2, state).result(60)
    assert complete_steps(str(root)) == [1, 2]


def test_while_the_worker_still_writes_nobody_waits(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    train(root, 1, "staged", "write:hold")
    attach = Takeover.attach
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest() == 1 and checkpointer.steps() == []
        assert checkpointer.load(state := empty()) == 1 and is_of(state, 1)
        assert source(checkpointer) == "memory" and checkpointer.steps() == []
        # The wait for the old worker is limited, because the image that it holds is safe.
        with monkeypatch.context() as patch:
            patch.setattr(Takeover, "attach", lambda takeover, options, *_: attach(takeover, options, 0.5, 60))
            checkpointer.prepare(state)
        assert "is killed" in caplog.text and checkpointer.steps() == []
        checkpointer.save(1, state).result(60)
        assert checkpointer.load(state, memory=False) == 1 and is_of(state, 1)


def test_a_set_of_files_that_the_worker_still_writes_is_waited_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the worker holds the set."""
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    train(root, 1, "staged", "write:hold", files=archive)
    attach = Takeover.attach

    def attach_soon(found: Takeover, options: WorkerOptions, _: float, longest: float) -> WorkerProcess | None:
        opening = Timer(1.0, (tmp_path / "gate").touch)
        opening.start()
        try:
            return attach(found, options, 0.1, longest)
        finally:
            opening.join()

    monkeypatch.setattr(Takeover, "attach", attach_soon)
    with Checkpointer(root, Config(commit_timeout=60)) as checkpointer:
        checkpointer.save(2, empty()).result(60)
        assert checkpointer.steps() == [1, 2]
    assert not verify(str(step_folder(str(root), 1))).damages


def test_what_was_removed_is_not_loaded(root: Path) -> None:
    train(root, 2)
    for step in (1, 2):
        for file in (folder := root / f"step-{step:08d}").iterdir():
            file.unlink()
        folder.rmdir()
    with Checkpointer(root) as checkpointer, pytest.raises(CheckpointNotFoundError):
        checkpointer.load(empty())


def test_a_lingering_worker_leaves_where_its_memory_is_needed(
    root: Path, tmp_path: Path, faulty_worker: Faulty
) -> None:
    """A worker with the only copy of an image stays."""
    lost = tmp_path / "lost"
    train(root, 1)
    train(lost, 1, fault="sync:eio")
    faulty_worker("start:poor")
    with Checkpointer(tmp_path / "other", Config(slots=1)) as checkpointer:
        checkpointer.save(1, empty()).result(60)
    faulty_worker("")
    for where, expected in ((root, "storage"), (lost, "memory")):
        with Checkpointer(where) as checkpointer:
            assert checkpointer.load(state := empty()) == 1 and is_of(state, 1)
            assert source(checkpointer) == expected


def test_damage_in_memory_is_found(root: Path) -> None:
    """A wrong write of the dead trainer has damaged the images."""
    train(root, 2)
    takeover = Takeover.find(endpoint_name(f"{os.path.realpath(root)}\n", 0), 30)
    assert takeover is not None
    with takeover:
        for held in takeover.images:
            place = held.layout.slots[held.request.slot] + held.layout.data_bytes // 2
            takeover.segments[held.request.segment].view[place] ^= 1
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert source(checkpointer) == "storage"


def _save_beside(root: str) -> None:
    with Checkpointer(root) as second:
        try:
            second.save(2, empty())
        except JobTakenError as error:
            assert error.path == str(root)
            say(str(error))
        assert second.load(empty()) == 1  # a load takes no claim


def test_two_at_a_time(root: Path, tmp_path: Path) -> None:
    with Checkpointer(root) as first:
        first.save(1, empty()).result(60)
        code, said = alone(_save_beside, str(root))
        assert code == 0 and str(os.getpid()) in said
    with Checkpointer(root) as third:
        third.save(3, empty()).result(60)


def _take_over(root: str, when: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    owner, name = {
        "before it has attached": (Takeover, "attach"),
        "before its session has begun": (takeover, "receive_answer"),
        "before it has the memory": (BufferPool, "inherit"),
        "before it has staged": (SaveOperation, "claim_slot"),
    }[when]
    setattr(owner, name, die)
    checkpointer = Checkpointer(root)
    assert checkpointer.load(state := empty()) == 2
    checkpointer.save(3, state)


@pytest.mark.parametrize(
    "when",
    [
        "before it has attached",
        "before its session has begun",
        "before it has the memory",
        "before it has staged",
    ],
)
def test_at_any_instant_somebody_holds_it(root: Path, when: str) -> None:
    """The next trainer is killed during its takeover."""
    train(root, 2)
    assert alone(_take_over, str(root), when)[0] == -signal.SIGKILL
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        assert source(checkpointer) == "memory"
