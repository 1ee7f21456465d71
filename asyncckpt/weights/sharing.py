"""Who publishes: a process alone, or the ranks of a group together, each the part it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncckpt.errors import UnsavableStateError
from asyncckpt.structure import PLAIN, has_no_bytes
from asyncckpt.weights.image import Form

T = TypeVar("T")


class Sharing:
    """What of the weights this process publishes. ``rank`` of ``ranks``."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        """``process_group``: those that publish together; None: this process alone."""
        self._process_group = process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.ranks = 1 if process_group is None else dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group it should publish with")

    def gather(self, value: T) -> list[T]:
        """What each rank has, in their order."""
        values: list[Any] = [value] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(values, value, group=self._process_group)
        return values

    def own(self, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Those tensors of a state dict that this rank publishes, by name; nested ones by their path, with dots.

        What is replicated the first rank that has it publishes for all. What is no tensor is left out.
        """
        if any(isinstance(value, (Mapping, list)) for value in weights.values()):
            weights = flatten_state_dict(dict(weights))[0]
        return {
            name: value for name, value in weights.items() if isinstance(value, torch.Tensor) and self._is_own(value)
        }

    def form(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> Form:
        """What is published of ``tensor``, which is this rank's own; as ``dtype``, if it is of floating point.

        Raises ``UnsavableStateError``.
        """
        shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            if any(isinstance(placement, Partial) for placement in tensor.placements):
                raise UnsavableStateError(f"{name!r} is a sum that is still to be taken over its ranks")
            shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            if self.ranks == 1 and tuple(shape) != tuple(tensor.shape):
                raise UnsavableStateError(
                    f"{name!r} is sharded over ranks, and this publisher is of one process: give it the process group"
                )
        elif type(tensor) not in PLAIN or has_no_bytes(tensor):
            raise UnsavableStateError(f"{name!r} is a {type(tensor).__name__} that has no plain bytes to publish")
        # What is of eight bits has scales beside it, and means nothing without them.
        converts = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
        published = dtype if converts and dtype is not None else tensor.dtype
        return Form(name, published, tuple(shape), tuple(offsets), tuple(tensor.shape))

    def _is_own(self, tensor: torch.Tensor) -> bool:
        if self.ranks == 1 or not isinstance(tensor, DTensor):
            return self.rank == 0
        coordinate = tensor.device_mesh.get_coordinate()
        return coordinate is not None and not any(
            isinstance(placement, Replicate) and at for placement, at in zip(tensor.placements, coordinate, strict=True)
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of it that this process has."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part: Any = tensor.to_local()
    bytes_here: torch.Tensor = part.wait() if hasattr(part, "wait") else part  # a collective may be filling it
    return bytes_here.detach()
