"""Test exports from more files than a process may open."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import ranks
from support.shards import save_shards
from support.states import same

from asyncckpt import export
from asyncckpt.errors import StorageError
from asyncckpt.exporting import source_files
from asyncckpt.loading.data_file import fetch
from asyncckpt.shm.memcpy import address_of

FILES, MOST = 150, 100


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{number:03d}": torch.randn(3, FILES, generator=generator) for number in range(4)}


def _export(path: str, out: str) -> None:
    """Export in a separate process that may open only ``MOST`` files."""
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


def test_files_beyond_the_limit_are_opened_again_and_refused_if_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an export could mix bytes of two versions of a file."""
    monkeypatch.setattr(source_files, "_SHARE", 1 << 40)
    names = [str(number) for number in range(20)]
    for name in (*names, "new"):
        (tmp_path / name).write_text(name)
    with ExitStack() as held, ThreadPoolExecutor(8) as pool:
        before = len(os.listdir("/proc/self/fd"))
        folder = source_files.SourceFiles(str(tmp_path), held)
        files = {name: folder.open(name, [(name, 0, len(name))]) for name in names}
        assert len(os.listdir("/proc/self/fd")) == before

        def read(name: str) -> bytes:
            data = bytearray(len(name))
            fetch(files, [(name, 0, len(name), address_of(memoryview(data)))], pool)
            return bytes(data)

        for name in names * 2:
            assert read(name) == name.encode()
        (tmp_path / "new").rename(tmp_path / "7")
        assert read("8") == b"8"
        with pytest.raises(StorageError, match="changed or replaced") as raised:
            read("7")
        assert raised.value.path == str(tmp_path / "7")
