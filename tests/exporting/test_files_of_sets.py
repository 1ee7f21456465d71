"""Test exports of a DCP folder in a set of files. The folder is checked, and protected from removal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import same

from asyncckpt import Checkpointer, FileSet, export
from asyncckpt.errors import DamagedCheckpointError, MismatchError
from asyncckpt.exporting import copying
from asyncckpt.extension import storage_for


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return {"w": torch.randn(700, 500), "b": torch.randn(7)}


@pytest.fixture
def saved(state: dict[str, Any], root: Path) -> Path:
    files = FileSet()
    files.add_torch_file("large.pt", state)
    files.add_dcp_folder("sharded", state)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, files)
    return root / "step-00000001"


def _flip(file: Path, its: bytes, further: int = 5) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(its) + further] ^= 1
    file.write_bytes(data)


def test_it_is_exported(state: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    export(saved / "sharded", tmp_path / "out.pt", to="torch")
    assert same(torch.load(tmp_path / "out.pt"), state)
    with pytest.raises(MismatchError, match="a set of files"):
        export(saved, tmp_path / "out")


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_a_damaged_byte_is_found(state: dict[str, Any], saved: Path, tmp_path: Path, to: Any) -> None:
    file = saved / "sharded/__0_0.distcp"
    _flip(file, state["b"].numpy().tobytes())
    with pytest.raises(DamagedCheckpointError, match="damaged: .*['/]b'") as raised:
        export(saved / "sharded", tmp_path / "out", to=to)
    assert raised.value.path == str(file)
    assert not (tmp_path / "out").exists()


def test_damage_of_what_describes_it_is_found(saved: Path, tmp_path: Path) -> None:
    _flip(saved / "sharded/.metadata", b"w", 0)
    with pytest.raises(DamagedCheckpointError, match="checksum does not match") as raised:
        export(saved / "sharded", tmp_path / "out")
    assert raised.value.path == str(saved / "sharded/.metadata")


@pytest.mark.parametrize("is_link", [False, True])
def test_retention_leaves_it_alone(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool) -> None:
    (tmp_path / "link").symlink_to(saved / "sharded")
    answers = []
    real = copying.write

    def write(*args: Any) -> int:
        answers.append(storage_for(str(saved)).remove_checkpoint(str(saved)))
        return real(*args)

    monkeypatch.setattr("asyncckpt.exporting.export.write", write)
    export(tmp_path / "link" if is_link else saved / "sharded", tmp_path / "out")
    assert answers == [False] and storage_for(str(saved)).remove_checkpoint(str(saved))
