"""Test sets of files: each file equals the output of its usual function, and a set is saved whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.checkpoints import verify
from support.file_sets import LARGE, make, optimizer, weights
from support.ranks import script
from support.segments import mapped_segments
from support.states import same, stock_load, zeros_like
from support.workers import Faulty
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from asyncckpt import Checkpointer, FileSet
from asyncckpt.cli import main
from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointExistsError,
    MismatchError,
    StorageError,
    UnsavableStateError,
    WorkerDiedError,
)
from asyncckpt.extension import Engine, storage_for
from asyncckpt.planning.safetensors_plan import SafetensorsFile


def check(path: Path, seed: float, beside: Path) -> None:
    """Check that ``path`` holds exactly the files of ``make``."""
    save_file(weights(seed), beside / "stock.safetensors", {"format": "pt"})
    assert (path / "model.safetensors").read_bytes() == (beside / "stock.safetensors").read_bytes()
    loaded = torch.load(path / "optimizer.pt")
    assert same(loaded, optimizer(seed))
    its = loaded["state"][0]
    assert its["same"].untyped_storage().data_ptr() == its["exp_avg"].untyped_storage().data_ptr()
    assert torch.load(path / "optimizer.pt", mmap=True)["lr"] == seed
    torch.save({"last": seed}, beside / "scheduler.pt")
    assert torch.load(path / "scheduler.pt") == {"last": seed}
    assert json.loads((path / "trainer_state.json").read_bytes()) == {"history": [seed] * int(seed)}
    assert (path / "tokenizer/deep/vocab.txt").read_bytes() == b""
    state: dict[str, Any] = {"model": {"w": torch.zeros(100)}, "n": -1.0}
    stock_load(state, path / "dcp/model_0")
    assert state["n"] == seed and torch.equal(state["model"]["w"], torch.full((100,), float(seed)))
    report = verify(str(path))
    assert not report.damages
    found = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}
    ours = {"asyncckpt.json", *(f"__0_{number}.index.json" for number in range(3))}
    dcp = {"dcp/model_0/.metadata", "dcp/model_0/__0_0.distcp"}
    assert found == {*make(seed).contents} - {"dcp/model_0"} | ours | dcp


def test_each_file_is_what_its_own_function_would_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine() as engine:
        engine.save(tmp_path / "0", make(0.0)).result(60)
        monkeypatch.setattr("asyncckpt.engine.plan_selection.make_plan", None)  # now a new plan would fail
        for number in range(1, 4):
            save = engine.save(tmp_path / str(number), make(number))
            assert save.result(60) == str(tmp_path / str(number))
    for number in range(4):
        check(tmp_path / str(number), number, tmp_path)


def test_it_holds_the_values_of_the_call(tmp_path: Path) -> None:
    files, tensors, state = FileSet(), weights(), optimizer()
    files.add_safetensors("w.safetensors", tensors)
    files.add_torch_file("o.pt", state)
    files.add_torch_file("small.pt", small := torch.zeros(3))
    with Engine() as engine:
        save = engine.save(tmp_path / "it", files)
        for each in (tensors["layer.10"], state["state"][0]["exp_avg"], small):
            each.fill_(7)
        save.result(60)
    save_file(weights(), tmp_path / "stock.safetensors")
    assert (tmp_path / "it/w.safetensors").read_bytes() == (tmp_path / "stock.safetensors").read_bytes()
    assert same(torch.load(tmp_path / "it/o.pt"), optimizer())
    assert not torch.load(tmp_path / "it/small.pt").any()


def _update(files: FileSet, **tensors: torch.Tensor) -> None:
    files.contents["model.safetensors"] = SafetensorsFile({**weights(), **tensors}, None)


def test_a_state_dict_at_the_top(root: Path, tmp_path: Path) -> None:
    """A state dict at the top makes an ordinary checkpoint with additional files."""
    state: dict[str, Any] = {"w": torch.randn(LARGE), "n": 5}
    files = FileSet()
    files.add_dcp_folder("", state)
    files.add_torch_file("meta.pt", {"epoch": 3})
    files.add_safetensors("w.safetensors", {"w": state["w"]})
    with Checkpointer(root) as checkpointer:
        path = Path(checkpointer.save(1, files).result(60))
        assert checkpointer.load(into := zeros_like(state)) == 1 and same(into, state)
    stock_load(into := zeros_like(state), path)
    assert same(into, state) and torch.load(path / "meta.pt") == {"epoch": 3} and not verify(str(path)).damages


def test_structures_that_change(tmp_path: Path) -> None:
    """Save larger files, other files, other kinds of files, and a set without staged files."""
    with Engine() as engine:
        changes: list[Callable[[FileSet], object]] = [
            lambda files: None,
            lambda files: files.contents.pop("model.safetensors"),
            lambda files: files.add_torch_file("more.pt", torch.ones(LARGE * 2)),
            lambda files: files.contents.pop("dcp/model_0"),
            lambda files: [files.contents.pop(name) for name in list(files.contents) if "json" not in name],
            lambda files: _update(files, w=torch.ones(5)),
            lambda files: _update(files, w=torch.ones(5).double()),
        ]
        for number, change in enumerate(changes):
            files = make(number)
            change(files)
            path = Path(engine.save(tmp_path / str(number), files).result(60))
            assert not verify(str(path)).damages
            for name in files.contents:
                assert (path / name).exists()
    assert torch.load(tmp_path / "2/more.pt").sum() == LARGE * 2


class _Renaming(DefaultSavePlanner):
    """A user's own planner."""

    def set_up_planner(self, state_dict: Any, *args: Any, **options: Any) -> None:
        super().set_up_planner({f"own {name}": value for name, value in state_dict.items()}, *args, **options)


def test_a_plan_is_for_its_planner_and_for_its_header(tmp_path: Path) -> None:
    header = {"format": "pt"}
    with Engine() as engine:
        for number, planner in enumerate([None, _Renaming(), None]):
            files = FileSet()
            files.add_dcp_folder("dcp", {"w": torch.ones(3)}, planner)
            header["step"] = str(number)
            files.add_safetensors("w.safetensors", {"w": torch.ones(3)}, header)
            path = Path(engine.save(tmp_path / str(number), files).result(60))
            metadata = FileSystemReader(path / "dcp").read_metadata()
            assert [*metadata.state_dict_metadata] == ["own w" if planner else "w"]
            with safe_open(path / "w.safetensors", "pt") as file:
                assert file.metadata() == header
        files.add_safetensors("v.safetensors", {}, {"step": 5})  # type: ignore[dict-item]
        with pytest.raises(UnsavableStateError, match="is text"):
            engine.save(tmp_path / "text", files)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../b", "/a", "a//b", "a\0", "asyncckpt.json", "__0_0.index.json", ".metadata"]
)
def test_what_cannot_be_a_name(name: str) -> None:
    with pytest.raises(UnsavableStateError, match="cannot be the name"):
        FileSet().add_bytes(name, b"")


@pytest.mark.parametrize("name", ["a/b", "a/b/c"])
def test_names_that_are_taken(name: str) -> None:
    files = FileSet()
    files.add_bytes("a/b", b"")
    with pytest.raises(UnsavableStateError, match="'a/b'"):
        files.add_dcp_folder(name, {})
    files.add_bytes("a/bc", b"")
    files.add_bytes("model.safetensors.index.json", b"{}")
    files.add_bytes("dcp/before.json", b"{}")
    files.add_dcp_folder("dcp", {})
    with pytest.raises(UnsavableStateError, match="'dcp/__0_0.distcp' cannot stand beside 'dcp'"):
        files.add_bytes("dcp/__0_0.distcp", b"")


_ONE = torch.ones(6)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"a": _ONE, "b": _ONE}, "share memory"),
        ({"a": _ONE[:4], "b": torch.ones(2), "c": _ONE[3:]}, "'a' and 'c' share memory"),
        ({"a": torch.ones(2, 3).t()}, "not contiguous"),
        ({"a": torch.ones(2).to_sparse()}, "no plain bytes"),
        ({"a": torch.ones(2, device="meta")}, "no plain bytes"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"a": 1}, "tensors alone"),
        ({"__metadata__": torch.ones(2)}, "cannot be the name"),
    ],
)
def test_what_safetensors_cannot_hold(tmp_path: Path, tensors: Any, why: str) -> None:
    files = FileSet()
    files.add_safetensors("it", tensors)
    with Engine() as engine:
        with pytest.raises(UnsavableStateError, match=why):
            engine.save(tmp_path / "it", files)
        halves = FileSet()
        halves.add_safetensors("it", {"a": _ONE[:3], "b": _ONE[3:]})
        engine.save(tmp_path / "it", halves).result(60)
    assert os.listdir(tmp_path) == ["it"]


@pytest.mark.parametrize("size", [3, LARGE])
def test_what_cannot_be_pickled(tmp_path: Path, size: int) -> None:
    files = FileSet()
    files.add_torch_file("it.pt", [torch.ones(size), lambda: None])
    with Engine() as engine, pytest.raises(UnsavableStateError):
        engine.save(tmp_path / "it", files)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("where", ["refuse", "replace", "set aside"])
def test_what_stands_there_already(tmp_path: Path, where: Any) -> None:
    path = tmp_path / "it"
    with Engine() as engine:
        engine.save(path, make(1)).result(60)
        if where == "refuse":
            with pytest.raises(CheckpointExistsError):
                engine.save(path, make(2), existing=where)
            check(path, 1, tmp_path)
            return
        engine.save(path, make(2), existing=where).result(60)
        check(path, 2, tmp_path)
        if where == "set aside":
            check(tmp_path / "it.abandoned-1", 1, tmp_path)
            return
        with pytest.raises(ValueError, match="cannot be added"):
            engine.save(path, make(3), existing="join")
        (path / "tokenizer" / "of somebody else").mkdir()
        with pytest.raises(CheckpointExistsError, match="not only one"):
            engine.save(path, make(3), existing=where)
    assert (path / "tokenizer" / "of somebody else").exists()


def test_a_dict_that_is_used_again(tmp_path: Path) -> None:
    """A set keeps the values at the time of the call, as ``torch.save`` does."""
    files, state = FileSet(), {"loss": 1.0, "m": torch.ones(LARGE), "names": ["a"]}
    files.add_torch_file("one.pt", state)
    state["loss"], state["names"] = 2.0, ["b"]
    files.add_torch_file("two.pt", state)
    with Engine() as engine:
        engine.save(tmp_path / "it", files).result(60)
    one, two = (torch.load(tmp_path / "it" / f"{name}.pt") for name in ("one", "two"))
    assert (one["loss"], one["names"], two["loss"], two["names"]) == (1.0, ["a"], 2.0, ["b"])


def test_steps_of_a_checkpointer(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(root, Config(keep_last=2)) as checkpointer:
        for step in range(4):
            checkpointer.save(step, make(step)).result(60)
        assert checkpointer.latest() == 3
        with pytest.raises(MismatchError, match="a set of files"):
            checkpointer.load({"w": torch.ones(1)}, fallback=True)
        checkpointer.save(4, state := {"w": torch.ones(5)}).result(60)
        assert checkpointer.load(into := zeros_like(state)) == 4 and same(into, state)
    assert sorted(each.name for each in root.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert main(["ls", str(root)]) == 0 and main(["verify", str(root)]) == 0
    assert main(["inspect", str(root / "step-00000003")]) == 0
    shown = capsys.readouterr().out
    assert "model.safetensors/layer.10" in shown and "dcp/model_0/model.w" in shown and "trainer_state.json" in shown


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.safetensors", "model.safetensors/layer.10"),
        ("optimizer.pt", "optimizer.pt/data/1"),
        ("dcp/model_0/__0_0.distcp", "dcp/model_0/"),
        ("dcp/model_0/.metadata", "checksum"),
        ("trainer_state.json", "checksum"),
        ("scheduler.pt", "checksum"),
        ("__0_1.index.json", "checksum"),
        ("asyncckpt.json", "checksum"),
    ],
)
def test_a_bad_byte_is_found(tmp_path: Path, name: str, says: str) -> None:
    with Engine() as engine:
        path = Path(engine.save(tmp_path / "it", make(3)).result(60))
    whole = (path / name).read_bytes()
    for at in {0, len(whole) // 2, len(whole) - 1}:
        (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        damages = verify(str(path)).damages
        assert damages and all(name in str(damage.path) for damage in damages)
        assert at != len(whole) // 2 or says in damages[0].message or "damaged" in damages[0].message
    (path / name).write_bytes(whole[:-1])
    assert verify(str(path)).damages
    (path / name).unlink()
    if name != "asyncckpt.json":
        assert "missing" in verify(str(path)).damages[0].message


@pytest.mark.parametrize("point", ["begin", "create", "write", "sync", "finalize"])
@pytest.mark.parametrize("fault", ["enospc", "kill"])
def test_a_failure_harms_nothing(tmp_path: Path, faulty_worker: Faulty, point: str, fault: str) -> None:
    path = tmp_path / "it"
    with Engine() as engine:
        faulty_worker(f"{point}:{fault}")
        engine.start()
        faulty_worker("")
        with pytest.raises(StorageError if fault == "enospc" else WorkerDiedError):
            engine.save(path, make(1)).result(60)
        engine.wait(60)  # the call may raise before the worker removes the written files
        assert not os.listdir(tmp_path)
        engine.save(path, make(2)).result(60)
        segments = mapped_segments()
        engine.save(tmp_path / "other", make(3)).result(60)
        assert mapped_segments() == segments
    check(path, 2, tmp_path)


def test_what_a_killed_worker_has_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".checkpoint-5.0123456789ab-7.partial"
    with Engine() as engine:
        engine.save(left, make(1)).result(60)
        (left / "asyncckpt.json").unlink()
        shutil.copytree(left, foreign := tmp_path / ".of-somebody-else.0123456789ab-7.partial")
        for each in foreign.glob("__*"):
            each.unlink()
        for each in [*left.rglob("*"), *foreign.rglob("*"), left, foreign]:
            os.utime(each, (0, 0))
        engine.save(tmp_path / "it", make(2)).result(60)
    assert sorted(os.listdir(tmp_path)) == [foreign.name, "it"]


def test_what_is_left_of_a_removal_is_removed_later(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that removes the checkpoint is killed half-way."""
    with Checkpointer(root) as checkpointer:
        path = Path(checkpointer.save(1, make(1)).result(60))
        real = os.unlink

        def unlink(name: Any, **options: Any) -> None:
            if "optimizer" in str(name):
                raise KeyboardInterrupt
            real(name, **options)

        monkeypatch.setattr(os, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            storage_for(str(root)).remove_checkpoint(str(path))
        monkeypatch.undo()
        (left,) = root.glob(".step*")
        assert (left / "optimizer.pt").exists()
        for each in [*left.rglob("*"), left]:
            os.utime(each, (0, 0))
        checkpointer.save(2, make(2)).result(60)
        assert not left.exists()


DIES = """
import os, signal, sys
from support.file_sets import make
from asyncckpt.engine.engine import Engine
save = Engine().save(sys.argv[1], make(5))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("forkserver")
def test_the_worker_of_a_dead_trainer_writes_it(tmp_path: Path) -> None:
    assert script(DIES, str(tmp_path / "it")) == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not (tmp_path / "it").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    check(tmp_path / "it", 5, tmp_path)


HELD = """
import os, signal, sys
import torch
from asyncckpt import Checkpointer, FileSet
files = FileSet(is_held=True)
files.add_torch_file("w.pt", torch.ones(1 << 20))
Checkpointer(sys.argv[1]).save(1, files).result(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("forkserver")
def test_a_held_set_is_no_state_to_load(root: Path) -> None:
    assert script(HELD, str(root)) == -signal.SIGKILL
    with Checkpointer(root) as checkpointer, pytest.raises(MismatchError, match="but a set of files"):
        checkpointer.load({"w": torch.zeros(1)})
