"""Tensors that were given to a function that saves, and are copied later: whether they are still what they were."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

# So many tensors of a file, or a few more, are looked at by an element of each.
_SAMPLES = 64


class SeenTensors:
    """Those in dicts and lists; what hides in other objects is not looked at."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
        self._samples: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def add(self, name: str, value: object) -> None:
        """``value`` is to be saved as ``name``."""
        tensors = [_local(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor in tensors if tensor.layout == torch.strided and tensor.numel()]
        self._seen += [(name, tensor, _form(tensor)) for tensor in tensors]
        # Changes through ``.data`` are not counted; but whoever puts other weights in the place of these changes all.
        chosen = tensors[:: max(1, len(tensors) // _SAMPLES)]
        self._samples += [(name, tensor, _first(tensor).clone()) for tensor in chosen]

    def changed(self) -> list[str]:
        """The names of those that have other values, or may have, than when they were added."""
        names = [name for name, tensor, form in self._seen if _form(tensor) != form]
        names += [name for name, tensor, first in self._samples if not _is_same(_first(tensor), first)]
        return list(dict.fromkeys(names))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local


def _form(tensor: torch.Tensor) -> tuple[int, int]:
    """Where it is, and how often it was changed in place."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[(0,) * tensor.dim()].reshape(1)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
