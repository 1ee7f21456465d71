"""Test histories that are marked, and trainings that begin from checkpoints of others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.checkpoints import step_folder
from support.recovery import empty, is_of, source, train

from asyncckpt import Checkpointer, cli
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.extension import storage_for

pytestmark = pytest.mark.usefixtures("forkserver")


def _saved(root: Path, *steps: int, config: Config | None = None) -> None:
    with Checkpointer(root, config) as checkpointer:
        if checkpointer.latest() is not None:
            checkpointer.load(empty())
        for step in steps:
            state = empty()
            state["w"].fill_(step)
            state["step"] = step
            checkpointer.save(step, state).result(60)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The root of another training, with the steps 1 to 3."""
    _saved(root := tmp_path / "other", 1, 2, 3)
    return root


def test_a_branch_begins_from_a_checkpoint_and_goes_on_by_its_own(root: Path, other: Path) -> None:
    """The other training saves newer steps meanwhile."""
    begin = other / "step-00000002"
    with Checkpointer(root, begin_from=begin) as checkpointer:
        assert checkpointer.latest() == 2 and checkpointer.steps() == [2]
        assert checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        state["w"].fill_(4)
        state["step"] = 4
        checkpointer.save(4, state).result(60)
    _saved(other, 9)
    with Checkpointer(root, Config(keep_last=1), begin_from=begin) as checkpointer:
        assert checkpointer.latest() == 4 and checkpointer.load(state) == 4 and is_of(state, 4)
        assert checkpointer.load(state, 2) == 2 and is_of(state, 2)
        checkpointer.save(3, state).result(60)  # after going back
    assert {name for name in os.listdir(root) if name.startswith("step")} == {"step-00000003"}
    assert sorted(os.listdir(other)) == ["asyncckpt.lock", *(f"step-0000000{step}" for step in (1, 2, 3, 9))]


def test_the_newest_of_several_roots_is_loaded(root: Path, other: Path, tmp_path: Path) -> None:
    """Copies of one checkpoint in two regions are one. The nearer copy is read."""
    _saved(root, 7)
    third = tmp_path / "third"
    shutil.copytree(root, third)
    with Checkpointer(root, begin_from=[other, third]) as checkpointer:
        assert checkpointer.load(empty()) == 7 and checkpointer.steps() == [1, 2, 3, 7]
    _saved(third, 8)
    with Checkpointer(root, begin_from=[str(other), third]) as checkpointer:
        assert checkpointer.load(state := empty()) == 8 and is_of(state, 8)


def test_a_copy_elsewhere_helps_where_the_own_is_damaged_and_is_never_renamed(root: Path, other: Path) -> None:
    shutil.copytree(other, root)
    for place in (root, other):
        (data,) = (place / "step-00000003").glob("*.distcp")
        data.write_bytes(b"damaged")
    with Checkpointer(root, begin_from=other) as checkpointer:
        with pytest.raises(DamagedCheckpointError):
            checkpointer.load(empty())
        assert checkpointer.load(empty(), fallback=True) == 2
    assert (other / "step-00000003").exists()


def test_where_there_is_nothing(root: Path, tmp_path: Path) -> None:
    with Checkpointer(root, begin_from=tmp_path / "nothing") as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint here yet"):
            checkpointer.load(empty())
    assert not (tmp_path / "nothing").exists()


def test_a_checkpoint_to_begin_from_that_is_gone(root: Path, other: Path) -> None:
    """A branch does not begin anew in silence. Once it has checkpoints of its own, it needs the other no more."""
    with Checkpointer(root, begin_from=[other / "step-00000007", other]) as checkpointer:
        for look in (checkpointer.latest, lambda: checkpointer.load(empty())):
            with pytest.raises(CheckpointNotFoundError, match="no checkpoint to begin from"):
                look()
    _saved(root, 8)
    with Checkpointer(root, begin_from=other / "step-00000007") as checkpointer:
        assert checkpointer.latest() == 8 and checkpointer.load(empty()) == 8


def test_what_is_staged_in_memory_is_newer_than_other_places(root: Path, other: Path) -> None:
    assert train(root, 4) is not None
    with Checkpointer(root, begin_from=other) as checkpointer:
        assert checkpointer.load(state := empty()) == 4 and is_of(state, 4) and source(checkpointer) == "memory"


def test_a_step_that_is_marked_is_not_loaded(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither from storage nor from the memory of a dead trainer's worker. The training goes back, and saves again."""
    assert train(root, 4) is not None
    assert cli.main(["mark", str(root), "3", "4", "--bad"]) == 0
    assert "step-00000004 is no step of this run any more" in capsys.readouterr().out
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest() == 2 and checkpointer.load(state := empty()) == 2 and is_of(state, 2)
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load(state, 4)
        checkpointer.save(3, state).result(60)
    kept = {"step-00000001", "step-00000002", "step-00000003", "step-00000003.bad-1", "step-00000004.bad-1"}
    assert kept < {*os.listdir(root)}


def test_a_marked_step_shares_no_file_with_later_ones(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command refuses to mark a step of a running training."""
    with Checkpointer(root, Config(assume_unchanged=["w"])) as checkpointer:
        state = empty()
        for step in (1, 2, 3):
            checkpointer.save(step, state).result(60)
        assert cli.main(["mark", str(root), "3", "--bad"]) == 2
        assert "end it first" in capsys.readouterr().err
        storage_for(str(root)).set_aside(step_folder(str(root), 3), "bad")
        checkpointer.save(4, state).result(60)
    inodes = [
        {each.stat().st_ino for each in (root / name).glob("*.distcp")}
        for name in ("step-00000003.bad-1", "step-00000004")
    ]
    assert not inodes[0] & inodes[1]


def test_marks_in_the_local_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "local"
    _saved(root, 1, 2, config=Config(local_root=str(local)))
    monkeypatch.setenv("ASYNC_CKPT_LOCAL_ROOT", str(local))
    assert cli.main(["mark", str(root), "2", "--bad"]) == 0
    with Checkpointer(root, Config(local_root=str(local))) as checkpointer:
        assert checkpointer.load(empty()) == 1


def test_a_step_that_is_not_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _saved(root, 1)
    assert cli.main(["mark", str(root), "1", "5", "--bad"]) == 2
    assert "there is no such checkpoint" in capsys.readouterr().err
    assert (root / "step-00000001.bad-1").exists()
