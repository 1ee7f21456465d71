"""nvrx's local checkpoints with replicas through our queue. Their functions hold process groups."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.peers import NVRX, peer
from support.ranks import run
from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt.integrations import nvrx

pytestmark = pytest.mark.usefixtures("forkserver")


def _state(iteration: int, rank: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(10 * iteration + rank)), "layers": [torch.arange(5) + rank], "rank": rank}


def _saves_locally(package: str, folder: str) -> None:
    sys.path.insert(0, package)
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

    # nvrx calls CUDA here even if all tensors are on the CPU.
    torch.cuda.synchronize = lambda *_: None
    BasicTensorAwareStateDict.restore_tensor_device = lambda self, non_blocking: None

    rank = dist.get_rank()
    strategy = CliqueReplicationStrategy.from_replication_params(replication_jump=1, replication_factor=2)
    manager = LocalCheckpointManager(folder, repl_strategy=strategy)
    queue = nvrx.AsyncCallsQueue()
    for iteration in (1, 2):
        state = BasicTensorAwareStateDict({})
        state.state_dict = _state(iteration, rank)
        queue.schedule_async_request(manager.save(state, iteration, is_async=True))
        while queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=False)
            time.sleep(0.01)  # a training step
    queue.close()

    assert manager.find_latest() == 2
    loaded, _ = manager.load()
    for held, of in ((loaded.state_dict, rank), (_held(manager, 1 - rank), 1 - rank)):
        expected = _state(2, of)
        assert torch.equal(held["w"], expected["w"]) and torch.equal(held["layers"][0], expected["layers"][0])
        assert held["rank"] == of


def _held(manager: Any, rank: int) -> Any:
    """Return this rank's replica of the newest state of ``rank``."""
    file = Path(manager.local_ckpt_dir) / f"iter_0000002_{rank}_local.pt"
    return torch.load(file, weights_only=False).state_dict


@pytest.mark.parametrize("version", [NVRX[0], NVRX[-1]])
def test_local_checkpoints_are_replicated(tmp_path: Path, version: str) -> None:
    run(2, _saves_locally, peer(version), str(tmp_path / "local"), folder=tmp_path)


def _uses_its_group() -> list[str]:
    group = dist.new_group()

    class Reducer:
        def __init__(self) -> None:
            self.group = group

        def reduce(self) -> None:
            dist.all_reduce(torch.ones(3), group=self.group)

        def size(self) -> None:
            self.group.size()

        def look(self) -> None:
            assert not hasattr(self.group, "__len__") and "trainer" in repr(self.group)

    queue = nvrx.AsyncCallsQueue()
    said = []
    for function in (Reducer().reduce, Reducer().size, Reducer().look):
        queue.schedule_async_request(nvrx.AsyncRequest(function, (), []))
        try:
            queue.maybe_finalize_async_calls(blocking=True)
            said.append("done")
        except CheckpointException as error:
            said.append(str(error.failures[0][0]))
    queue.close()
    return said


def test_a_collective_in_the_background_is_an_error(tmp_path: Path) -> None:
    """Upstream runs the collective in a fork of the trainer, and no other rank answers."""
    for said in run(2, _uses_its_group, folder=tmp_path):
        assert "collective" in said[0] and "a finalize function" in said[0]
        assert "process group" in said[1] and said[2] == "done"
