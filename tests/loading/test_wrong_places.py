"""A checkpoint that stands where it does not belong is never loaded as another, and none is passed over in silence."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt import Checkpointer, cli
from asyncckpt.errors import DamagedCheckpointError, StorageError
from asyncckpt.loading.source import verify


def _folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((100,), value)}, "step": value}


@pytest.fixture
def saved(root: Path) -> Path:
    """A root with the steps 1, 2 and 3, and no worker any more."""
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _state(step)).result(60)
    return root


def _exchange(root: Path) -> None:
    _folder(root, 2).rename(root / "aside")
    _folder(root, 3).rename(_folder(root, 2))
    (root / "aside").rename(_folder(root, 3))


def _overwrite(root: Path) -> None:
    shutil.rmtree(_folder(root, 3))
    shutil.copytree(_folder(root, 2), _folder(root, 3))


@pytest.mark.parametrize("happened", [_exchange, _overwrite])
def test_a_checkpoint_under_the_name_of_another_step_is_refused(
    saved: Path, happened: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    happened(saved)
    into = _state()
    with Checkpointer(saved) as checkpointer:
        for step in (None, 3):
            with pytest.raises(DamagedCheckpointError, match="step 2.*name of step 3") as raised:
                checkpointer.load(into, step=step)
            assert raised.value.path == str(_folder(saved, 3))
        assert into["step"] == 0.0
        assert checkpointer.load(into, fallback=True) == (1 if happened is _exchange else 2)
    assert cli.main(["verify", str(_folder(saved, 1))]) == 0


@pytest.mark.parametrize("happened", [_exchange, _overwrite])
def test_tools_see_it(saved: Path, happened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    happened(saved)
    assert verify(str(_folder(saved, 3))).damages
    assert cli.main(["verify", str(_folder(saved, 3))]) == 1
    capsys.readouterr()
    assert cli.main(["ls", str(saved)]) == 1
    printed = capsys.readouterr()
    assert "name of step 3" in printed.out + printed.err


@pytest.mark.parametrize("harm", ["removed", "emptied"])
def test_a_newest_checkpoint_without_a_manifest_is_not_passed_over(saved: Path, harm: str) -> None:
    manifest = _folder(saved, 3) / "asyncckpt.json"
    manifest.unlink() if harm == "removed" else manifest.write_bytes(b"")
    with Checkpointer(saved) as checkpointer:
        with pytest.raises(DamagedCheckpointError) as raised:
            checkpointer.load(_state())
        assert str(_folder(saved, 3)) in str(raised.value.path)
        assert checkpointer.load(into := _state(), fallback=True) == 2
        assert into["step"] == 2


def test_a_folder_that_is_empty_is_no_checkpoint(saved: Path) -> None:
    _folder(saved, 4).mkdir()
    with Checkpointer(saved) as checkpointer:
        assert checkpointer.load(_state()) == checkpointer.latest() == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_may_not_be_looked_at_is_not_taken_for_absent(
    saved: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = {name: getattr(os, name) for name in ("stat", "lstat", "open", "listdir", "scandir")}

    def failing(name: str) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, Path)) and "/step-" in str(path):
                raise OSError(code, os.strerror(code), str(path))
            return real[name](path, *args, **kwargs)

        return call

    with Checkpointer(saved) as checkpointer:
        with monkeypatch.context() as patched:
            for name in real:
                patched.setattr(os, name, failing(name))
            for ask in (checkpointer.steps, checkpointer.latest, lambda: checkpointer.load(_state())):
                with pytest.raises(StorageError, match=os.strerror(code)):
                    ask()
        assert checkpointer.latest() == 3
