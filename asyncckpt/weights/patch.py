"""The changes between two versions: find them in the published bytes, and apply them to the tensors of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from asyncckpt.errors import MismatchError
from asyncckpt.weights.layout import INTEGERS


class Change(NamedTuple):
    """The changed elements of one tensor."""

    name: str
    """The name of the tensor."""
    shape: tuple[int, ...]
    """The shape of the tensor."""
    indices: torch.Tensor | None
    """The flat indices of the changed elements, in rising order. None if ``values`` is the whole tensor."""
    values: torch.Tensor
    """The new elements."""


def change_of(name: str, old: torch.Tensor, new: torch.Tensor) -> Change | None:
    """Return the change from ``old`` to ``new``, which have the same shape and dtype; None if no byte differs.

    The change has the whole tensor if more than a third of the elements differ.
    """
    whole = Change(name, tuple(new.shape), None, new)
    if (integer := INTEGERS.get(new.dtype.itemsize)) is None:
        return whole
    flat = new.reshape(-1).view(integer)
    indices = torch.nonzero(flat != old.reshape(-1).view(integer)).view(-1)
    if len(indices) > len(flat) // 3:
        return whole
    return whole._replace(indices=indices, values=flat[indices].view(new.dtype)) if len(indices) else None


@torch.no_grad()
def apply(tensors: torch.nn.Module | Mapping[str, torch.Tensor], patch: Iterable[Change]) -> None:
    """Change tensors in place, on their devices, from one version to another.

    Args:
        tensors: A module, or its tensors by name, with the values of the version that the patch is based on.
        patch: The changes, from ``Weights.patch``.

    Raises:
        MismatchError: A tensor is missing, not contiguous, or has another shape or dtype than the published tensor.
            Other tensors may have changed already, so load the whole version.
    """
    held = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
    for name, shape, indices, values in patch:
        target = held.get(name)
        if target is None or (tuple(target.shape), target.dtype) != (shape, values.dtype) or not target.is_contiguous():
            raise MismatchError(
                f"no contiguous tensor {name!r} of shape {shape} and dtype {values.dtype} to apply the changes to: load"
                " the whole version, because some tensors may have changed already"
            )
        integer = INTEGERS.get(values.dtype.itemsize, values.dtype)
        flat, new = target.view(-1).view(integer), values.reshape(-1).view(integer).to(target.device)
        if indices is None:
            flat.copy_(new)
        else:
            flat[indices.to(target.device)] = new
