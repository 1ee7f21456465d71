"""Test that unchanged tensors are written once and are part of every checkpoint."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import step_folder, verify
from support.states import same, stock_load, zeros_like
from support.unchanged import ELEMENTS, check, state_of, train, written
from support.workers import Faulty, wait_reached

from asyncckpt import Checkpointer, FileSet
from asyncckpt.config import Config
from asyncckpt.errors import StorageError, WorkerDiedError
from asyncckpt.extension import Engine
from asyncckpt.storage import partial as links

pytestmark = pytest.mark.usefixtures("forkserver")

_CONFIG = Config(linger=0, assume_unchanged=["base.*"])


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(_CONFIG, alone=True) as engine:
        yield engine


def test_only_what_changes_is_written(engine: Engine, tmp_path: Path) -> None:
    state = state_of()
    for number in range(6):
        train(state)
        engine.save(tmp_path / str(number), state).result(60)
        if number >= 1:
            assert written(tmp_path / str(number)) < 4 * ELEMENTS  # one tensor of four
    shared = {os.stat(tmp_path / str(number) / "__0_1.distcp").st_ino for number in range(6)}
    assert len(shared) == 1
    for number in range(5):
        shutil.rmtree(tmp_path / str(number))
    check(tmp_path / "5", state)


def test_what_changes_again_is_written_again(engine: Engine, tmp_path: Path) -> None:
    state, found = state_of(), []
    for number in range(9):
        train(state, *(["base.1"] if number == 5 else []))
        engine.save(tmp_path / str(number), state).result(60)
        check(tmp_path / str(number), state)
        found.append(written(tmp_path / str(number)) // (4 * ELEMENTS))
    # A changed file is written once more without a comparison. After that, it is unchanged again.
    assert found == [4, 0, 0, 0, 0, 4, 4, 0, 0]


def test_what_nobody_names_stands_in_one_file(tmp_path: Path) -> None:
    state = state_of()
    with Engine(Config(linger=0), alone=True) as engine:
        for number in range(3):
            engine.save(tmp_path / str(number), state).result(60)
            assert [each.name for each in (tmp_path / str(number)).glob("*.distcp")] == ["__0_0.distcp"]
    check(tmp_path / "2", state)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    state = state_of()
    with Engine(replace(_CONFIG, link_unchanged=False), alone=True) as engine:
        for number in range(5):
            engine.save(tmp_path / str(number), state).result(60)
            assert [each.stat().st_nlink for each in (tmp_path / str(number)).glob("*.distcp")] == [1, 1]


def test_now_and_then_it_is_written_all_the_same(tmp_path: Path) -> None:
    state = state_of()
    with Engine(replace(_CONFIG, rewrite_unchanged_every=2), alone=True) as engine:
        for number in range(8):
            engine.save(tmp_path / str(number), state).result(60)
    inodes = [os.stat(tmp_path / str(number) / "__0_1.distcp").st_ino for number in range(8)]
    assert [inodes.index(inode) for inode in inodes] == [0, 0, 0, 3, 3, 3, 6, 6]


def test_retention_removes_any_of_them(tmp_path: Path) -> None:
    state = state_of()
    with Checkpointer(tmp_path, config=replace(_CONFIG, keep_last=1)) as ckpt:
        for step in range(1, 7):
            train(state)
            ckpt.save(step, state).result(60)
    assert [each.name for each in tmp_path.glob("step-*")] == [os.path.basename(step_folder("", 6))]
    check(step_folder(str(tmp_path), 6), state)


def _break(path: Path, how: str) -> None:
    """Break the file that the next save would link."""
    file = path / "__0_1.distcp"
    match how:
        case "removed":
            shutil.rmtree(path)
        case "renamed":
            path.rename(path.with_suffix(".elsewhere"))
        case "flipped":
            with open(file, "r+b") as opened:
                opened.seek(ELEMENTS)
                byte = opened.read(1)
                opened.seek(ELEMENTS)
                opened.write(bytes([byte[0] ^ 1]))
        case "cut":
            os.truncate(file, file.stat().st_size - 1)
        case "touched":
            os.utime(file)
        case "copied":  # with the same bytes and times, but another inode
            facts = file.stat()
            shutil.copy2(file, other := file.with_suffix(".copy"))
            other.rename(file)
            os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        case "a link":
            file.rename(other := file.with_suffix(".copy"))
            file.symlink_to(other)
        case "a folder":
            file.unlink()
            file.mkdir()
        case "exchanged":
            path.rename(path.with_suffix(".elsewhere"))
            shutil.copytree(path.with_suffix(".elsewhere"), path)


@pytest.mark.parametrize(
    "how", ["removed", "renamed", "flipped", "cut", "touched", "copied", "a link", "a folder", "exchanged"]
)
def test_nothing_is_linked_that_is_not_as_it_was(engine: Engine, tmp_path: Path, how: str) -> None:
    state = state_of()
    for number in range(6):
        train(state)
        if number == 4:
            _break(tmp_path / "3", how)
            then = copy.deepcopy(state)
        engine.save(tmp_path / str(number), state).result(60)
    assert os.stat(tmp_path / "4" / "__0_1.distcp").st_nlink == 2  # written at step 4, and linked at step 5
    check(tmp_path / "4", then)
    check(tmp_path / "5", state)


def test_where_nothing_can_be_linked_all_is_written(
    tmp_path: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_worker("start:unlinked")
    state = state_of()
    with Engine(_CONFIG, alone=True) as engine:
        for number in range(6):
            train(state)
            engine.save(tmp_path / str(number), state).result(60)
            assert all(each.stat().st_nlink == 1 for each in (tmp_path / str(number)).iterdir())
        check(tmp_path / "5", state)
    told = [record.message for record in caplog.records if "written again" in record.message]
    assert len(told) == (0 if _clones(tmp_path) else 1)


def _clones(folder: Path) -> bool:
    """Return whether files in this folder can share blocks."""
    (folder / "one").write_bytes(b"1")
    with open(folder / "one", "rb") as one, open(folder / "two", "wb") as two, contextlib.suppress(OSError):
        fcntl.ioctl(two.fileno(), links._FICLONE, one.fileno())
        return True
    return False


@pytest.mark.parametrize("fault", ["link:kill", "link:enospc"])
def test_a_worker_that_fails_while_it_links(tmp_path: Path, faulty_worker: Faulty, fault: str) -> None:
    faulty_worker(fault)
    state = state_of()
    with Engine(replace(_CONFIG, restart_pause=0.01), alone=True) as engine:
        engine.save(tmp_path / "0", state).result(60)
        faulty_worker("")
        train(state)
        with pytest.raises(WorkerDiedError if "kill" in fault else StorageError):
            engine.save(tmp_path / "1", state).result(60)
        assert not (tmp_path / "1").exists()
        for number in range(2, 6):
            engine.save(tmp_path / str(number), state).result(60)
            check(tmp_path / str(number), state)
    assert sorted(each.name for each in tmp_path.iterdir()) == list("02345")


def test_what_is_removed_while_it_is_linked(
    tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    faulty_worker("link:hold")
    state = state_of()
    with Engine(_CONFIG, alone=True) as engine:
        engine.save(tmp_path / "0", state).result(60)
        train(state)
        save = engine.save(tmp_path / "1", state)
        wait_reached(gate)
        shutil.rmtree(tmp_path / "0")
        gate.touch()
        save.result(60)
    check(tmp_path / "1", state)


def test_tensors_of_a_folder_in_a_set_are_linked(engine: Engine, tmp_path: Path) -> None:
    state = state_of()
    for number in range(3):
        train(state)
        files = FileSet()
        files.add_dcp_folder("model", state)
        engine.save(tmp_path / str(number), files).result(60)
        assert not verify(str(tmp_path / str(number))).damages
    assert written(tmp_path / "2") < 4 * ELEMENTS
    stock_load(loaded := zeros_like(state), tmp_path / "2" / "model")
    assert same(loaded, state)


def test_files_of_a_set_are_linked_whole(engine: Engine, tmp_path: Path) -> None:
    frozen, trained = {"w": torch.randn(ELEMENTS)}, {"a": torch.randn(ELEMENTS)}
    for number in range(5):
        trained["a"] += 1
        files = FileSet()
        files.add_safetensors("model.safetensors", frozen)
        files.add_safetensors("adapter/model.safetensors", trained)
        files.add_torch_file("frozen.pt", frozen)
        files.add_torch_file("optimizer.pt", trained)
        engine.save(tmp_path / str(number), files).result(60)
        assert not verify(str(tmp_path / str(number))).damages
    links = {
        str(each.relative_to(tmp_path / "4")): each.stat().st_nlink
        for each in (tmp_path / "4").rglob("*")
        if each.suffix in (".pt", ".safetensors")
    }
    assert links == {
        "model.safetensors": 4,
        "frozen.pt": 4,
        "adapter/model.safetensors": 1,
        "optimizer.pt": 1,
    }
    shutil.rmtree(tmp_path / "3")
    assert same(torch.load(tmp_path / "4" / "frozen.pt"), frozen)
    assert same(torch.load(tmp_path / "4" / "optimizer.pt"), trained)


def test_a_checkpoint_that_is_joined_to_the_one_it_is_linked_to(engine: Engine, tmp_path: Path) -> None:
    state = state_of()
    path = tmp_path / "here"
    for _ in range(6):
        train(state)
        engine.save(path, state, existing="join").result(60)
    assert [each.name for each in tmp_path.iterdir()] == ["here"]
    check(path, state)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_changes_each_checkpoint_is_whole(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    state = state_of(6)
    known: dict[str, dict[str, Any]] = {}
    patterns = [f"base.{each}" for each in chance.sample(range(6), 4)]
    config = Config(linger=0, rewrite_unchanged_every=3, overlap=bool(seed % 2), assume_unchanged=patterns)
    with Engine(config, alone=True) as engine:
        for number in range(16):
            changing = chance.sample([f"base.{each}" for each in range(6)], chance.choice([0, 0, 0, 1, 2, 6]))
            train(state, *changing)
            save = engine.save(path := tmp_path / str(number), state)
            save.wait_staged(60)
            known[str(path)] = copy.deepcopy(state)
            if chance.random() < 0.7:
                save.result(60)
            if chance.random() < 0.3 and len(known) > 2:
                gone = chance.choice([*known][:-1])
                if os.path.exists(gone):
                    shutil.rmtree(gone)
                    del known[gone]
        engine.wait(60)
    for folder, its in known.items():
        check(folder, its)
