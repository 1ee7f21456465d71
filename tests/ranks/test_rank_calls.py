"""Calls that differ between ranks raise on all ranks, and the error names the call of each rank."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import CONSTANT, QUICK, run
from support.states import equal, replicas
from torch.distributed.checkpoint.metadata import Metadata

import asyncckpt
from asyncckpt import Checkpointer
from asyncckpt.engine import shared as engines
from asyncckpt.errors import CheckpointError
from asyncckpt.integrations import dcp
from asyncckpt.loading import dcp_reader

pytestmark = pytest.mark.usefixtures("forkserver")


def _told(call: Any) -> tuple[str, str]:
    try:
        call()
    except CheckpointError as error:
        return type(error).__name__, error.message
    return "nothing", ""


def _save_other_steps(root: str, constant: bool) -> tuple[Any, ...]:
    rank = dist.get_rank()
    with Checkpointer(root, CONSTANT if constant else QUICK) as checkpointer:
        checkpointer.prepare(replicas(1))
        told = _told(lambda: checkpointer.save(3 + rank, replicas(1)).result(60))
        dist.barrier()
        checkpointer.save(7, replicas(7)).result(60)
        return told, checkpointer.steps()


@pytest.mark.parametrize("constant", [False, True])
def test_other_steps_are_saved_by_none(root: Path, tmp_path: Path, constant: bool) -> None:
    said = "rank 0 saves step 3, and rank 1 saves step 4"
    for (kind, text), steps in run(2, _save_other_steps, str(root), constant, folder=tmp_path):
        assert kind == "RankFailedError" and said in text and "the same calls" in text and steps == [7]
    assert [path.name for path in root.iterdir() if ".partial" in path.name] == []


def _save_while_another_prepares(root: str) -> tuple[str, str]:
    with Checkpointer(root, QUICK) as checkpointer:
        state = replicas(1)
        told = _told(lambda: checkpointer.prepare(state) if dist.get_rank() == 0 else checkpointer.save(1, state))
        dist.barrier()  # the first rank's worker stays until both ranks have the error
        return told


def test_one_prepares_and_another_saves(root: Path, tmp_path: Path) -> None:
    for kind, text in run(2, _save_while_another_prepares, str(root), folder=tmp_path):
        assert kind == "RankFailedError" and "rank 0 prepares a save, and rank 1 saves step 1" in text


def _save_elsewhere(root: str) -> tuple[str, str]:
    save = dcp.async_save
    try:
        told = _told(lambda: save(replicas(1), checkpoint_id=f"{root}/at-{dist.get_rank()}").result(60))
        dist.barrier()  # the first rank's worker stays until both ranks have the error
        return told
    finally:
        engines.shared.close()


def test_other_folders_are_named(root: Path, tmp_path: Path) -> None:
    for kind, text in run(2, _save_elsewhere, str(root), folder=tmp_path):
        assert kind == "RankFailedError" and f"rank 0 saves to {root}/at-0, and rank 1 saves to {root}/at-1" in text


def _load_other_steps(root: str, memory: bool) -> tuple[Any, ...]:
    rank = dist.get_rank()
    with Checkpointer(root, QUICK) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, replicas(step)).result(60)
        into = replicas(9)
        other = _told(lambda: checkpointer.load(into, step=1 + rank, memory=memory))
        one = _told(lambda: checkpointer.load(into, step=None if rank else 1, memory=memory))
        untouched = equal(into, replicas(9))
        return other, one, untouched, checkpointer.load(into, step=1, memory=memory), equal(into, replicas(1))


@pytest.mark.parametrize("memory", [True, False])
def test_other_steps_are_loaded_by_none(root: Path, tmp_path: Path, memory: bool) -> None:
    other = ("RankFailedError", "rank 0 loads step 1, and rank 1 loads step 2")
    one = ("RankFailedError", "rank 0 loads step 1, and rank 1 loads the newest step")
    for found in run(2, _load_other_steps, str(root), memory, folder=tmp_path):
        for (kind, text), (expected, said) in zip(found[:2], (other, one), strict=True):
            assert kind == expected and said in text
        assert found[2:] == (True, 1, True)


def _save_and_remove(folder: str) -> int:
    """Remove the checkpoint on the first rank when its save returns, while the other rank reads its metadata slowly."""
    real = dcp_reader.CheckpointReader.read_metadata

    def slow(self: dcp_reader.CheckpointReader, *args: Any) -> Metadata:
        time.sleep(1.0)
        return real(self, *args)

    if dist.get_rank() == 1:
        dcp_reader.CheckpointReader.read_metadata = slow  # type: ignore[method-assign]  # in a process of its own
    metadata = asyncckpt.save({"weight": torch.ones(10)}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return len(metadata.state_dict_metadata)


def test_no_rank_returns_from_a_save_that_another_still_reads(tmp_path: Path) -> None:
    assert run(2, _save_and_remove, str(tmp_path / "checkpoint"), folder=tmp_path) == [1, 1]
