"""Test which checkpoints retention keeps."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.engine.retention import retention_of
from asyncckpt.errors import CheckpointError
from asyncckpt.extension import storage_for
from asyncckpt.storage.history import Origin


def save(root: Path, steps: range | list[int], config: Config, *, loads: bool = True) -> list[int]:
    """Save ``steps``, and return the steps that stay. ``loads``: resume from the newest checkpoint first."""
    with Checkpointer(root, config) as checkpointer:
        if loads and checkpointer.latest() is not None:
            checkpointer.load({"w": torch.zeros(3), "step": 0})
        for step in steps:
            checkpointer.save(step, {"w": torch.ones(3), "step": step}).result(60)
    return checkpointer.steps()


def test_some_are_kept_for_good(root: Path) -> None:
    assert save(root, range(1, 13), Config(keep_last=2, keep_every=5)) == [5, 10, 11, 12]
    # The manifests of these steps record it, so a later configuration does not change it.
    assert save(root, [13, 14, 15], Config(keep_last=1)) == [5, 10, 15]


def test_or_by_any_rule(root: Path) -> None:
    best = {2, 3}
    assert save(root, range(1, 7), Config(keep_last=1, keep=lambda step: step in best)) == [2, 3, 6]


def test_nothing_is_removed_for_one_that_failed(root: Path, tmp_path: Path) -> None:
    config = Config(keep_last=1)
    assert save(root, [1], config) == [1]
    (root / "step-00000002").mkdir()
    (root / "step-00000002" / "somebody's").touch()
    with pytest.raises(CheckpointError):
        save(root, [2], config, loads=False)
    assert save(root, [], config, loads=False) == [1]


def test_a_training_removes_nothing_of_another(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(keep_last=2)
    assert save(root, range(9000, 9003), config) == [9001, 9002]
    assert save(root, range(4), config, loads=False) == [2, 3, 9001, 9002]
    assert "Config.keep_last removes none of those" in caplog.text
    # A restart from storage or from memory does not change this.
    assert save(root, [4, 5], config) == [4, 5, 9001, 9002]
    with pytest.raises(RuntimeError, match="the training"), Checkpointer(root, config) as checkpointer:
        checkpointer.load({"w": torch.zeros(3), "step": 0})
        checkpointer.save(6, {"w": torch.ones(3), "step": 6}).result(60)
        raise RuntimeError("the training has failed")  # its worker lingers
    with Checkpointer(root, config) as checkpointer:
        assert checkpointer.load({"w": torch.zeros(3), "step": 0}) == 6 and checkpointer.loaded
        assert checkpointer.loaded.source == "memory"
        checkpointer.save(7, {"w": torch.ones(3), "step": 7}).result(60)
    assert checkpointer.steps() == [6, 7, 9001, 9002]


def test_whoever_loads_the_older_training_goes_on_with_it(root: Path) -> None:
    config = Config(keep_last=2)
    assert save(root, range(9000, 9003), config) == [9001, 9002]
    with Checkpointer(root, config) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3), "step": 1}).result(60)
    with Checkpointer(root, config) as checkpointer:
        checkpointer.load({"w": torch.zeros(3), "step": 0}, 9002)
        checkpointer.save(9003, {"w": torch.ones(3), "step": 9003}).result(60)
        checkpointer.wait()
    # Step 1 is newer than the loaded step, so this run has gone back behind step 1.
    assert checkpointer.steps() == [1, 9003]


def test_one_being_read_stays(root: Path) -> None:
    save(root, [1, 2], Config())
    with storage_for(str(root)).reading(str(root / "step-00000001")):
        assert save(root, [3], Config(keep_last=1)) == [1, 3]
    assert save(root, [4], Config(keep_last=1)) == [4]


def test_what_may_come_yet_of_a_dead_trainer_is_no_reason_for_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer died while it staged step 2, and its successor loaded step 1. The successor then saves step 2 again."""
    save(root, [1], Config())
    path = root / "step-00000002"
    origin = Origin(1, time.time(), frozenset({2}), ((str(path), "an attempt"),))
    for is_there in (False, True):
        if is_there:
            path.mkdir()
            (path / "file").touch()
        assert retention_of(Config(), origin, [str(root)], 2).existing == "set aside"
        warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert bool(warned) == is_there


def test_one_whose_manifest_cannot_be_read_stays(root: Path) -> None:
    save(root, [1, 2], Config())
    (root / "step-00000001" / "asyncckpt.json").write_bytes(b"{}")
    with Checkpointer(root, Config(keep_last=1)) as checkpointer:
        checkpointer.load({"w": torch.zeros(3), "step": 0}, 2)
        checkpointer.save(3, {"w": torch.ones(3), "step": 3}).result(60)
    assert checkpointer.steps() == [1, 3]


@pytest.mark.parametrize("wrong", [{"keep_every": 0}, {"failure": "never"}, {"linger": -1.0}, {"worker_restarts": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)  # type: ignore[arg-type]
