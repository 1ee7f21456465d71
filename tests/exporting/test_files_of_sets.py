"""Files that stand in a set of ours: they are checked, and held against removal, as all that is ours."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.states import same

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import DamagedCheckpointError, StorageError
from asyncckpt.exporting import copying
from asyncckpt.exporting.export import export
from asyncckpt.planning.file_set import FileSet
from asyncckpt.worker.storage import storage_for

FILES = ("weights/model.safetensors", "large.pt", "small.pt", "sharded")


class Tagged:
    """An object that holds a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return {"w": torch.randn(700, 500), "b": torch.randn(7)}


@pytest.fixture
def saved(state: dict[str, Any], root: Path) -> Path:
    files = FileSet()
    files.add_safetensors("weights/model.safetensors", state)
    files.add_torch_file("large.pt", state)
    files.add_torch_file("small.pt", {"w": state["w"][:5].clone(), "b": state["b"]})
    files.add_torch_file("tagged.pt", {**state, "tagged": Tagged(torch.arange(200_000.0))})
    files.add_dcp_folder("sharded", state)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, files)
    return root / "step-00000001"


def _flip(file: Path, its: bytes, further: int = 5) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(its) + further] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", [*FILES, "weights"])
def test_they_are_exported(state: dict[str, Any], saved: Path, tmp_path: Path, name: str) -> None:
    export(saved / name, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == state.keys() and same(found["b"], state["b"])
    assert same(found["w"], state["w"][: len(found["w"])])


@pytest.mark.parametrize("name", [*FILES, "weights"])
@pytest.mark.parametrize("to", ["hf", "torch"])
def test_a_damaged_byte_is_found(state: dict[str, Any], saved: Path, tmp_path: Path, name: str, to: Any) -> None:
    file = {"sharded": saved / "sharded/__0_0.distcp", "weights": saved / FILES[0]}.get(name, saved / name)
    _flip(file, state["b"].numpy().tobytes())
    with pytest.raises(
        DamagedCheckpointError, match="damaged" if name == "small.pt" else "damaged: .*['/]b'"
    ) as raised:
        export(saved / name, tmp_path / "out", to=to)
    assert raised.value.path == str(file)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, its", [(FILES[0], b'"dtype":"F32"'), ("large.pt", b"_rebuild_tensor_v2"), ("large.pt", b".format_version")]
)
def test_damage_around_the_tensors_is_found(saved: Path, tmp_path: Path, name: str, its: bytes) -> None:
    """Before anybody makes something else of it."""
    _flip(saved / name, its, len(its) - 2)
    with pytest.raises(DamagedCheckpointError, match="the bytes .* are damaged") as raised:
        export(saved / name, tmp_path / "out")
    assert raised.value.path == str(saved / name)


@pytest.mark.parametrize("name", ["__0_2.index.json", "sharded/.metadata"])
def test_damage_of_what_describes_them_is_found(saved: Path, tmp_path: Path, name: str) -> None:
    _flip(saved / name, b"w", 0)
    with pytest.raises(DamagedCheckpointError, match="checksum does not match") as raised:
        export(saved / ("sharded" if name.startswith("sharded") else FILES[0]), tmp_path / "out")
    assert raised.value.path == str(saved / name)


def test_tensors_within_objects_are_checked(saved: Path, tmp_path: Path) -> None:
    _flip(saved / "tagged.pt", torch.arange(200_000.0).numpy().tobytes())
    with pytest.raises(DamagedCheckpointError, match="the bytes .* are damaged"):
        export(saved / "tagged.pt", tmp_path / "out", to="dcp", weights_only=False)


def test_what_is_not_asked_for_may_be_damaged(root: Path, tmp_path: Path) -> None:
    files, state = FileSet(), {"bad.b": torch.randn(7), "good.b": torch.randn(7)}
    files.add_safetensors("model.safetensors", state)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, files)
    file = root / "step-00000001/model.safetensors"
    _flip(file, state["bad.b"].numpy().tobytes())
    assert export(file, tmp_path / "out", only="good").tensors == 1
    with pytest.raises(DamagedCheckpointError, match=r"damaged: 'model\.safetensors/bad\.b'"):
        export(file, tmp_path / "other", only="bad")


def test_a_file_of_another_size(saved: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, saved / "large.pt")
    with pytest.raises(DamagedCheckpointError, match="was written with"):
        export(saved / "large.pt", tmp_path / "out")


def test_what_was_put_beside_is_not_of_the_set(saved: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, saved / "mine.pt")
    export(saved / "mine.pt", tmp_path / "out.pt", to="torch")
    assert same(torch.load(tmp_path / "out.pt"), {"w": torch.ones(3)})


@pytest.mark.parametrize("name", [*FILES, "weights", "link.pt"])
def test_retention_leaves_it_alone(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "link.pt").symlink_to(saved / "large.pt")
    answers = []
    real = copying.write

    def write(*args: Any) -> int:
        answers.append(storage_for(str(saved)).remove_checkpoint(str(saved)))
        return real(*args)

    monkeypatch.setattr("asyncckpt.exporting.export.write", write)
    export((tmp_path if name == "link.pt" else saved) / name, tmp_path / "out")
    assert answers == [False] and storage_for(str(saved)).remove_checkpoint(str(saved))


def test_a_link_in_the_place_of_a_file_is_damage(state: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    save_file({name: torch.zeros_like(each) for name, each in state.items()}, tmp_path / "other.safetensors")
    (saved / FILES[0]).unlink()
    (saved / FILES[0]).symlink_to(tmp_path / "other.safetensors")
    with pytest.raises(DamagedCheckpointError):
        export(saved / FILES[0], tmp_path / "out")


@pytest.mark.parametrize("what", [b"{}", b'{"attempt": 1}', b"[]", b"no JSON"])
def test_a_file_of_others_above_is_none_of_ours(state: dict[str, Any], tmp_path: Path, what: bytes) -> None:
    (tmp_path / "deep" / "in").mkdir(parents=True)
    (tmp_path / "asyncckpt.json").write_bytes(what)
    save_file(state, tmp_path / "deep" / "in" / "model.safetensors")
    export(tmp_path / "deep" / "in" / "model.safetensors", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys() and all(same(found[each], state[each]) for each in state)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_changes_meanwhile(
    state: dict[str, Any], tmp_path: Path, name: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    real = copying.write

    def change(*args: Any) -> int:
        if in_place:
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\1")
        else:
            shutil.copy(path, tmp_path / "new")
            os.replace(tmp_path / "new", path)
        return real(*args)

    monkeypatch.setattr("asyncckpt.exporting.export.write", change)
    save_file(state, path) if name.endswith("s") else torch.save(state, path)
    with pytest.raises(StorageError, match="changed or replaced"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
