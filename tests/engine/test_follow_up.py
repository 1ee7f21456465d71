"""Test that the worker advances the pointer and removes older checkpoints once a new checkpoint is durable."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from support.ranks import alone
from support.workers import FAULTY, Faulty, wait_for, wait_reached

from asyncckpt import Save
from asyncckpt.errors import StorageError
from asyncckpt.extension import Engine, Pointer, Rotation
from asyncckpt.link import process as worker_process


def save(engine: Engine, folder: Path, step: int, spares: int = 0, needs: tuple[str, ...] = ()) -> Save:
    """Save a step. The worker names the step in ``latest`` and removes older steps."""
    older = [str(folder / f"step-{each}") for each in range(step)]
    return engine.save(
        folder / f"step-{step}",
        {"w": torch.full((1000,), float(step))},
        step=step,
        pointer=Pointer(str(folder / "latest"), f"step-{step}", needs),
        rotation=Rotation(tuple(older), spares),
    )


@pytest.fixture
def own_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a gate that only workers with a ``hold`` fault wait for."""
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    return tmp_path / "gate"


def latest(folder: Path) -> str:
    return (folder / "latest").read_text()


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_both_are_done_when_the_save_ends(root: Path) -> None:
    with Engine(alone=True) as engine:
        for step in range(1, 6):
            assert save(engine, root, step, spares=1).result(60)
            assert latest(root) == f"step-{step}" and steps(root) == [*range(max(1, step - 1), step + 1)]
    assert sorted(os.listdir(root)) == ["latest", "step-4", "step-5"]


def test_a_failed_save_changes_nothing(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("finalize:enospc:2")
    with Engine(alone=True) as engine:
        save(engine, root, 1).result(60)
        with pytest.raises(StorageError):
            save(engine, root, 2).result(60)
        assert latest(root) == "step-1" and steps(root) == [1]
        save(engine, root, 3).result(60)
    assert latest(root) == "step-3" and steps(root) == [3]


def _killed(folder: Path, fault: str) -> None:
    command = [worker_process.command()[0], FAULTY, fault]
    setattr(worker_process, "command", lambda: command)  # noqa: B010
    engine = Engine(alone=True)
    save(engine, folder, 1).result(60)
    save(engine, folder, 2).wait_staged(60)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("forkserver")
def test_a_trainer_that_is_killed_leaves_both_to_its_worker(root: Path, own_gate: Path) -> None:
    assert alone(_killed, root, "finalize:hold:2")[0] == -signal.SIGKILL
    wait_reached(own_gate)
    assert latest(root) == "step-1" and steps(root) == [1]
    own_gate.touch()
    wait_for(lambda: steps(root) == [2])
    assert latest(root) == "step-2"


@pytest.mark.usefixtures("forkserver")
def test_an_older_save_that_comes_late_sets_nothing_back(root: Path, own_gate: Path) -> None:
    """The next trainer does not wait for the worker of the killed trainer."""
    assert alone(_killed, root, "finalize:hold:2")[0] == -signal.SIGKILL
    wait_reached(own_gate)
    with Engine(alone=True) as engine:
        save(engine, root, 3).result(60)
        own_gate.touch()
        wait_for(lambda: 2 in steps(root))
    wait_for(lambda: not list(root.glob(".*")))
    assert latest(root) == "step-3" and steps(root) == [2, 3]


def test_a_clock_that_is_behind_advances_the_pointer(root: Path) -> None:
    root.mkdir()
    (root / "latest").write_text("step-0")
    os.utime(root / "latest", (4e9, 4e9))
    with Engine(alone=True) as engine:
        for step in (1, 2):
            save(engine, root, step).result(60)
            assert latest(root) == f"step-{step}"


def test_a_worker_that_dies_just_after_the_commit_leaves_both_to_the_trainer(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("finalized:kill:2")
    with Engine(alone=True) as engine:
        save(engine, root, 1).result(60)
        save(engine, root, 2).result(60)
        assert latest(root) == "step-2" and steps(root) == [2]


def test_a_pointer_that_cannot_be_written_is_told(root: Path) -> None:
    (root / ".latest.new").mkdir(parents=True)
    with Engine(alone=True) as engine:
        first = save(engine, root, 1)
        with pytest.raises(StorageError, match=r"is saved, but not named as the newest.*latest"):
            first.result(60)
        with pytest.raises(StorageError, match="latest"):
            save(engine, root, 2).result(60)
        assert steps(root) == [1, 2]  # a failed pointer prevents the removal
        (root / ".latest.new").rmdir()
        save(engine, root, 3).result(60)
    assert latest(root) == "step-3" and steps(root) == [3]


def test_of_several_saves_the_last_advances_the_pointer(root: Path) -> None:
    with Engine(alone=True) as engine:
        save(engine, root, 1, needs=(str(root / "step-2"),)).result(60)
        assert not (root / "latest").exists()
        save(engine, root, 2, spares=1, needs=(str(root / "step-1"),)).result(60)
    assert latest(root) == "step-2" and steps(root) == [1, 2]


def test_files_and_what_is_gone_or_in_the_way(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "step-0").parent.mkdir(parents=True)
    (root / "step-0").write_text("a file")
    (root / "step-1").symlink_to("nowhere")
    with Engine(alone=True) as engine:
        save(engine, root, 3).result(60)
    assert "an old checkpoint could not be removed" in caplog.text
    assert sorted(os.listdir(root)) == ["latest", "step-1", "step-3"]
