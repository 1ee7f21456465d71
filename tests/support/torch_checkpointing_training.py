"""Managers of torch_checkpointing and a small training, for a process with torch_checkpointing on its path."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch_checkpointing as theirs
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from asyncckpt.integrations.torch_checkpointing import CheckpointManager


def _gathered(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Gather without CUDA, which the method of 0.1.1 needs."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


DefaultMetadataManager._all_gather_pickled_data = _gathered  # type: ignore[assignment, method-assign]


def manager(*, ours: bool, **options: Any) -> Any:
    """Return our manager or the stock manager. The item "model" can be resharded."""
    made = CheckpointManager if ours else theirs.CheckpointManager
    items = {"model": theirs.ItemSpec(resharder=DefaultResharder())}
    storage = LocalFileSystemStorageConfig(use_direct_io=False)  # direct I/O of 0.1.1 fails on some file systems
    return made.Config(**{"items": items, "storage_config": storage, **options}).build()


class Training:
    """A model on all ranks. The ranks train on different data, and average their gradients."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state(self, step: int) -> dict[str, Any]:
        """Return the items of a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}

    def load(self, manager: Any, path: str) -> int:
        """Load a checkpoint, and return its step."""
        loaded = manager.load(path, into={"model": self.model.state_dict(), "optimizer": None, "step": None})
        self.optimizer.load_state_dict(loaded["optimizer"])
        return int(loaded["step"])

    def train(self, step: int) -> float:
        """Do one step, and return its loss."""
        torch.manual_seed(100 * step + dist.get_rank())
        loss = self.model(torch.randn(2, 16)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return float(loss)
