"""Test that a training can go back to an older step. Its next save is the newest, whatever the step's number."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import alone, faulty
from support.workers import Faulty

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointExistsError, DamagedCheckpointError, StorageError

pytestmark = pytest.mark.usefixtures("forkserver")


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((100,), float(value))}


@pytest.fixture
def saved(root: Path) -> Path:
    """Return a root with the steps 800, 900 and 1000."""
    with Checkpointer(root) as checkpointer:
        for step in (800, 900, 1000):
            checkpointer.save(step, state(step)).result(60)
    return root


def test_what_is_saved_after_going_back_is_the_newest(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(keep_last=3)
    with Checkpointer(saved, config) as checkpointer:
        assert checkpointer.load(state(), 800) == 800
        assert "900, 1000" in caplog.text
        checkpointer.save(810, state(810)).result(60)
    assert checkpointer.steps() == [810, 900, 1000]
    with Checkpointer(saved, config) as checkpointer:
        assert checkpointer.latest() == 810
        assert checkpointer.load(into := state()) == 810 and into["w"][0] == 810
        for step in (820, 830):
            checkpointer.save(step, state(step)).result(60)
    assert checkpointer.steps() == [810, 820, 830]  # the abandoned steps went first
    assert Checkpointer(saved).load(state()) == 830


def test_a_newest_that_is_outrun_while_it_is_loaded_is_no_going_back(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluation loads while a training saves."""

    class SavesMeanwhile:
        def state_dict(self) -> dict[str, Any]:
            training.save(2, state(2)).result(60)
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    with Checkpointer(root) as training, Checkpointer(root) as evaluation:
        training.save(1, state(1)).result(60)
        assert evaluation.load(into := state() | {"meanwhile": SavesMeanwhile()}) == 1 and into["w"][0] == 1
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_step_that_was_left_behind_is_set_aside_when_it_is_saved_again(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(saved) as checkpointer:
        checkpointer.load(state(), 800)
        checkpointer.save(900, state(1)).result(60)
        assert "step-00000900.abandoned" in caplog.text
        for again in (900, 800):  # but not a step that this run has saved or loaded
            with pytest.raises(CheckpointExistsError):
                checkpointer.save(again, state(2))
        assert checkpointer.load(into := state()) == 900 and into["w"][0] == 1
    aside = saved / "step-00000900.abandoned-1"
    assert json.loads((aside / "asyncckpt.json").read_bytes())["step"] == 900
    with Checkpointer(saved) as checkpointer:  # another run comes to the other abandoned step
        checkpointer.load(state())
        (saved / "step-00001000" / "asyncckpt.json").write_bytes(b"{}")
        checkpointer.save(1000, state(3)).result(60)
        assert checkpointer.load(into := state()) == 1000 and into["w"][0] == 3
    with Checkpointer(saved) as checkpointer, pytest.raises(CheckpointExistsError):
        checkpointer.save(900, state())  # a run that has loaded nothing has not gone back
    assert sorted(os.listdir(saved)) == [
        "asyncckpt.lock",
        *("step-00000800", "step-00000900", "step-00000900.abandoned-1", "step-00001000"),
        "step-00001000.abandoned-1",
    ]


def test_a_save_that_fails_leaves_the_one_it_was_to_take_the_place_of(saved: Path, faulty_worker: Faulty) -> None:
    faulty_worker("finalize:eio")
    with Checkpointer(saved) as checkpointer:
        checkpointer.load(state(), 800)
        with pytest.raises(StorageError):
            checkpointer.save(900, state(1)).result(60)
        assert checkpointer.load(into := state(), 900) == 900 and into["w"][0] == 900
        checkpointer.load(state(), 800)
        checkpointer.save(900, state(2)).result(60)
        assert checkpointer.load(into := state()) == 900 and into["w"][0] == 2


def test_order_of_creation_goes_by_no_clock(saved: Path) -> None:
    """The clock of the previous host was ahead by a day."""
    for step in (900, 1000):
        rewrite(saved, step, lambda manifest: manifest["created"] + 86400)
    with Checkpointer(saved) as checkpointer:
        checkpointer.load(state(), 800)
        checkpointer.save(810, state(810)).result(60)
        assert checkpointer.latest() == 810


def rewrite(root: Path, step: int, created: Any) -> None:
    from support.checkpoints import Manifest

    path = root / f"step-{step:08d}" / "asyncckpt.json"
    fields = vars(Manifest.parse(path.read_bytes(), str(path)))
    path.write_bytes(Manifest(**fields | {"created": created(fields)}).encode())


def test_the_newest_is_not_passed_over_for_one_that_was_left_behind(saved: Path) -> None:
    with Checkpointer(saved) as checkpointer:
        checkpointer.load(state(), 800)
        checkpointer.save(810, state(810)).result(60)
    manifest = saved / "step-00000810" / "asyncckpt.json"
    text, facts = manifest.read_bytes(), manifest.stat()
    manifest.write_bytes(text.replace(b"810", b"811"))
    os.utime(manifest, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with Checkpointer(saved) as checkpointer:
        with pytest.raises(DamagedCheckpointError, match="810"):
            checkpointer.load(state())
        assert checkpointer.load(into := state(), fallback=True) == 1000 and into["w"][0] == 1000


def test_nor_does_an_old_one_that_is_damaged_keep_the_newest_from_being_loaded(saved: Path) -> None:
    manifest = saved / "step-00000800" / "asyncckpt.json"
    facts = manifest.stat()
    manifest.write_bytes(b"{}")
    os.utime(manifest, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with Checkpointer(saved) as checkpointer:
        assert checkpointer.latest() == 1000


def _train_and_die(root: str, first: int | None, fault: str, *steps: int) -> None:
    if fault:
        faulty(fault)
    checkpointer = Checkpointer(root, Config(slots=2))
    if first is not None:
        checkpointer.load(state(), first)
    for step in steps:
        with contextlib.suppress(StorageError):
            checkpointer.save(step, state(step)).result(60)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("fault", ["", "finalize:eio"])
def test_the_newest_in_memory_is_the_one_staged_last(root: Path, fault: str) -> None:
    """The newest staged image counts even if its write fails. This image has replaced the one of step 1000."""
    alone(_train_and_die, str(root), None, "", 800, 900, 1000)
    alone(_train_and_die, str(root), 900, fault, 910)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(into := state()) == 910 and into["w"][0] == 910
        assert checkpointer.loaded is not None and checkpointer.loaded.source == "memory"


def test_a_step_that_cannot_be_looked_at_holds_up_no_other(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "step-00000000").symlink_to("step-00000000")
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
        assert checkpointer.load({"w": torch.zeros(3)}, 1) == 1
