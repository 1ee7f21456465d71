"""Jobs that start again with plain torch: in the same processes, with other ranks, or by torchrun."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.checkpoints import complete_steps
from support.ranks import QUICK, run
from support.states import equal, replicas

from asyncckpt import Checkpointer, Save
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("forkserver")


def _join(folder: str, name: str, world: int) -> None:
    """Start another job of the first ``world`` ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():
        dist.barrier()  # a rank that is still connecting would wait for ever
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=world)


def _load(checkpointer: Checkpointer) -> tuple[int, str]:
    into = replicas(99)
    step = checkpointer.load(into)
    assert equal(into, replicas(step)) and checkpointer.loaded is not None
    return step, checkpointer.loaded.source


def _end(save: Save) -> str:
    try:
        save.result(30)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "committed"


def _refusals(checkpointer: Checkpointer) -> list[str]:
    said = []
    for call in (lambda: checkpointer.save(9, replicas(9)), lambda: checkpointer.prepare(replicas(9))):
        with pytest.raises(CheckpointError) as caught:
            call()
        said.append(str(caught.value))
    return said


def _one_two_one(root: str, folder: str) -> dict[str, Any]:
    """Run a job of one rank, then of two, then of one, without closing the earlier checkpointers first."""
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", init_method=f"file://{folder}/a", rank=0, world_size=1)
        first = Checkpointer(root, QUICK)
        first.save(1, replicas(1)).result(30)
        left = first.save(2, replicas(2))
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/b", rank=rank, world_size=2)
    if rank == 0:
        found["world"] = _refusals(first)
    second = Checkpointer(root, QUICK)
    found["second"] = _load(second)
    second.save(3, replicas(3)).result(30)
    if rank == 0:
        found["first"] = [_end(left), *_refusals(first)]
    pending = second.save(4, replicas(4))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", init_method=f"file://{folder}/c", rank=0, world_size=1)
        with Checkpointer(root, QUICK) as third:
            found["third"] = _load(third)
            third.save(5, replicas(5)).result(30)
            found["steps"] = third.steps()
        first.close()
    second.close()
    found["pending"] = _end(pending)
    return found


def test_one_rank_then_two_then_one(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    first, other = run(2, _one_two_one, root, str(tmp_path), folder=tmp_path)
    assert first["second"] == other["second"] and first["second"][0] == 2
    assert all("initialised after the first save, or anew since then" in said for said in first["world"])
    assert first["first"][0].split(":")[0] in ("committed", "ClosedError")
    assert all("has taken over: use that" in said for said in first["first"][1:])
    assert first["steps"] in ([1, 2, 3, 5], [1, 2, 3, 4, 5]) and first["third"][0] == first["steps"][-2]
    assert other["pending"] == "committed" if 4 in first["steps"] else other["pending"] != "committed"


def _half_saved(root: str, folder: str, all_save: bool) -> tuple[tuple[int, str], str]:
    """Begin a save on all ranks, or on the first rank alone, and start another job at once."""
    constant = Config(timeout=20, commit_timeout=20, assume_constant_structure=True, slots=2)
    first = Checkpointer(root, constant)
    first.save(1, replicas(1)).result(30)
    end = ""
    pending = first.save(2, replicas(2)) if all_save or dist.get_rank() == 0 else None
    _join(folder, "again", 2)
    with Checkpointer(root, constant) as second:
        loaded = _load(second)
        second.save(3, replicas(3)).result(30)
        if pending is not None:
            end = _end(pending)
        dist.barrier()
    first.close()
    return loaded, end


@pytest.mark.parametrize("all_save", [True, False])
def test_what_all_ranks_had_staged_is_saved_and_nothing_else(tmp_path: Path, all_save: bool) -> None:
    root = str(tmp_path / "root")
    found = run(2, _half_saved, root, str(tmp_path), all_save, folder=tmp_path)
    assert [loaded for loaded, _ in found] == [(2 if all_save else 1, "memory")] * 2
    # "RankFailedError": the other rank started the next job before the first rank did.
    ends = ("committed", "ClosedError") if all_save else ("ClosedError", "RankFailedError")
    assert found[0][1].split(":")[0] in ends
    assert complete_steps(root) == ([1, 2, 3] if all_save else [1, 3])


def _group_is_not_held(root: str) -> tuple[bool, list[int]]:
    """Return whether a destroyed process group is freed while its checkpointer is open."""
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, replicas(1)).result(30)
        _load(checkpointer)
        dist.barrier()
        job = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()
        is_gone = job() is None
        checkpointer.wait(30)
        return is_gone, checkpointer.steps()


def test_no_process_group_is_held(tmp_path: Path) -> None:
    assert run(2, _group_is_not_held, str(tmp_path / "root"), folder=tmp_path) == [(True, [1])] * 2


_TRAINING = """
import os, signal, sys
import torch, torch.distributed as dist
from asyncckpt import Checkpointer

torch.set_num_threads(1)
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# By the launcher's own store gloo sometimes gets no connection when it is started again.
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.{restarts}", rank=rank, world_size=2)
state = {"w": torch.zeros(1000), "step": 0}
with Checkpointer(sys.argv[1]) as checkpointer:
    first = 1
    if checkpointer.latest() is not None:
        first = checkpointer.load(state) + 1
        assert bool((state["w"] == first - 1).all()) and state["step"] == first - 1
        if rank == 0:
            print("loaded", first - 1, checkpointer.loaded.source, flush=True)
    for step in range(first, first + 3):
        state["w"].fill_(step)
        state["step"] = step
        save = checkpointer.save(step, state)
    if restarts < 2 and rank == restarts:
        save.result(60)
        os.kill(os.getpid(), signal.SIGKILL)
    if restarts < 2:
        signal.pause()  # the launcher ends this
dist.destroy_process_group()
"""


def test_torchrun_starts_it_again(tmp_path: Path) -> None:
    """torchrun restarts the job twice, in new processes each time."""
    script, root = tmp_path / "train.py", tmp_path / "root"
    script.write_text(_TRAINING)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    done = subprocess.run(
        [sys.executable, *command, "--monitor-interval=0.1", str(script), str(root)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    loaded = [line.split() for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert loaded == [["loaded", "3", "memory"], ["loaded", "6", "memory"]]
    assert complete_steps(str(root)) == list(range(1, 10))
