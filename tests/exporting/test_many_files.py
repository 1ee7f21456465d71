"""Exports from more files than a process may have open."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import ranks
from support.checkpoints import PAGE
from support.shards import save_shards
from support.states import same

from asyncckpt import export
from asyncckpt.errors import StorageError
from asyncckpt.exporting import source_files
from asyncckpt.shm.huge import huge_buffer

FILES, MOST = 150, 100


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{number:03d}": torch.randn(3, FILES, generator=generator) for number in range(4)}


def _export(path: str, out: str) -> None:
    """In a process of its own, which may open little more than it has open."""
    torch.ones(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, MOST))
    export(path, out)


@pytest.mark.usefixtures("forkserver")
def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    state = _state()
    save_shards(state, tmp_path / "source", {name: ((), range(1, FILES)) for name in state}, files=FILES)
    assert len(os.listdir(tmp_path / "source")) >= FILES
    code, _ = ranks.alone(_export, str(tmp_path / "source"), str(tmp_path / "out"))
    assert code == 0
    assert same(load_file(tmp_path / "out/model.safetensors"), state)


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else half of it would be of another time. One that stays open is the same for ever."""
    monkeypatch.setattr(source_files, "_MOST", 1)
    for name in ("one", "other", "new"):
        (tmp_path / name).write_text(name)
    files, buffer = source_files.OpenFiles(), huge_buffer(PAGE)
    one, other = (files.open(str(tmp_path / name)) for name in ("one", "other"))
    before = len(os.listdir("/proc/self/fd"))
    for file, name in ((one, "one"), (other, "other"), (one, "one")):
        assert bytes(buffer[: file.read([buffer], 0)]) == name.encode()
        assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "new").rename(tmp_path / "one")
    assert one.read([buffer], 0) == len("one") and other.read([buffer], 0) == len("other")
    with pytest.raises(StorageError, match="changed or replaced") as raised:
        one.read([buffer], 0)
    assert raised.value.path == str(tmp_path / "one")
    one.close()
    other.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_files_are_read_by_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is closed that somebody reads."""
    monkeypatch.setattr(source_files, "_MOST", 2)
    for number in range(20):
        (tmp_path / str(number)).write_text(str(number))
    files = source_files.OpenFiles()
    opened = [files.open(str(tmp_path / str(number))) for number in range(20)]

    def read(turn: int) -> bool:
        buffer, number = huge_buffer(PAGE), turn * 7 % 20
        return bytes(buffer[: opened[number].read([buffer], 0)]) == str(number).encode()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(500)))
