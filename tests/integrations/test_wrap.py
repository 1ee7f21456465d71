"""``wrap_save``: one flag, the same calls."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peers import NVRX, python
from support.states import same, small_state, stock_load, zeros_like
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from asyncckpt import Save, add_arguments, wrap_save
from asyncckpt.engine import shared as engines
from asyncckpt.errors import CheckpointExistsError

pytestmark = pytest.mark.usefixtures("forkserver")


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(given))


ON = ("--async-ckpt-use-cpu-shm",)
FUNCTIONS = [torch.save, state_dict_saver.save, state_dict_saver.async_save, print]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_switched_off_it_is_the_function_itself(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrap_save(function) is function and wrap_save(function, options()) is function
    assert wrap_save(function, options("--no-async-ckpt-use-cpu-shm")) is function
    monkeypatch.setenv("ASYNC_CKPT_USE_CPU_SHM", "no")
    assert wrap_save(function) is function


def test_torch_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_CKPT_USE_CPU_SHM", "1")
    state = small_state()
    handle = wrap_save(torch.save)(state, tmp_path / "file.pt")
    torch.save(state, tmp_path / "expected.pt")
    state["model"]["weight"].zero_()
    assert isinstance(handle, Save) and handle.result(60) == tmp_path / "file.pt"
    assert same(torch.load(tmp_path / "file.pt"), torch.load(tmp_path / "expected.pt"))


@pytest.mark.parametrize("function", [state_dict_saver.save, state_dict_saver.async_save])
def test_dcps_save(function: Any, tmp_path: Path) -> None:
    save = wrap_save(function, options(*ON, "--async-ckpt-slots", "1"))
    state = small_state()
    first = save(state, checkpoint_id=tmp_path / "1")
    second = save(state, storage_writer=FileSystemWriter(tmp_path / "2"), no_dist=False, planner=None)
    assert isinstance(first, Save)
    for handle in (first, second):
        stock_load(into := zeros_like(state), handle.result(60))
        assert same(into, state)
    (engine,) = engines.shared._engines.values()
    assert engine.config.slots == 1


def test_a_writer_of_another_kind_does_its_own_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Writer(FileSystemWriter):
        pass

    save = wrap_save(state_dict_saver.save, options(*ON))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save(state := small_state(), storage_writer=Writer(tmp_path / "it"))
    assert "Writer is left to torch.distributed.checkpoint itself" in caplog.text
    stock_load(into := zeros_like(state), tmp_path / "it")
    assert same(into, state)


def test_what_stands_there_is_dealt_with_as_dcp_does(tmp_path: Path) -> None:
    save = wrap_save(state_dict_saver.save, options(*ON))
    save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "it")).result(60)
    with pytest.raises(ValueError, match="checkpoint_id"):
        save({"a": torch.zeros(2)})
    with pytest.raises(CheckpointExistsError):
        save({"a": torch.zeros(2)}, storage_writer=FileSystemWriter(tmp_path / "it", overwrite=False))
    (tmp_path / "it/config.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / "it")
    save({"a": torch.zeros(2)}, checkpoint_id=tmp_path / "link").result(60)
    stock_load(into := {"a": torch.ones(2)}, tmp_path / "it")
    assert not into["a"].any() and (tmp_path / "it/config.json").exists() and (tmp_path / "link").is_symlink()


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="builtins.print"):
        wrap_save(print, options(*ON))


_TORCH_ASYNC = """
import argparse, sys, torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from asyncckpt import wrap_save
theirs = TorchAsyncCheckpoint()
off, on = argparse.Namespace(), argparse.Namespace(async_ckpt_use_cpu_shm=True)
assert wrap_save(theirs.async_save, off) == theirs.async_save
state = {"w": torch.ones(1000)}
handle = wrap_save(theirs.async_save, on)(state, sys.argv[1])
state["w"].zero_()
assert torch.load(handle.result(60))["w"].sum() == 1000
"""


@pytest.mark.parametrize("version", NVRX)
def test_nvrxs_torch_save(version: str, tmp_path: Path) -> None:
    python(_TORCH_ASYNC, version, arguments=(str(tmp_path / "file.pt"),))
