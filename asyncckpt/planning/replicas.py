"""Values that several ranks have under one name: DCP takes them for replicas, and saves one of them for all."""

from __future__ import annotations

import hashlib
import logging
import marshal
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

# Whose bytes are compared. What is larger is a weight, or what is made of one, and copying it from a device takes time.
_SMALL_BYTES = 64 << 10
_SHOWN = 5


def digests(items: Sequence[WriteItem], values: Mapping[str, Any]) -> array[int]:
    """A number for the value of each of ``items``: equal for equal ones. 0 where that is not looked at."""
    return array("Q", (_digest(values.get(item.index.fqn)) for item in items))


def _digest(value: object) -> int:
    if isinstance(value, DTensor):
        return 0
    if isinstance(value, torch.Tensor):
        said: Any = (str(value.dtype), tuple(value.shape), _bytes(value))
    else:
        said = value
    try:
        # The version before it noted which objects are one, which says nothing of their values.
        return int.from_bytes(hashlib.blake2b(marshal.dumps(said, 2), digest_size=8).digest(), "little") or 1
    except ValueError:  # an object of some class, or deeply nested
        return 0


def _bytes(tensor: torch.Tensor) -> bytes:
    """Those of a small tensor that is no weight: floating-point ones may differ a little, as statistics of batches."""
    is_looked_at = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout == torch.strided
    if not is_looked_at or tensor.is_floating_point() or tensor.is_complex() or tensor.nbytes > _SMALL_BYTES:
        return b""
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def warn_differing(plans: Sequence[SavePlan], digests: Sequence[array[int]]) -> None:
    """Log the names under which ranks have different values, of which only one will be saved.

    Args:
        plans: Those of all ranks, before it is decided who saves what.
        digests: Those of their items.
    """
    found: dict[str, dict[int, list[int]]] = {}
    for rank, (plan, mine) in enumerate(zip(plans, digests, strict=True)):
        if rank and mine == digests[0]:
            continue  # as on nearly all ranks of nearly all jobs
        for item, digest in zip(plan.items, mine, strict=True):
            if digest:
                found.setdefault(item.index.fqn, {}).setdefault(digest, []).append(rank)
    differing = {name: by_digest for name, by_digest in found.items() if len(by_digest) > 1}
    if differing:
        shown = ", ".join(f"{name!r} ({_ranks(by_digest)})" for name, by_digest in list(differing.items())[:_SHOWN])
        more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        logger.warning(
            "%d values differ from rank to rank, and of each only one is saved, which every rank will load: %s%s; wrap"
            " what is of each rank's own in asyncckpt.PerRank",
            len(differing),
            shown,
            more,
        )


def _ranks(by_digest: Mapping[int, list[int]]) -> str:
    """Two ranks that differ."""
    one, other, *_ = (ranks[0] for ranks in by_digest.values())
    return f"ranks {one} and {other}"
