"""Conversions during a load: a stored tensor and the tensor to fill may have different dtypes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import islice

import torch

from asyncckpt.planning.structure import PLAIN

logger = logging.getLogger(__name__)

_INTEGERS = frozenset(
    {*(torch.int8, torch.int16, torch.int32, torch.int64), *(torch.uint8, torch.uint16, torch.uint32, torch.uint64)}
)


def is_lossy(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a conversion loses more than digits: float to integer, complex to real, smaller integers."""
    if stored in _INTEGERS and wanted in _INTEGERS:
        has, takes = torch.iinfo(stored), torch.iinfo(wanted)
        return has.min < takes.min or has.max > takes.max
    return not torch.can_cast(stored, wanted)


def copy_converted(into: torch.Tensor, stored: torch.Tensor) -> int:
    """Copy ``stored`` into a tensor of the same shape. Return the number of values that the other dtype cannot hold."""
    into.copy_(stored)
    if into.dtype == stored.dtype or type(into) not in PLAIN or not (into.is_floating_point() or into.is_complex()):
        return 0
    limits = torch.finfo(into.dtype)
    # Values below this limit are rounded to the largest finite value; values from the limit on are out of range.
    limit = limits.max + limits.eps * 2.0 ** (math.frexp(limits.max)[1] - 2)
    source, found = _real(stored), _real(into)
    if into.is_complex() and not stored.is_complex():
        found = found[..., 0]
    beyond = source.abs() >= limit
    if limits.min > 0:  # a dtype without a sign
        beyond |= source < 0
    if not beyond.any():
        return 0
    return int((source[beyond].double() != found.to(source.device)[beyond].double()).sum())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as real numbers, in a dtype that can be compared."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def warn_out_of_range(counts: Mapping[str, int], path: str) -> None:
    """Warn about tensors with values out of the range of their dtype, with the count of each tensor."""
    if counts:
        some = ", ".join(f"{name!r} ({count:,})" for name, count in islice(counts.items(), 5))
        logger.warning(
            "%d values of %s are out of the range of the dtype that they were loaded into, and are infinite or other"
            " numbers there: %s%s; load them into the dtype that is stored",
            sum(counts.values()),
            path,
            some,
            f" and {len(counts) - 5} more" if len(counts) > 5 else "",
        )
