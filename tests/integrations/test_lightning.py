# ruff: noqa: E402
"""Lightning's plugin: removals, links and loads while saves are pending."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.pytorch.accelerators import CPUAccelerator
from support.states import same
from support.workers import Faulty, wait_for, wait_reached
from torch.distributed.checkpoint import state_dict_loader

from asyncckpt import FileSet
from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.integrations.lightning import AsyncckptFSDPStrategy, AsyncckptIO

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Lightning itself

STATE = {"w": torch.arange(1000.0), "step": 3}


@pytest.fixture
def io() -> Iterator[AsyncckptIO]:
    io = AsyncckptIO()
    yield io
    io.teardown()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("gate"))


def test_a_file_is_what_lightning_would_have_written(io: AsyncckptIO, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a.ckpt"
    io.save_checkpoint(STATE, path)
    assert same(io.load_checkpoint(path), STATE)
    assert same(TorchCheckpointIO().load_checkpoint(path, weights_only=True), STATE)
    io.save_checkpoint(STATE, f"file://{tmp_path}/b.ckpt")
    io.teardown()
    assert same(torch.load(tmp_path / "b.ckpt"), STATE)
    assert isinstance(pickle.loads(pickle.dumps(io)), AsyncckptIO)  # for spawned processes


def test_a_removal_waits_for_the_newer_save(io: AsyncckptIO, tmp_path: Path, gate: Path) -> None:
    torch.save(STATE, tmp_path / "a.ckpt")
    io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    wait_reached(gate)
    assert "a.ckpt" in names(tmp_path) and "b.ckpt" not in names(tmp_path)
    gate.touch()
    io.teardown()
    assert names(tmp_path) == ["b.ckpt"]
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / "meta.pt").touch()
    for name in ("b.ckpt", "sharded", "never was"):
        io.remove_checkpoint(tmp_path / name)  # no save is pending, so the removal is immediate
    assert names(tmp_path) == []


def test_a_removal_of_what_is_under_way(io: AsyncckptIO, tmp_path: Path, gate: Path) -> None:
    io.save_checkpoint(STATE, tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    gate.touch()
    io.teardown()
    assert names(tmp_path) == []


def test_what_is_saved_again_is_not_removed(io: AsyncckptIO, tmp_path: Path, gate: Path) -> None:
    io.save_checkpoint({"old": 1}, tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.save_checkpoint(STATE, tmp_path / "a.ckpt")
    gate.touch()
    io.teardown()
    assert same(torch.load(tmp_path / "a.ckpt"), STATE)


@pytest.mark.parametrize("point", ["write", "finalize"])
def test_after_a_failure_the_older_one_stays(
    point: str, tmp_path: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asyncckpt.save_handle")
    faulty_worker(f"{point}:enospc")
    io = AsyncckptIO()
    torch.save(STATE, tmp_path / "a.ckpt")
    io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.pending.link(str(tmp_path / "last.ckpt"), "b.ckpt")
    with pytest.raises(StorageError, match="No space left"):
        io.teardown()
    assert names(tmp_path) == ["a.ckpt"]
    assert "a.ckpt, as" in caplog.text and "last.ckpt to b.ckpt, as" in caplog.text
    io.teardown()  # the error is raised only once
    io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.teardown()
    assert names(tmp_path) == ["b.ckpt"]


def test_a_failure_is_raised_by_the_next_save_or_by_the_load(tmp_path: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:enospc")
    io = AsyncckptIO()
    io.save_checkpoint(STATE, tmp_path / "a.ckpt")
    io.pending.wait()
    with pytest.raises(StorageError, match="No space left"):
        io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    faulty_worker("")
    io.teardown()
    with pytest.raises(FileNotFoundError):
        AsyncckptIO().load_checkpoint(tmp_path / "a.ckpt")


def test_a_load_waits_and_raises(tmp_path: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:enospc")
    io = AsyncckptIO()
    torch.save({"older": 1}, tmp_path / "a.ckpt")
    io.save_checkpoint(STATE, tmp_path / "a.ckpt")
    with pytest.raises(StorageError):
        io.load_checkpoint(tmp_path / "a.ckpt")
    io.teardown()
    assert same(io.load_checkpoint(tmp_path / "a.ckpt"), {"older": 1})


def test_a_failure_does_not_hide_why_the_training_is_given_up(
    tmp_path: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_worker("write:enospc")
    io = AsyncckptIO()
    io.save_checkpoint(STATE, tmp_path / "a.ckpt")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        io.teardown()
    assert caplog.text.count("saving failed") == 1 == caplog.text.count("No space left")


def test_a_link_is_left_when_it_leads_somewhere(io: AsyncckptIO, tmp_path: Path, gate: Path) -> None:
    torch.save("older", tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    io.pending.link(str(tmp_path / "last.ckpt"), "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    wait_reached(gate)
    assert torch.load(tmp_path / "last.ckpt") == "older"
    Timer(0.1, gate.touch).start()
    assert same(io.load_checkpoint(tmp_path / "last.ckpt"), STATE)
    io.teardown()
    assert names(tmp_path) == ["b.ckpt", "last.ckpt"]


def test_what_a_link_leads_to_stays_until_it_leads_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A link's target stays until the link moves. ``ModelCheckpoint`` removes the old file before it moves the link."""
    io = AsyncckptIO()
    io.save_checkpoint(STATE, tmp_path / "a.ckpt")
    io.pending.link(str(tmp_path / "last.ckpt"), "a.ckpt")
    io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.load_checkpoint(tmp_path / "b.ckpt")
    wait_for(lambda: "last.ckpt" in names(tmp_path))  # the link appears after a is durable
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "last.ckpt"]
    io.pending.link(str(tmp_path / "last.ckpt"), "b.ckpt")
    io.load_checkpoint(tmp_path / "last.ckpt")
    assert names(tmp_path) == ["b.ckpt", "last.ckpt"]
    io.remove_checkpoint(tmp_path / "b.ckpt")
    io.teardown()
    assert names(tmp_path) == ["b.ckpt", "last.ckpt"] and "because a link leads there" in caplog.text


@pytest.mark.parametrize("target", ["a.ckpt", "nothing", "folder"])
def test_a_save_replaces_a_link(io: AsyncckptIO, tmp_path: Path, gate: Path, target: str) -> None:
    """A save replaces the link only when durable, and never writes to the link's target."""
    torch.save("best", tmp_path / "a.ckpt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "last.ckpt").symlink_to(target)
    io.save_checkpoint(STATE, tmp_path / "last.ckpt")
    wait_reached(gate)
    assert os.readlink(tmp_path / "last.ckpt") == target
    Timer(0.1, gate.touch).start()
    assert same(io.load_checkpoint(tmp_path / "last.ckpt"), STATE)
    io.teardown()
    assert torch.load(tmp_path / "a.ckpt") == "best"
    assert same(torch.load(tmp_path / "last.ckpt"), STATE) and names(tmp_path) == ["a.ckpt", "folder", "last.ckpt"]


@pytest.mark.parametrize("there", ["a file", "a link"])
def test_a_folder_replaces_nothing_before_it_is_durable(tmp_path: Path, gate: Path, there: str) -> None:
    path, io = tmp_path / "last.ckpt", AsyncckptIO()
    torch.save("older", tmp_path / "a.ckpt")
    if there == "a link":
        path.symlink_to("a.ckpt")
    else:
        torch.save("older", path)
    files = FileSet()
    files.add_dcp_folder("", STATE)
    io.save_files(str(path), files)
    wait_reached(gate)
    assert torch.load(path) == "older"
    gate.touch()
    io.teardown()
    assert path.is_dir() and torch.load(tmp_path / "a.ckpt") == "older"
    assert len(names(tmp_path)) == (2 if there == "a link" else 3)  # an existing file gets another name


@pytest.mark.parametrize("name", ["hpc_ckpt_3.ckpt", ".temp.ckpt"])
def test_what_is_needed_at_once_is_there(io: AsyncckptIO, tmp_path: Path, gate: Path, name: str) -> None:
    io.save_checkpoint(STATE, tmp_path / name)
    assert same(torch.load(tmp_path / name), STATE) and not gate.exists()


@pytest.mark.parametrize("there", ["a checkpoint", "Lightning's", "a file", "a link"])
def test_fsdp_saves_a_folder(tmp_path: Path, there: str) -> None:
    """Test the state and the folder only, because Lightning's FSDP needs a device."""
    strategy, path = AsyncckptFSDPStrategy(state_dict_type="sharded"), tmp_path / "a.ckpt"
    strategy.cluster_environment = LightningEnvironment()
    strategy.accelerator = CPUAccelerator()
    states = {"state_dict": {"w": torch.arange(5.0)}, "optimizer_states": [{"state": {"w": torch.ones(5)}}]}
    if there == "a checkpoint":
        strategy.save_checkpoint(dict(states), path)
    if there == "Lightning's":
        path.mkdir()
        (path / "meta.pt").touch()
        (path / "notes").touch()
    if there == "a file":
        path.touch()
    if there == "a link":
        path.symlink_to("nowhere")
    strategy.save_checkpoint(states | {"epoch": 4}, path)
    strategy.teardown()
    assert _is_sharded_checkpoint(path) and torch.load(path / "meta.pt", weights_only=True) == {"epoch": 4}
    found: dict[str, Any] = {"model": {"w": torch.zeros(5)}, "optimizer_0": {"state": {"w": torch.zeros(5)}}}
    state_dict_loader.load(found, checkpoint_id=path, no_dist=True)
    assert same(found["model"]["w"], torch.arange(5.0)) and same(found["optimizer_0"]["state"]["w"], torch.ones(5))
    assert len(names(tmp_path)) == (2 if there in ("Lightning's", "a file") else 1)


def test_a_strategy_with_another_plugin(tmp_path: Path) -> None:
    strategy = AsyncckptFSDPStrategy(state_dict_type="sharded", checkpoint_io=TorchCheckpointIO())
    with pytest.raises(TypeError, match="not by a TorchCheckpointIO"):
        strategy.load_checkpoint(tmp_path)


def test_what_is_not_local_lightning_saves(io: AsyncckptIO, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io.save_checkpoint(STATE, "memory://checkpoints/a.ckpt")
    io.save_checkpoint(STATE, "memory://checkpoints/b.ckpt")
    assert same(io.load_checkpoint("memory://checkpoints/b.ckpt"), STATE)
    io.remove_checkpoint("memory://checkpoints/a.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint("memory://checkpoints/a.ckpt")
    assert caplog.text.count("Lightning itself saves") == 1
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint(STATE, tmp_path / "a.ckpt", storage_options={})


def test_tensors_may_change_when_it_returns(tmp_path: Path, gate: Path) -> None:
    io = AsyncckptIO(Config(overlap=True))
    tensor = torch.ones(1000)
    io.save_checkpoint({"w": tensor}, tmp_path / "a.ckpt")
    tensor.zero_()
    gate.touch()
    assert io.load_checkpoint(tmp_path / "a.ckpt")["w"][0] == 1
