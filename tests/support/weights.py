"""Weights to publish: small models of a known version, whole and sharded over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from asyncckpt.weights import Weights, WeightSubscriber


def whole(step: int) -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(70.0).reshape(10, 7) + step,
        "columns": torch.arange(60.0).reshape(6, 10) * step,
        "uneven": torch.arange(5.0) - step,
        "same": torch.full((4,), float(step)),
        "plain": torch.tensor([float(step)]),
    }


def sharded(step: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements: dict[str, list[Placement]] = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "uneven": [Shard(0)],
        "same": [Replicate()],
    }
    weights = whole(step)
    for name, placement in placements.items():
        weights[name] = distribute_tensor(weights[name], mesh, placement)
    return weights


def reads(subscriber: WeightSubscriber, step: int) -> bool:
    with subscriber, subscriber.acquire() as weights:
        right = all(torch.equal(weights[name], tensor) for name, tensor in whole(step).items())
        return right and len(weights) == len(whole(step)) and weights.version == step


def model(version: int = 0) -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.full((300, 200), float(version)),
        "norm.weight": torch.full((7,), float(version), dtype=torch.bfloat16),  # an odd number of two-byte values
        "steps": torch.tensor(version),
    }


def version_in(weights: Weights) -> int:
    """Return the version that all elements have."""
    seen = {float(value) for tensor in weights.values() for value in tensor.flatten().tolist()}
    (found,) = seen
    return int(found)
