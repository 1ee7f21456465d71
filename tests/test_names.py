"""Test paths of any bytes that a file system allows, and of any length that fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointNotFoundError, JobTakenError
from asyncckpt.link.process import run_module, same_modules
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.partial import attempt_path


def test_a_root_that_is_not_utf8(tmp_path: Path) -> None:
    root = os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9 \xff")
    with Checkpointer(root, Config(job_id="caf\xe9")) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3), "where": "caf\xe9"}).result(60)
        assert checkpointer.load({"w": torch.zeros(3), "where": ""}) == 1
        with pytest.raises(CheckpointNotFoundError) as raised:
            checkpointer.load({"w": torch.zeros(3)}, step=2)
        assert str(raised.value.path).startswith(root)
    with Checkpointer(root, Config(job_id="other")) as other, pytest.raises(JobTakenError):
        other.prepare({"w": torch.ones(3)})
    for command in ("ls", "verify", "inspect"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "asyncckpt",
                command,
                os.path.join(root, "step-00000001" if command != "ls" else ""),
            ],
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert command == "inspect" or b"caf\xe9 \xff" in done.stdout


@pytest.mark.parametrize("length", [200, 238, 255])
def test_a_name_as_long_as_a_name_can_be(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("n" * length)
    asyncckpt.torch_save({"w": torch.ones(3)}, path).result(60)
    assert torch.equal(torch.load(path)["w"], torch.ones(3)) and os.listdir(tmp_path) == [path.name]


def test_what_is_left_of_one_with_a_long_name_is_removed(tmp_path: Path) -> None:
    storage = LocalStorage()
    for final, begin in ((tmp_path / "files" / ("f" * 255), "file"), (tmp_path / "folders" / ("d" * 255), "folder")):
        final.parent.mkdir()
        for number in (1, 2):
            attempt = f"0123456789ab-{number}"
            if begin == "file":
                file = storage.begin_file(str(final), attempt, 0, -60.0)
                file.create("", large=False).close()
                file.release()
            else:
                storage.begin_checkpoint(str(final), attempt, 0, -60.0).release()
            assert [str(path) for path in final.parent.iterdir()] == [attempt_path(str(final), attempt)]


def test_one_that_loses_its_long_name_is_not_removed(tmp_path: Path) -> None:
    """If names cannot be exchanged, a worker may be killed while it replaces a checkpoint."""
    old = Path(attempt_path(str(tmp_path / ("d" * 255)), "0123456789ab-1")).with_suffix(".asyncckpt-old")
    (old).mkdir()
    (old / "asyncckpt.json").touch()
    LocalStorage().begin_checkpoint(str(tmp_path / "other"), "0123456789ab-2", 0, -60.0).discard()
    assert list(tmp_path.iterdir()) == [old]


def test_a_module_in_a_folder_with_a_colon_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "a:b").mkdir()
    (folder / "only_here.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.syspath_prepend(str(folder))
    done = subprocess.run([*run_module("only_here"), "7"], capture_output=True, env=same_modules(), timeout=120)
    assert done.stdout == b"__main__ ['7']\n", done.stderr
