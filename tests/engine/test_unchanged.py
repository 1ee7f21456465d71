"""What does not change is written once, and stands in every checkpoint all the same."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import alone
from support.states import same, stock_load, zeros_like
from support.workers import Faulty, wait_reached

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
from asyncckpt.errors import StorageError, UnsavableStateError, WorkerDiedError
from asyncckpt.loading.source import verify
from asyncckpt.planning.file_set import FileSet
from asyncckpt.weights.subscriber import WeightSubscriber
from asyncckpt.worker.storage import links, step_folder

pytestmark = pytest.mark.usefixtures("forkserver")

_ELEMENTS = 1 << 18  # a mebibyte


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(Config(linger=0), alone=True) as engine:
        yield engine


def _state(tensors: int = 4) -> dict[str, Any]:
    """A frozen base, and what is trained beside it, in turns."""
    state: dict[str, Any] = {}
    for number in range(tensors):
        state[f"base.{number}"] = torch.randn(_ELEMENTS)
        state[f"adapter.{number}"] = torch.randn(100 + number)
    return {**state, "optimizer": {"step": torch.tensor(0.0), "lr": 0.1}, "name": "one"}


def _train(state: dict[str, Any], *names: str) -> None:
    """Change the adapters, and what is named."""
    for name, value in state.items():
        if name.startswith("adapter") or name in names:
            value += 1
    state["optimizer"]["step"] += 1
    state["optimizer"]["lr"] /= 2


def _written(path: str | Path) -> int:
    """The bytes of data files that no other checkpoint has."""
    files = [each.stat() for each in Path(path).rglob("*") if each.suffix in (".distcp", ".safetensors", ".pt")]
    return sum(facts.st_size for facts in files if facts.st_nlink == 1)


def _check(path: str | Path, state: dict[str, Any]) -> None:
    """That it is a checkpoint of that state, for us and for stock DCP."""
    assert not verify(str(path)).damages
    stock_load(loaded := zeros_like(state), path)
    assert same(loaded, state)


def test_only_what_changes_is_written(engine: Engine, tmp_path: Path) -> None:
    state = _state()
    for number in range(6):
        _train(state)
        engine.save(tmp_path / str(number), state).result(60)
        if number >= 3:
            assert _written(tmp_path / str(number)) < 4 * _ELEMENTS  # one of four
    shared = {os.stat(tmp_path / str(number) / "__0_1.distcp").st_ino for number in range(2, 6)}
    assert len(shared) == 1
    for number in range(5):
        shutil.rmtree(tmp_path / str(number))
    _check(tmp_path / "5", state)


def test_what_changes_again_is_written_again(engine: Engine, tmp_path: Path) -> None:
    state, written = _state(), []
    for number in range(9):
        _train(state, *(["base.1"] if number == 5 else []))
        engine.save(tmp_path / str(number), state).result(60)
        _check(tmp_path / str(number), state)
        written.append(_written(tmp_path / str(number)) // (4 * _ELEMENTS))
    # When it has, it stands with what changes from then on, and the others alone are linked.
    assert written == [4, 4, 4, 0, 0, 4, 1, 1, 1]


def test_what_all_changes_is_written_as_ever(engine: Engine, tmp_path: Path) -> None:
    state = _state()
    for number in range(5):
        _train(state, *(f"base.{each}" for each in range(4)))
        engine.save(tmp_path / str(number), state).result(60)
        assert [each.name for each in (tmp_path / str(number)).glob("*.distcp")] == ["__0_0.distcp"]
    _check(tmp_path / "4", state)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    state = _state()
    with Engine(Config(linger=0, link_unchanged=False), alone=True) as engine:
        for number in range(5):
            engine.save(tmp_path / str(number), state).result(60)
            assert [each.stat().st_nlink for each in (tmp_path / str(number)).glob("*.distcp")] == [1]


def test_now_and_then_it_is_written_all_the_same(tmp_path: Path) -> None:
    state = _state()
    with Engine(Config(linger=0, rewrite_unchanged_every=2), alone=True) as engine:
        for number in range(9):
            engine.save(tmp_path / str(number), state).result(60)
    inodes = [os.stat(tmp_path / str(number) / "__0_0.distcp").st_ino for number in range(9)]
    # Twice, to see that it does not change; each of the following stands in three.
    assert [inodes.index(inode) for inode in inodes] == [0, 1, 1, 1, 4, 4, 4, 7, 7]


def test_retention_removes_any_of_them(tmp_path: Path) -> None:
    state = _state()
    with Checkpointer(tmp_path, config=Config(keep_last=1, linger=0)) as ckpt:
        for step in range(1, 7):
            _train(state)
            ckpt.save(step, state).result(60)
    assert [each.name for each in tmp_path.glob("step-*")] == [os.path.basename(step_folder("", 6))]
    _check(step_folder(str(tmp_path), 6), state)


def _break(path: Path, how: str) -> None:
    """Do something to the file that would be linked next."""
    file = path / "__0_1.distcp"
    match how:
        case "removed":
            shutil.rmtree(path)
        case "renamed":
            path.rename(path.with_suffix(".elsewhere"))
        case "flipped":
            with open(file, "r+b") as opened:
                opened.seek(_ELEMENTS)
                byte = opened.read(1)
                opened.seek(_ELEMENTS)
                opened.write(bytes([byte[0] ^ 1]))
        case "cut":
            os.truncate(file, file.stat().st_size - 1)
        case "touched":
            os.utime(file)
        case "copied":  # with the same bytes, and the same times
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
    state = _state()
    for number in range(6):
        _train(state)
        if number == 4:
            _break(tmp_path / "3", how)
            then = copy.deepcopy(state)
        engine.save(tmp_path / str(number), state).result(60)
    assert os.stat(tmp_path / "4" / "__0_1.distcp").st_nlink == 2  # it was written, and is linked again
    _check(tmp_path / "4", then)
    _check(tmp_path / "5", state)


def test_where_nothing_can_be_linked_all_is_written(
    tmp_path: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_worker("start:unlinked")
    state = _state()
    with Engine(Config(linger=0), alone=True) as engine:
        for number in range(6):
            _train(state)
            engine.save(tmp_path / str(number), state).result(60)
            assert all(each.stat().st_nlink == 1 for each in (tmp_path / str(number)).iterdir())
        _check(tmp_path / "5", state)
    told = [record.message for record in caplog.records if "written again" in record.message]
    assert len(told) == (0 if _clones(tmp_path) else 1)


def _clones(folder: Path) -> bool:
    """Whether files can share blocks there."""
    (folder / "one").write_bytes(b"1")
    with open(folder / "one", "rb") as one, open(folder / "two", "wb") as two, contextlib.suppress(OSError):
        fcntl.ioctl(two.fileno(), links._FICLONE, one.fileno())
        return True
    return False


@pytest.mark.parametrize("fault", ["link:kill", "link:enospc"])
def test_a_worker_that_fails_while_it_links(tmp_path: Path, faulty_worker: Faulty, fault: str) -> None:
    faulty_worker(fault)
    state = _state()
    with Engine(Config(linger=0, restart_pause=0.01), alone=True) as engine:
        for number in range(4):
            _train(state)
            if number < 3:
                engine.save(tmp_path / str(number), state).result(60)
        with pytest.raises(WorkerDiedError if "kill" in fault else StorageError):
            engine.save(tmp_path / "3", state).result(60)
        assert not (tmp_path / "3").exists()
        faulty_worker("")
        for number in range(4, 8):
            engine.save(tmp_path / str(number), state).result(60)
            _check(tmp_path / str(number), state)
    assert sorted(each.name for each in tmp_path.iterdir()) == list("0124567")


def test_what_is_removed_while_it_is_linked(
    tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    faulty_worker("link:hold")
    state = _state()
    with Engine(Config(linger=0), alone=True) as engine:
        for number in range(3):
            _train(state)
            engine.save(tmp_path / str(number), state).result(60)
        save = engine.save(tmp_path / "3", state)
        wait_reached(gate)
        shutil.rmtree(tmp_path / "2")
        gate.touch()
        save.result(60)
    _check(tmp_path / "3", state)


def test_files_of_a_set_are_linked_whole(engine: Engine, tmp_path: Path) -> None:
    frozen, trained = {"w": torch.randn(_ELEMENTS)}, {"a": torch.randn(_ELEMENTS)}
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
    state = _state()
    path = tmp_path / "here"
    for _ in range(6):
        _train(state)
        engine.save(path, state, existing="join").result(60)
    assert [each.name for each in tmp_path.iterdir()] == ["here"]
    _check(path, state)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_changes_each_checkpoint_is_whole(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    state = _state(6)
    known: dict[str, dict[str, Any]] = {}
    with Engine(Config(linger=0, rewrite_unchanged_every=3, overlap=bool(seed % 2)), alone=True) as engine:
        for number in range(16):
            changing = chance.sample([f"base.{each}" for each in range(6)], chance.choice([0, 0, 0, 1, 2, 6]))
            _train(state, *changing)
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
        _check(folder, its)


def _resident(engine: Engine) -> float:
    """Mebibytes of shared memory that there are."""
    (buffer,) = (known.buffer for known in engine._buffers.known)
    assert buffer is not None
    return os.fstat(buffer.segment.fileno()).st_blocks * 512 / (1 << 20)


def test_in_memory_it_is_there_once(engine: Engine, tmp_path: Path) -> None:
    state = _state(16)
    resident = []
    for number in range(5):
        _train(state)
        engine.save(tmp_path / str(number), state).result(60)
        resident.append(_resident(engine))
    assert resident[1] >= 32 and resident[4] < 16.5
    _check(tmp_path / "4", state)


def test_with_overlap_it_is_copied(tmp_path: Path) -> None:
    """Nobody may look at it in the call."""
    state = _state(16)
    with Engine(Config(linger=0, overlap=True), alone=True) as engine:
        for number in range(6):
            _train(state)
            engine.save(tmp_path / str(number), state).result(60)
        assert _resident(engine) >= 32 and _written(tmp_path / "5") < 1 << 20
    _check(tmp_path / "5", state)


@pytest.mark.parametrize("form", ["transposed", "every other", "conjugate", "views of one"])
def test_tensors_in_any_form_are_seen_to_change(engine: Engine, tmp_path: Path, form: str) -> None:
    def formed(value: float) -> torch.Tensor:
        whole = torch.full((2048, 2048), value)
        whole[7, 9] = 0.5
        return {
            "transposed": lambda: whole.t(),
            "every other": lambda: whole[::2, ::2],
            "conjugate": lambda: torch.complex(whole, whole).conj(),
            "views of one": lambda: whole[1024:],
        }[form]()

    for number in range(8):
        state = {"base": formed(3.0 if number == 6 else 2.0), "adapter": torch.full((1000,), float(number)), "n": 1}
        engine.save(tmp_path / str(number), state).result(60)
        _check(tmp_path / str(number), state)
    assert os.stat(tmp_path / "5" / "__0_1.distcp").st_nlink == 4


def test_what_is_promised_not_to_change_is_linked_at_once(tmp_path: Path) -> None:
    state = _state()
    with Engine(Config(linger=0, assume_unchanged=["base.*"]), alone=True) as engine:
        for number in range(5):
            _train(state)
            engine.save(tmp_path / str(number), state).result(60)
        assert _resident(engine) < 5
    assert os.stat(tmp_path / "4" / "__0_1.distcp").st_nlink == 5
    _check(tmp_path / "4", state)


def test_a_broken_promise_fails_a_save(tmp_path: Path) -> None:
    state = _state()
    with Engine(Config(linger=0, assume_unchanged=["base.*"], check_unchanged_every=3), alone=True) as engine:
        for number in (1, 2):
            engine.save(tmp_path / str(number), state).result(60)
        _train(state, "base.2")
        with pytest.raises(UnsavableStateError, match=r"'base\.2'") as raised:
            engine.save(tmp_path / "3", state)
        assert "assume_unchanged" in str(raised.value) and "base.1" not in str(raised.value)
        # What follows is as it is then.
        for number in (4, 5, 6):
            engine.save(tmp_path / str(number), state).result(60)
            _check(tmp_path / str(number), state)
    assert not (tmp_path / "3").exists()


def test_a_worker_that_dies_takes_nothing_along(tmp_path: Path) -> None:
    """What slots share is known again by the next one, and not copied anew under those who may read it."""
    state = _state()
    with Engine(Config(linger=0, restart_pause=0.01), alone=True) as engine:
        for number in range(8):
            _train(state, *(["base.0"] if number == 6 else []))
            if number == 5:
                assert engine.worker is not None
                os.kill(engine.worker.pid, signal.SIGKILL)
                with contextlib.suppress(WorkerDiedError):
                    engine.save(tmp_path / "lost", state).result(60)
            engine.save(tmp_path / str(number), state).result(60)
            _check(tmp_path / str(number), state)


def test_readers_of_checkpoints_see_all_of_it(tmp_path: Path) -> None:
    state = _state()
    root = str(tmp_path)
    kept = []
    with (
        Checkpointer(root) as ckpt,
        WeightSubscriber.of_checkpoints(root) as subscriber,
        contextlib.ExitStack() as until_the_end,
    ):
        for step in range(1, 8):
            _train(state, *(["base.3"] if step == 6 else []))
            save = ckpt.save(step, state)
            save.result(60)
            ckpt.publish(save, step)
            with contextlib.ExitStack() as now:
                weights = (until_the_end if step in (4, 6) else now).enter_context(subscriber.acquire(min_version=step))
                assert all(same(weights[name], value) for name, value in state.items() if "." in name)
            if step in (4, 6):
                kept.append((weights, copy.deepcopy(state)))
        for weights, its in kept:
            assert all(same(weights[name], value) for name, value in its.items() if "." in name)


def _die(root: str, saves: int) -> None:
    state = _state()
    torch.manual_seed(0)
    for name in state:
        if name.startswith("base"):
            state[name] = torch.randn(_ELEMENTS)
    ckpt = Checkpointer(root)
    for step in range(1, saves + 1):
        _train(state)
        ckpt.save(step, state).result(60)
    torch.save(state, f"{root}/state")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_trainer_finds_it_in_memory(tmp_path: Path) -> None:
    root = str(tmp_path)
    alone(_die, root, 5)
    state = torch.load(tmp_path / "state")
    with Checkpointer(root) as ckpt:
        assert ckpt.load(loaded := zeros_like(state)) == 5 and same(loaded, state)
        assert ckpt.loaded is not None and ckpt.loaded.source == "memory"
        for step in range(6, 9):
            _train(loaded, *(["base.1"] if step == 8 else []))
            ckpt.save(step, loaded).result(60)
            _check(step_folder(root, step), loaded)
