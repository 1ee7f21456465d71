"""Checkpoints with shards of any shape, like stock DCP's checkpoints of many ranks, but made by one process."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Cuts = Sequence[Sequence[int]]
"""The offsets of the cuts in each dimension. Dimensions that are left out are not cut."""


class ShardPlanner(DefaultSavePlanner):
    """Plans shards for the tensors that ``cuts`` names, and all other items as DCP does."""

    def __init__(self, cuts: Mapping[str, Cuts]) -> None:
        super().__init__()
        self._cuts = cuts
        self._shards: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            its = self._items(item.index.fqn) if item.index.fqn in self._cuts else [item]
            items += its
        return SavePlan(items, planner_data=plan.planner_data)

    def resolve_data(self, write_item: WriteItem) -> Any:
        offsets = tuple(write_item.index.offset or ())
        shard = self._shards.get((write_item.index.fqn, offsets))
        return super().resolve_data(write_item) if shard is None else shard

    def _items(self, name: str) -> Iterator[WriteItem]:
        tensor = self.state_dict[name]
        for offsets, shard in shards(tensor, self._cuts[name]):
            self._shards[name, offsets] = shard
            chunk = ChunkStorageMetadata(torch.Size(offsets), shard.size())
            yield WriteItem(
                MetadataIndex(name, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size()),
            )


def shards(tensor: torch.Tensor, cuts: Cuts) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the parts of a tensor with their offsets."""
    given = [*cuts, *([()] * tensor.ndim)][: tensor.ndim]
    edges = [sorted({0, *its, n}) if n else [0, 0] for its, n in zip(given, tensor.shape, strict=True)]
    for begins in itertools.product(*(list(itertools.pairwise(its)) for its in edges)):
        part = tensor[tuple(slice(*each) for each in begins)] if tensor.ndim else tensor
        yield tuple(begin for begin, _ in begins), part.contiguous()


def save_shards(state: dict[str, Any], path: Path, cuts: Mapping[str, Cuts], files: int = 1) -> None:
    """Save with stock DCP and these cuts to ``files`` data files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about a single process
        writer = FileSystemWriter(path, thread_count=files)
        state_dict_saver.save(state, storage_writer=writer, planner=ShardPlanner(cuts))


def kinds_of_values() -> dict[str, Any]:
    """Return a nested state with values of every kind. Two of its tensors are tied."""
    weight = torch.randn(30, 70)
    model = {
        "weight": weight,
        "tied": weight,
        "bias": torch.randn(33).to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "half": torch.randn(5, dtype=torch.float16),
        "double": torch.randn(2, 3, dtype=torch.float64),
        "integers": torch.arange(100),
        "small": torch.arange(7, dtype=torch.int8),
        "mask": torch.tensor([True, False]),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
        "complex": torch.randn(5, dtype=torch.complex64),
        "empty": torch.empty(0, 4),
        "third": torch.randn(2, 3, 4),
    }
    optimizer = {"state": [{"exp_avg": torch.randn(30, 70)}, {"step": torch.tensor(2.0)}], "groups": [{"lr": 1e-3}]}
    return {"model": model, "optimizer": optimizer, "step": 7, "betas": (0.9, 0.95)}
