"""Test the timings of a save on its handle, and the timings of all ranks in the manifest."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import Manifest, read_manifest
from support.ranks import QUICK, run

from asyncckpt import Checkpointer
from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.format.manifest import of_all_ranks

# Phases, in the order in which they begin.
BEGINS = ("copy_from_s", "checksum_from_s", "sync_from_s", "commit_from_s")
NBYTES = 32 << 20
IMPOSSIBLE = [{"write_s": [number, None]} for number in (float("nan"), float("inf"), -1.0, 1e300, 10**400, True)]


def _check(timings: dict[str, float]) -> None:
    assert timings["write_s"] >= timings["checksum_s"] + timings["sync_s"] > 0
    begins = [timings[name] for name in BEGINS if name in timings]
    assert begins == sorted(begins)
    assert timings["stall_s"] >= timings["plan_s"] + timings["slot_s"] + timings["copy_s"] > 0
    end = timings["sync_from_s"] + timings["sync_s"]
    assert abs(end - timings["write_from_s"] - timings["write_s"]) < 0.05


def test_the_phases_stand_in_their_order(tmp_path: Path) -> None:
    before = time.time()
    with Checkpointer(tmp_path, QUICK) as checkpointer:
        save = checkpointer.save(1, {"w": torch.zeros(NBYTES, dtype=torch.uint8)})
        path = save.result(60)
        _check(save.timings)
        assert save.timings["commit_s"] > 0
    manifest = read_manifest(path)
    kept = {name: ranks[0] for name, ranks in manifest.timings.items() if ranks[0] is not None}
    _check(kept)
    assert before - 0.01 <= kept["called_at"] <= manifest.created
    assert kept["called_at"] + kept["write_from_s"] + kept["write_s"] <= manifest.created + 0.05


def _save_on_all(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, {f"w{dist.get_rank()}": torch.zeros(NBYTES, dtype=torch.uint8)}).result(60)


@pytest.mark.usefixtures("forkserver")
def test_a_manifest_has_those_of_all_ranks(tmp_path: Path) -> None:
    run(2, _save_on_all, str(tmp_path / "root"), folder=tmp_path)
    timings = read_manifest(str(tmp_path / "root/step-00000001")).timings
    for rank in range(2):
        _check({name: each for name, ranks in timings.items() if (each := ranks[rank]) is not None})


def test_a_rank_whose_trainer_died_lacks_what_only_that_knew() -> None:
    assert of_all_ranks([{"write_s": 0.1234567, "plan_s": 1.0}, {"write_s": 2.0}]) == {
        "write_s": [0.123457, 2.0],
        "plan_s": [1.0, None],
    }


@pytest.mark.parametrize(
    "timings", [{"write_s": [1.0]}, {"write_s": 1.0}, {"write_s": ["1", "2"]}, ["write_s"], *IMPOSSIBLE]
)
def test_timings_that_cannot_be_are_refused(timings: object) -> None:
    manifest = Manifest("attempt", 1, 1.5, 2, False, 0, {}, {"write_s": [0.5, None]})
    assert Manifest.parse(manifest.encode(), "it") == manifest
    body = json.loads(manifest.encode())
    with pytest.raises(DamagedCheckpointError):
        Manifest.parse(json.dumps({**body, "timings": timings}).encode(), "it")
