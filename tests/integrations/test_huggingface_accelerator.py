"""Background saves of accelerate's states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from support.checkpoints import verify
from support.workers import Faulty, wait_for

from asyncckpt.errors import StorageError
from asyncckpt.integrations import huggingface

pytestmark = pytest.mark.usefixtures("one_thread")


class Loop:
    """A training loop with accelerate alone."""

    def __init__(self, folder: Path, *, enable: bool = True, **project: Any) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import ProjectConfiguration

        AcceleratorState._reset_state(True)
        torch.manual_seed(1)
        self.accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(folder), **project))
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if enable:
            huggingface.enable_accelerator(self.accelerator)

    def step(self) -> float:
        loss = self.model(torch.randn(2, 4)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


@pytest.mark.parametrize("safe", [True, False])
def test_states_of_accelerate(tmp_path: Path, safe: bool) -> None:
    loop = Loop(tmp_path)
    loop.step()
    for _ in range(2):  # the second save replaces the first
        loop.accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    expected = [loop.step() for _ in range(3)]
    loop.accelerator.end_training()
    resumed = Loop(tmp_path, enable=False)
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert [resumed.step() for _ in range(3)] == expected
    loop.accelerator.load_state(str(tmp_path / "state"))
    assert [loop.step() for _ in range(3)] == expected


def test_accelerate_removes_states_when_a_newer_is_durable(tmp_path: Path, gate: Path) -> None:
    loop = Loop(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    loop.step()
    folder = tmp_path / "checkpoints"
    Loop(tmp_path, enable=False, automatic_checkpoint_naming=True, total_limit=2).accelerator.save_state()
    for number in (1, 2):
        loop.accelerator.project_configuration.iteration = number
        assert loop.accelerator.save_state() == folder / f"checkpoint_{number}"
    assert [each.name for each in folder.glob("checkpoint_*")] == ["checkpoint_0"]
    gate.touch()
    loop.accelerator.end_training()
    wait_for(lambda: sorted(os.listdir(folder)) == ["checkpoint_1", "checkpoint_2"])  # files are deleted later
    (folder / ".checkpoint_3.0-1.partial").mkdir()  # the leftover of a killed save
    with pytest.raises(ValueError, match="there already"):
        loop.accelerator.project_configuration.iteration = 2
        loop.accelerator.save_state()
    loop.accelerator.load_state()


def test_accelerate_hears_of_a_failure(tmp_path: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:enospc")
    loop = Loop(tmp_path)
    loop.accelerator.save_state(str(tmp_path / "state"))
    with pytest.raises(StorageError):
        loop.accelerator.end_training()
    assert os.listdir(tmp_path) == []


def test_the_newest_stays_whatever_its_number(tmp_path: Path) -> None:
    """After a restart accelerate counts from 0 again. The new checkpoint stays all the same."""
    for number in (8, 9):
        (tmp_path / f"checkpoints/checkpoint_{number}").mkdir(parents=True)
    loop = Loop(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    loop.accelerator.save_state()
    loop.accelerator.end_training()
    wait_for(lambda: sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_9"])


def test_a_folder_with_other_files_is_left_to_accelerate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").touch()
    loop.accelerator.save_state(str(tmp_path / "run"))
    assert "has other files" in caplog.text
    assert {"log.txt", "optimizer.bin"} <= {*os.listdir(tmp_path / "run")} and os.listdir(tmp_path) == ["run"]


def test_a_link_leads_to_what_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The save replaces the link's target in one step. Stock accelerate would write into the existing folder."""
    loop = Loop(tmp_path)
    loop.accelerator.save_state(str(tmp_path / "first"))
    (tmp_path / "last").symlink_to("first")
    loop.step()
    loop.accelerator.save_state(str(tmp_path / "last"))
    loop.accelerator.end_training()
    assert "has other files" not in caplog.text and (tmp_path / "last").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["first", "last"] and not verify(str(tmp_path / "first")).damages
    resumed = Loop(tmp_path, enable=False)
    resumed.accelerator.load_state(str(tmp_path / "first"))
    assert torch.equal(resumed.model.weight, loop.model.weight)
