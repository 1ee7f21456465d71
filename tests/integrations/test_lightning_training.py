# ruff: noqa: E402
"""Lightning's Trainer and Fabric save with our engine, and stock Lightning resumes from the files."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.tuner.tuning import Tuner
from support import lightning_training
from support.lightning_training import Model, batches, every, trainer
from support.workers import Faulty

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.integrations.lightning import AsyncckptIO

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Lightning itself

STATE = {"w": torch.arange(1000.0), "step": 3}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("gate"))


@functools.cache
def unbroken() -> dict[int, float]:
    """Return the losses of a training without interruptions and saves."""
    model = Model()
    trainer().fit(model, batches())
    return model.losses


def losses_of_whole(first: int) -> dict[int, float]:
    return {step: loss for step, loss in unbroken().items() if step >= first}


def losses_from_last(folder: Path, plugins: Sequence[Any] = ()) -> dict[int, float]:
    """Resume from the last checkpoint in ``folder``, and return the losses.

    Without ``plugins`` Lightning itself loads.
    """
    model = Model()
    trainer(every(100, folder), plugins=plugins).fit(model, batches(), ckpt_path="last")
    return model.losses


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
    """Run a script on two ranks, with the environment of ``torchrun``. Return each exit code and standard error."""
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
    """The ranks die during the third save. Stock Lightning resumes from the second."""
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
