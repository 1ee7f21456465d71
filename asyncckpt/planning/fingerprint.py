"""What of the tensors must be as it was planned: their dtypes, shapes, layouts, and which of them share their bytes.

It is looked at on every save, so it is one pass over all tensors, in C, that keeps nothing: 0.25 us a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, eq
from typing import Any

import torch

from asyncckpt.planning.structure import StructureChanged

_form = attrgetter("dtype", "shape", "layout")


class Fingerprint:
    """The fingerprint of a list of strided tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], aliases: Sequence[tuple[int, int]]) -> None:
        """``aliases``: pairs of positions whose tensors are the same bytes in the same form."""
        self._forms = list(map(_form, tensors))
        self._aliases = aliases

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ``StructureChanged`` unless ``tensors`` have this fingerprint too."""
        if not all(map(eq, map(_form, tensors), self._forms)):
            raise StructureChanged("a tensor's dtype, shape or layout changed")
        for one, other in self._aliases:
            if alias_key(tensors[one]) != alias_key(tensors[other]):
                raise StructureChanged("two tensors that were one are two now")


def alias_key(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Equal for tensors that are the same memory in the same form; None where there are no bytes to share."""
    if tensor.numel() == 0:
        return None
    form = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *form)
