"""``wrap_save`` keeps the calls, and adds one flag."""

from __future__ import annotations

import argparse
import io
from concurrent.futures import Future
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
OFF = ((), ("--no-async-ckpt-use-cpu-shm",))


@pytest.mark.parametrize("given", OFF)
def test_switched_off_the_handle_is_done(given: tuple[str, ...], tmp_path: Path) -> None:
    state = small_state()
    handle = wrap_save(torch.save, options(*given))(state, tmp_path / "file.pt")
    assert isinstance(handle, Save) and handle.done() and handle.staged() and handle.failure is None
    assert handle.result() == handle.result(1) == handle.future.result(1) == str(tmp_path / "file.pt")
    assert same(torch.load(tmp_path / "file.pt"), state)
    with open(tmp_path / "other.pt", "wb") as file:
        assert wrap_save(torch.save)(state, f=file).result() == str(tmp_path / "other.pt")
    wrap_save(torch.save)(state, io.BytesIO()).result()
    with pytest.raises(RuntimeError, match="does not exist"):  # raised at once, as without asyncckpt
        wrap_save(torch.save)(state, tmp_path / "none" / "file.pt")
    assert not engines.shared.has_worker()


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("by", ["checkpoint_id", "storage_writer"])
@pytest.mark.parametrize("function", [state_dict_saver.save, state_dict_saver.async_save])
def test_switched_off_dcp_saves(function: Any, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_CKPT_USE_CPU_SHM", "no")
    state, folder = small_state(), tmp_path / "it"
    where: Any = {by: folder if by == "checkpoint_id" else FileSystemWriter(folder)}
    handle = wrap_save(function)(state, **where, no_dist=True)
    assert isinstance(handle, Save) and handle.result(60) == str(folder) and handle.done()
    stock_load(into := zeros_like(state), folder)
    assert same(into, state) and not engines.shared.has_worker()


def test_switched_off_what_dcp_fails_with_comes_from_the_handle(tmp_path: Path) -> None:
    future: Future[None] = Future()
    handle = Save.of_another(tmp_path, future)
    assert not handle.done() and handle.staged()
    future.set_exception(OSError("as the test wants"))
    with pytest.raises(OSError, match="as the test wants"):
        handle.result(60)


def test_switched_off_any_other_function_is_itself() -> None:
    assert wrap_save(print) is print


def test_torch_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_CKPT_USE_CPU_SHM", "1")
    state = small_state()
    handle = wrap_save(torch.save)(state, tmp_path / "file.pt")
    torch.save(state, tmp_path / "expected.pt")
    state["model"]["weight"].zero_()
    assert isinstance(handle, Save) and handle.result(60) == str(tmp_path / "file.pt")
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
    with pytest.warns(UserWarning, match="torch.distributed is (disabled|unavailable)"):
        save(state := small_state(), storage_writer=Writer(tmp_path / "it")).result()
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
torch.cuda.synchronize = lambda: None  # nvrx takes for granted that there is CUDA, and a job
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.job", rank=0, world_size=1)
theirs = TorchAsyncCheckpoint(persistent_queue=False)
off, on = argparse.Namespace(), argparse.Namespace(async_ckpt_use_cpu_shm=True)
state = {"w": torch.ones(1000)}
handle = wrap_save(theirs.async_save, off)(state, sys.argv[1] + ".theirs")
assert torch.load(handle.result(60))["w"].sum() == 1000 and handle.done()
finalize, theirs.finalize_async_save = theirs.finalize_async_save, lambda **_: 1 / 0  # its process has died
handle = wrap_save(theirs.async_save, off)(state, sys.argv[1] + ".lost")
theirs.finalize_async_save = finalize
for _ in range(2):
    try:
        handle.result(60)
    except Exception as error:
        assert handle.done() and "division by zero" in str(error), error
    else:
        raise AssertionError("a save that has failed is durable")
finalize(blocking=True)
handle = wrap_save(theirs.async_save, on)(state, sys.argv[1])
state["w"].zero_()
assert torch.load(handle.result(60))["w"].sum() == 1000
"""


@pytest.mark.parametrize("version", NVRX)
def test_nvrxs_torch_save(version: str, tmp_path: Path) -> None:
    python(_TORCH_ASYNC, version, arguments=(str(tmp_path / "file.pt"),))
