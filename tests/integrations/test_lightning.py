# ruff: noqa: E402
"""Lightning's Trainer and Fabric save by us: what is removed, linked to and read when, and what Lightning loads."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.tuner.tuning import Tuner
from support import lightning_training
from support.lightning_training import Model, batches, every, trainer
from support.states import same
from support.workers import Faulty, wait_reached
from torch.distributed.checkpoint import state_dict_loader

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.integrations.lightning import AsyncckptFSDPStrategy, AsyncckptIO

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own

STATE = {"w": torch.arange(1000.0), "step": 3}


@pytest.fixture
def io() -> Iterator[AsyncckptIO]:
    io = AsyncckptIO()
    yield io
    io.teardown()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("gate"))


@functools.cache
def unbroken() -> dict[int, float]:
    """The losses of a training that nothing interrupts or saves."""
    model = Model()
    trainer().fit(model, batches())
    return model.losses


def losses_of_whole(first: int) -> dict[int, float]:
    return {step: loss for step, loss in unbroken().items() if step >= first}


def losses_from_last(folder: Path, plugins: Sequence[Any] = ()) -> dict[int, float]:
    """Those of a training that goes on from the last checkpoint in ``folder``; without ``plugins`` Lightning's own."""
    model = Model()
    trainer(every(100, folder), plugins=plugins).fit(model, batches(), ckpt_path="last")
    return model.losses


def test_a_file_is_what_lightning_would_have_written(io: AsyncckptIO, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a.ckpt"
    io.save_checkpoint(STATE, path)
    assert same(io.load_checkpoint(path), STATE)
    assert same(TorchCheckpointIO().load_checkpoint(path, weights_only=True), STATE)
    io.save_checkpoint(STATE, f"file://{tmp_path}/b.ckpt")
    io.teardown()
    assert same(torch.load(tmp_path / "b.ckpt"), STATE)
    assert isinstance(pickle.loads(pickle.dumps(io)), AsyncckptIO)  # for processes that are spawned


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
        io.remove_checkpoint(tmp_path / name)  # nothing is under way: at once
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
    faulty_worker(f"{point}:enospc")
    io = AsyncckptIO()
    torch.save(STATE, tmp_path / "a.ckpt")
    io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.pending.link(str(tmp_path / "last.ckpt"), "b.ckpt")
    with pytest.raises(StorageError, match="No space left"):
        io.teardown()
    assert names(tmp_path) == ["a.ckpt"]
    assert "a.ckpt is not removed, because" in caplog.text and "last.ckpt is not linked" in caplog.text
    io.teardown()  # it is told once
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
    assert "while the training is being given up" in caplog.text


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
    """``ModelCheckpoint`` has the older one removed before it links to the newer."""
    io = AsyncckptIO()
    io.save_checkpoint(STATE, tmp_path / "a.ckpt")
    io.pending.link(str(tmp_path / "last.ckpt"), "a.ckpt")
    io.save_checkpoint(STATE, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.load_checkpoint(tmp_path / "b.ckpt")
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "last.ckpt"]
    io.pending.link(str(tmp_path / "last.ckpt"), "b.ckpt")
    io.load_checkpoint(tmp_path / "last.ckpt")
    assert names(tmp_path) == ["b.ckpt", "last.ckpt"]
    io.remove_checkpoint(tmp_path / "b.ckpt")
    io.teardown()
    assert names(tmp_path) == ["b.ckpt", "last.ckpt"] and "because a link leads there" in caplog.text


@pytest.mark.parametrize("target", ["a.ckpt", "nothing"])
def test_a_save_replaces_a_link(io: AsyncckptIO, tmp_path: Path, target: str) -> None:
    torch.save("best", tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to(target)
    io.save_checkpoint(STATE, tmp_path / "last.ckpt")
    io.teardown()
    assert torch.load(tmp_path / "a.ckpt") == "best"
    assert same(torch.load(tmp_path / "last.ckpt"), STATE) and names(tmp_path) == ["a.ckpt", "last.ckpt"]


@pytest.mark.parametrize("name", ["hpc_ckpt_3.ckpt", ".temp.ckpt"])
def test_what_is_needed_at_once_is_there(io: AsyncckptIO, tmp_path: Path, gate: Path, name: str) -> None:
    io.save_checkpoint(STATE, tmp_path / name)
    assert same(torch.load(tmp_path / name), STATE) and not gate.exists()


@pytest.mark.parametrize("there", ["a checkpoint", "Lightning's", "a file", "a link"])
def test_fsdp_saves_a_folder(tmp_path: Path, there: str) -> None:
    """Lightning's FSDP needs a device, so here is what comes before and after it: the state, the folder."""
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


@pytest.mark.parametrize("save_last", [True, "link"])
def test_training_and_going_on(tmp_path: Path, save_last: Any) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    trainer(every(3, ours, save_last=save_last), plugins=[AsyncckptIO()], steps=8).fit(Model(), batches())
    assert names(ours) == ["last.ckpt", "step=6.ckpt"]
    shutil.copytree(ours, theirs, symlinks=True)
    assert losses_from_last(ours, plugins=[AsyncckptIO()]) == losses_of_whole(7)
    assert losses_from_last(theirs) == losses_of_whole(7)


def test_the_best_ones_stay(tmp_path: Path) -> None:
    callback = every(2, tmp_path, monitor="improving", save_top_k=2, filename="best")
    training = trainer(callback, plugins=[AsyncckptIO()])
    training.fit(Model(), batches())
    saved = [torch.load(path, weights_only=True)["global_step"] for path in map(str, callback.best_k_models)]
    assert sorted(saved) == [10, 12] and names(tmp_path) == ["best-v1.ckpt", "best.ckpt"]
    assert torch.load(callback.best_model_path)["global_step"] == 12


def test_a_name_that_is_being_saved_to_is_taken(tmp_path: Path, gate: Path) -> None:
    class Opening(Callback):
        def on_train_end(self, *_: object) -> None:
            gate.touch()

    callback = every(1, tmp_path, monitor="improving", save_top_k=-1, filename="same")
    training = trainer(Opening(), callback, plugins=[AsyncckptIO(Config(slots=4))], steps=2)
    training.fit(Model(), batches())
    assert names(tmp_path) == ["same-v1.ckpt", "same.ckpt"]
    assert torch.load(callback.best_model_path)["global_step"] == 2


def test_a_full_disk_ends_the_training(tmp_path: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:enospc:2")
    training = trainer(every(4, tmp_path, save_last="link"), plugins=[AsyncckptIO()], steps=8)
    with pytest.raises(StorageError, match="No space left"):
        training.fit(Model(), batches())
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 4


def test_the_tuner(tmp_path: Path) -> None:
    class Tuned(Model):
        lr = 0.01

    training = trainer(plugins=[AsyncckptIO()], default_root_dir=tmp_path)
    found = Tuner(training).lr_find(Tuned(), batches(), num_training=4)
    assert found is not None and not list(tmp_path.glob("*.ckpt"))


def test_fabric(tmp_path: Path) -> None:
    io = AsyncckptIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    model = Model()
    module, optimizer = fabric.setup(torch.nn.Linear(3, 3), torch.optim.AdamW(model.parameters()))
    fabric.save(tmp_path / "a.ckpt", {"model": module, "step": 7})
    state: dict[str, Any] = {"model": module, "step": 0}
    fabric.load(tmp_path / "a.ckpt", state)
    assert state["step"] == 7
    fabric.strategy.teardown()
    assert names(tmp_path) == ["a.ckpt"]


def run_ranks(script: Path, *arguments: object) -> list[tuple[int, str]]:
    """Two processes that run a script as ``torchrun`` would have them do. Returns how they exit, and what they say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    others = {"TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", str(script), *map(str, arguments)]
    ranks = []
    for rank in range(2):
        told = {name: str(value) for name, value in (job | others | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        ranks.append(subprocess.Popen(command, env=os.environ | told, stderr=subprocess.PIPE, text=True))
    try:
        said = [each.communicate(timeout=100)[1] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    return [(each.returncode, text) for each, text in zip(ranks, said, strict=True)]


def test_two_ranks_that_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third save is being written then, and stock Lightning goes on from the second."""
    gate, saves = tmp_path / "gate", tmp_path / "killed"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    script = Path(lightning_training.__file__).with_name("lightning_ranks.py")
    for rank, (code, said) in enumerate(run_ranks(script, tmp_path)):
        assert code == -signal.SIGKILL, said
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert {int(step): loss for step, loss in found.pop("losses after them").items()} == losses_of_whole(7)
        assert found == {
            "step of what was being saved": 4,
            "files": ["last.ckpt", "step=12.ckpt"],
            "step of last.ckpt": 12,
            "sharded, under way": [],
            "sharded": ["last.ckpt", "step=6.ckpt"],
            "step of fabric's": 5,
        }
    worker = psutil.Process(int((tmp_path / "worker").read_text()))
    assert names(saves) == ["last.ckpt", "step=4.ckpt"]
    assert losses_from_last(saves) == losses_of_whole(5)
    gate.touch()
    worker.wait(60)
    assert torch.load(saves / "step=6.ckpt", weights_only=True)["global_step"] == 6
