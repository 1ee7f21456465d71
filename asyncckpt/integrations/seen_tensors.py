"""Tensors that were given to a function that saves, and are copied later: whether they are still what they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils import _pytree as pytree


class SeenTensors:
    """Those in dicts and lists; what hides in other objects is not looked at."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
        self._elements: list[tuple[str, Sequence[torch.Tensor], Sequence[torch.Tensor]]] = []

    def add(self, name: str, value: object) -> None:
        """``value`` is to be saved as ``name``."""
        tensors = [_local(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        tensors = [each for each in tensors if each.layout == torch.strided and each.numel() and not each.is_meta]
        self._seen += [(name, tensor, _form(tensor)) for tensor in tensors]
        # Changes through ``.data`` are not counted. Of all of them: who merges adapters changes some kinds alone.
        self._elements.append((name, tensors, _first_elements(tensors)))

    def changed(self) -> list[str]:
        """The names of those that have other values, or may have, than when they were added."""
        names = [name for name, tensor, form in self._seen if _form(tensor) != form]
        names += [
            name
            for name, tensors, elements in self._elements
            if not all(map(torch.equal, _first_elements(tensors), elements))
        ]
        return list(dict.fromkeys(names))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local


def _form(tensor: torch.Tensor) -> tuple[int, int]:
    """Where it is, and how often it was changed in place."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _first_elements(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes of the first element of each, together for all of one device: a device is to be asked once."""
    found: dict[tuple[torch.device, type], list[torch.Tensor]] = {}
    for tensor in tensors:
        first = tensor.detach()[(0,) * tensor.dim()]
        # To view the bytes of a quantized tensor ends the process, and of a conjugate view it is refused.
        first = first.int_repr() if first.is_quantized else first.resolve_conj().resolve_neg()
        first = first.reshape(1).view(torch.uint8)
        found.setdefault((first.device, type(first)), []).append(first)
    return [torch.cat(each) if len(each) > 1 else each[0].clone() for each in found.values()]
