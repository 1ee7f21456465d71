"""Which checkpoints stay."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.engine.retention import retention_of
from asyncckpt.errors import CheckpointError
from asyncckpt.worker.storage import storage_for
from asyncckpt.worker.storage.history import Origin


def save(root: Path, steps: range | list[int], config: Config) -> list[int]:
    with Checkpointer(root, config) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": torch.ones(3), "step": step}).result(60)
    return checkpointer.steps()


def test_some_are_kept_for_good(root: Path) -> None:
    assert save(root, range(1, 13), Config(keep_last=2, keep_every=5)) == [5, 10, 11, 12]
    # Whatever is chosen later: it stands in their manifests.
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
        save(root, [2], config)
    assert save(root, [], config) == [1]


def test_one_being_read_stays(root: Path) -> None:
    save(root, [1, 2], Config())
    with storage_for(str(root)).reading(str(root / "step-00000001")):
        assert save(root, [3], Config(keep_last=1)) == [1, 3]
    assert save(root, [4], Config(keep_last=1)) == [4]


def test_what_may_come_yet_of_a_dead_trainer_is_no_reason_for_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It died while it copied step 2, say, and step 1 was loaded: its successor comes to step 2 as it has to."""
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
    assert save(root, [3], Config(keep_last=1)) == [1, 3]


@pytest.mark.parametrize("wrong", [{"keep_every": 0}, {"failure": "never"}, {"linger": -1.0}, {"worker_restarts": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)  # type: ignore[arg-type]
