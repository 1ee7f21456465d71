"""Broadcasts of weights of every kind, from the first rank of a job to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from asyncckpt.errors import CheckpointError
from asyncckpt.weights.broadcast.broadcast import broadcast_weights
from asyncckpt.weights.broadcast.sender import Broadcast

BUCKET = 4096


SOON_S = 20.0


def odd_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of every kind."""
    dice = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice)

    flat = some(3000)
    return {
        "odd bf16": some(3).bfloat16(),
        "fp32 after it": some(5),
        "no dimension": some(),
        "nothing": torch.empty(0, 4),
        "large": some(50, 70),
        "large, turned": some(60, 40).T,
        "bool": some(7) > 0,
        "complex": torch.complex(some(4), some(4)),
        "conjugate": torch.complex(some(4), some(4)).conj(),
        "conjugate, large": torch.complex(some(40, 50), some(40, 50)).conj(),
        "negative": torch.complex(some(4), some(4)).conj().imag,
        "fp8": some(33).to(torch.float8_e4m3fn),
        "fp8, every other": some(34).to(torch.float8_e5m2)[::2],
        "every other": some(20, 20)[::2, ::3],
        "expanded": some(1, 3).expand(4, 3),
        "int64": torch.arange(9),
        "double": some(2, 2).double(),
        **{f"side by side {number}": flat[number * 300 : (number + 1) * 300] for number in range(10)},
        "parameter": torch.nn.Parameter(some(6)),
        "last, ünïcode": some(1),
    }


def plain(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in weights.items()}


class Taken(dict[str, torch.Tensor]):
    """A ``load`` that keeps copies."""

    def __call__(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in bucket:
            assert tensor.data_ptr() % tensor.element_size() == 0
            self[name] = tensor.clone()


def told(call: Callable[[], object]) -> tuple[str, str, int | None]:
    """The error that it raises."""
    try:
        call()
    except CheckpointError as error:
        return type(error).__name__, error.message, error.rank
    raise AssertionError("it has raised nothing")


def share(weights: Any, load: Any = None, **options: Any) -> Broadcast:
    """The first rank sends, the others load."""
    options = {"timeout": SOON_S, "bucket_bytes": BUCKET} | options
    if dist.get_rank() == 0:
        return broadcast_weights(weights() if callable(weights) else weights, **options)
    return broadcast_weights(load=load, timeout=options["timeout"], group=options.get("group"))
