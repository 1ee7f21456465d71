"""Test checkpoints of many parties: processes that are no ranks add their parts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Job, alone, say
from support.states import stock_load

from asyncckpt import Checkpointer, Config, FileSet, join
from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CutError,
    DamagedCheckpointError,
    SaveTimeoutError,
    UnsavableStateError,
)
from asyncckpt.extension import load
from asyncckpt.party import LoadedPart, Party

OF = ("trainer", "loader", "rollouts")
QUICK_TRAINER = Config(parties=("rollouts", "loader"), timeout=20, commit_timeout=20)
SHORT = Config(commit_timeout=3.0, start_timeout=1.0)


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((1000,), float(step)), "step": step}


def trainer(root: Path | str, **options: Any) -> Checkpointer:
    return Checkpointer(root, Config(parties=("rollouts", "loader"), **{"commit_timeout": 30.0, **options}))


def party(root: Path | str, name: str, config: Config | None = None) -> Party:
    return join(root, name, of=OF, config=config or Config(commit_timeout=30.0))


def buffer(step: int) -> dict[str, Any]:
    return {"tokens": torch.arange(5000) * step, "ids": [step, step + 1]}


def files(step: int) -> FileSet:
    found = FileSet()
    found.add_bytes("notes/cursor.json", json.dumps(step).encode())
    found.add_torch_file("large.pt", {"tokens": torch.full((1 << 19,), step)})
    found.add_dcp_folder("replay", buffer(step))
    return found


def check_whole(root: Path | str) -> None:
    """Save steps 1 to 3 with a state dict, bytes, and a set of files; load them by other processes' objects."""
    parts: list[Callable[[int], Any]] = [files, lambda step: b"cursor %d" % step]
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        for step in (1, 2, 3):
            saves = [
                loader.save(step, parts[step % 2](step), cut=f"{step}/7"),
                checkpointer.save(step, state(step), cut=f"{step}/7"),
                rollouts.save(step, buffer(step), cut=f"{step}/7"),
            ]
            for save in saves:
                save.result(60)
        assert checkpointer.steps() == [1, 2, 3]
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        found, loaded = state(0), buffer(0)
        assert checkpointer.load(found) == 3 and found["step"] == 3 and bool((found["weight"] == 3).all())
        part = rollouts.load(loaded)
        assert part is not None and (part.step, part.cut, part.data) == (3, "3/7", None)
        assert loaded["ids"] == [3, 4] and torch.equal(loaded["tokens"], torch.arange(5000) * 3)
        assert loader.load(step=2) == LoadedPart(2, f"{root}/step-00000002/parties/loader", "2/7", None)
        newest = loader.load()
        assert newest is not None and newest.data == b"cursor 3"
        tokens = buffer(0)
        load(tokens, f"{root}/step-00000002/parties/loader/replay", no_dist=True)
        assert tokens["ids"] == [2, 3]


def test_a_step_is_complete_for_all(root: Path) -> None:
    parts: list[Any] = [b"cursor", buffer(1), files(1)]
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        for step, part in enumerate(parts, 1):
            first = loader.save(step, part, cut="c")
            second = checkpointer.save(step, state(step), cut="c")
            time.sleep(0.6)
            assert checkpointer.steps() == [*range(1, step)] and not second.done()
            third = rollouts.save(step, b"", cut="c")
            for save in (first, second, third):
                assert save.result(60) == str(root / f"step-{step:08d}")
            assert checkpointer.steps() == [*range(1, step + 1)]
        assert rollouts.load() == LoadedPart(3, str(root / "step-00000003/parties/rollouts"), "c", b"")
    plain: dict[str, Any] = {"tokens": torch.zeros(5000, dtype=torch.int64)}
    stock_load(plain, root / "step-00000003/parties/loader/replay")
    assert torch.equal(plain["tokens"], torch.arange(5000))


def test_it_is_loaded(root: Path) -> None:
    check_whole(root)


def test_a_step_without_one_party_fails_for_all(root: Path) -> None:
    with trainer(root, commit_timeout=2.0) as checkpointer, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        saves = checkpointer.save(1, state(1)), loader.save(1, b"cursor")
        begun = time.monotonic()
        with pytest.raises(SaveTimeoutError, match="the party 'rollouts' did not write the save within 2 s"):
            saves[0].result(30)
        with pytest.raises(SaveTimeoutError, match="the party 'rollouts' did not write the save within 2 s"):
            saves[1].result(30)
        assert time.monotonic() - begun < 10
        with party(root, "rollouts") as rollouts:  # and the next one works, also of the same step
            for step in (1, 2):
                saves = checkpointer.save(step, state(step)), loader.save(step, b"c")
                rollouts.save(step, b"r").result(60)
                assert [save.result(60) for save in saves] and checkpointer.latest() == step
        assert not [name for name in os.listdir(root) if name.startswith(".step")]


def test_a_step_without_its_trainer_fails_for_the_parties(root: Path) -> None:
    with trainer(root) as checkpointer, party(root, "loader", SHORT) as loader:
        checkpointer.prepare(state(0))
        with pytest.raises(SaveTimeoutError, match="sent no outcome"):
            loader.save(1, b"cursor").result(30)
        assert loader.load() is None
    assert not [name for name in os.listdir(root) if name.startswith(".step")]


@pytest.mark.parametrize("cuts", [("1", "1", "2"), ("1", None, "1"), ("2", "1", "1")])
def test_parts_of_two_cuts_are_never_one_step(root: Path, cuts: tuple[str | None, ...]) -> None:
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        saves = [
            checkpointer.save(1, state(1), cut=cuts[0]),
            rollouts.save(1, b"r", cut=cuts[1]),
            loader.save(1, b"l", cut=cuts[2]),
        ]
        with pytest.raises(CutError, match="has the cut"):
            saves[0].result(60)
        for save in saves[1:]:
            with pytest.raises(CheckpointError):
                save.result(60)
        assert checkpointer.steps() == []


def test_a_failure_of_a_party_is_told_to_all(root: Path) -> None:
    part = FileSet()
    part.add_bytes("x", b"x")
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        saves = [checkpointer.save(1, state(1)), loader.save(1, b"l")]
        while not (attempts := [*root.glob(".step-00000001.*.partial/parties")]):
            time.sleep(0.01)
        (attempts[0] / "rollouts").mkdir()
        (attempts[0] / "rollouts/x").mkdir()  # in the way
        begun = time.monotonic()
        with pytest.raises(CheckpointError, match="parties/rollouts/x"):
            rollouts.save(1, part).result(60)
        with pytest.raises(CheckpointError, match="parties/rollouts/x"):
            saves[0].result(60)
        with pytest.raises(CheckpointError, match="parties/rollouts/x"):
            saves[1].result(60)
        assert time.monotonic() - begun < 15  # nobody waits for a timeout


def test_a_part_of_a_training_that_ended_is_not_taken(root: Path) -> None:
    """The part waits, while the training is started again and saves the same step."""
    short = Config(commit_timeout=8.0)
    with party(root, "loader", short) as loader, party(root, "rollouts") as rollouts:
        with trainer(root) as checkpointer:
            checkpointer.prepare(state(0))
            stale = loader.save(1, b"stale")
        with trainer(root) as checkpointer:
            checkpointer.prepare(state(0))
            save = checkpointer.save(1, state(1))
            rollouts.save(1, b"r")
            with pytest.raises(CheckpointError, match="was started again"):
                stale.result(60)
            assert not save.done()
            assert loader.save(1, b"fresh").result(60) and save.result(60)
            part = loader.load()
            assert part is not None and part.data == b"fresh"


def test_a_part_that_is_saved_again_changes_nothing(root: Path) -> None:
    """The party went back alone, or its process was started again."""
    check_saved_again(root)


def check_saved_again(root: Path | str) -> None:
    """Save the part of a step a second time: while the step waits for another party, and when it is complete."""
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        first = checkpointer.save(1, state(1)), loader.save(1, b"first")
        for is_complete in (False, True):
            if is_complete:
                rollouts.save(1, buffer(1)).result(60)
                assert all(save.result(60) for save in first)
            with pytest.raises(CheckpointExistsError, match="a part of this party"):
                loader.save(1, b"second").result(60)
        part = loader.load()
        assert part is not None and part.data == b"first"
        assert checkpointer.load(found := state(0)) == 1 and found["step"] == 1


def test_a_training_that_goes_back_gets_new_parts(root: Path) -> None:
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        for text in (b"before", b"after"):
            if text == b"before":
                checkpointer.prepare(state(0))
            else:
                checkpointer.load(state(0), step=1)
            for step in (1, 2) if text == b"before" else (2,):
                saves = [loader.save(step, text), rollouts.save(step, b"r"), checkpointer.save(step, state(step))]
                assert all(save.result(60) for save in saves)
        part = loader.load(step=2)
        assert part is not None and part.data == b"after"


@pytest.mark.usefixtures("forkserver")
def test_who_only_loads_takes_no_party_away(root: Path) -> None:
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        for step in (1, 2):
            saves = [loader.save(step, b"l"), rollouts.save(step, b"r"), checkpointer.save(step, state(step))]
            assert all(save.result(60) for save in saves)
            assert alone(_loads, str(root)) == (0, step)


def _loads(folder: str) -> None:
    say(Checkpointer(folder, QUICK_TRAINER).load(state(0)))


def test_a_step_that_the_trainer_cannot_save_fails_for_the_parties(root: Path) -> None:
    with trainer(root) as checkpointer, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        save, begun = loader.save(1, b"l"), time.monotonic()
        with pytest.raises(UnsavableStateError):
            checkpointer.save(1, {"lock": threading.Lock()})
        with pytest.raises(CheckpointError, match="the training has failed this step"):
            save.result(60)
        assert time.monotonic() - begun < 15


def test_a_step_that_was_saved_without_a_party(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(5, state(5)).result(60)
    with party(root, "loader") as loader:
        assert loader.load() is None and "was saved without the party 'loader'" in caplog.text
        with pytest.raises(CheckpointError, match="no part of 'loader'"):
            loader.load(step=5)


def test_a_damaged_part_is_found(root: Path) -> None:
    with trainer(root) as checkpointer, party(root, "rollouts") as rollouts, party(root, "loader") as loader:
        checkpointer.prepare(state(0))
        saves = checkpointer.save(1, state(1)), loader.save(1, b"cursor")
        rollouts.save(1, buffer(1)).result(60)
        assert all(save.result(60) for save in saves)
        folder = root / "step-00000001/parties"
        with (folder / "rollouts/__0_0.distcp").open("r+b") as file:
            file.seek(2000)
            file.write(b"damage")
        with pytest.raises(DamagedCheckpointError):
            rollouts.load(buffer(0))
        (folder / "loader/part").write_bytes(b"CURSOR")
        with pytest.raises(DamagedCheckpointError):
            loader.load()


def test_who_may_join(root: Path) -> None:
    for name, of in [("loader", ("loader",)), ("trainer", OF), ("x", OF), ("a/b", ("trainer", "a/b"))]:
        with pytest.raises(ValueError, match="a party is one of"):
            join(root, name, of=of)
    for wrong in ("loader", ("trainer",), ("a", "a"), ("..",)):
        with pytest.raises(ValueError, match=r"Config\.parties"):
            Config(parties=wrong)
    with pytest.raises(ValueError, match="without local_root"):
        Checkpointer(root, Config(parties=("loader",), local_root="/tmp"))
    wanted = pytest.raises(SaveTimeoutError, match=r"no training with Config\.parties")
    with party(root, "loader", SHORT) as loader, wanted:
        loader.save(1, b"cursor")
    with trainer(root) as checkpointer, join(root, "loader", of=("trainer", "loader")) as loader:
        checkpointer.prepare(state(0))
        with pytest.raises(CutError, match="waits for the parties"):
            loader.save(1, b"cursor")


def _ranks(folder: str) -> None:
    with Checkpointer(folder, QUICK_TRAINER) as checkpointer:
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load(state(0))
        for step in (1, 2):
            Path(folder, f"go-{step}").touch()
            checkpointer.save(step, state(step), cut=str(step)).result(60)


@pytest.mark.usefixtures("forkserver")
def test_two_ranks_and_a_party(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    ranks = Job(2, _ranks, str(root), folder=tmp_path)
    with party(root, "loader") as loader, party(root, "rollouts") as rollouts:
        for step in (1, 2):
            while not (root / f"go-{step}").exists():
                time.sleep(0.01)
            saves = loader.save(step, b"l", cut=str(step)), rollouts.save(step, buffer(step), cut=str(step))
            assert all(save.result(60) for save in saves)
    assert [each.error for each in ranks.wait()] == [None, None]
