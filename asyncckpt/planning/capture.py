"""Capture: how the planned values are taken out of a state dict on each save.

For DCP's default planner the structure is compared with the planned one and the values are picked by position. A
planner of the user's own is asked anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.objects import Raw
from asyncckpt.planning.structure import PLAIN, Structure, StructureChanged, has_no_bytes, picker

_spec, _local_tensor = attrgetter("_spec"), attrgetter("_local_tensor")

Values = tuple[Sequence[torch.Tensor], Sequence[Any]]
"""The tensors and the objects of a state, in the order of the layout."""


class Capture(Protocol):
    """Takes the planned values out of a state dict."""

    def take(self, state_dict: Mapping[str, Any], planner: SavePlanner | None) -> Values:
        """The values of ``state_dict``, not copied; ``planner`` is the user's for this save. Raises
        ``StructureChanged`` if they are not as planned.
        """


class FlatCapture:
    """For DCP's default planner: the structure is compared, the values are picked by position."""

    def __init__(
        self, state_dict: Mapping[str, Any], flat: Mapping[str, Any], nested: bool, items: Sequence[WriteItem]
    ) -> None:
        """Learn where the values are.

        Args:
            state_dict: The state that was planned.
            flat: Its values by their names, as DCP flattened it.
            nested: Whether DCP went into nested containers for that.
            items: The items of this rank's final plan.
        """
        self._structure = Structure(state_dict, nested)
        leaves = self._structure.leaves(state_dict)
        if len(leaves) != len(flat) or any(one is not other for one, other in zip(leaves, flat.values(), strict=True)):
            raise UnsavableStateError("DCP flattens this state dict in an order of its own: please report this")
        position = {name: number for number, name in enumerate(flat)}
        tensor_at, object_at = ([position[item.index.fqn] for item in its] for its in split_items(items))
        self._pick_tensors, self._pick_objects = picker(tensor_at), picker(object_at)
        self._types = list(map(type, leaves))
        self._opaque_at = {at for at in object_at if isinstance(leaves[at], torch.Tensor)}
        # DTensors, by their place among the tensors: their local bytes are stored, their spec is part of the structure.
        self._sharded = [number for number, at in enumerate(tensor_at) if isinstance(leaves[at], DTensor)]
        self._pick_sharded = picker(self._sharded)
        self._specs = [_spec(leaves[tensor_at[number]]) for number in self._sharded]

    def take(self, state_dict: Mapping[str, Any], planner: SavePlanner | None) -> Values:
        leaves = self._structure.leaves(state_dict)
        types = list(map(type, leaves))
        if types != self._types:
            self._check_types(types)
        if not all(is_opaque(leaves[at]) for at in self._opaque_at):
            raise StructureChanged("a tensor has plain bytes now, and had none")
        tensors = list(self._pick_tensors(leaves))
        if self._sharded:
            sharded = self._pick_sharded(tensors)
            if list(map(_spec, sharded)) != self._specs:  # in C, and at a glance where they are the same objects
                raise StructureChanged("a DTensor is placed differently")
            for number, local in zip(self._sharded, map(_local_tensor, sharded), strict=True):
                # A collective may still be filling it.
                tensors[number] = local.wait() if type(local) is not torch.Tensor and hasattr(local, "wait") else local
        return tensors, self._pick_objects(leaves)

    def _check_types(self, types: Sequence[type]) -> None:
        """An object may become one of another type; a tensor that comes or goes is another structure."""
        for old, new in zip(self._types, types, strict=True):
            if old is not new and (issubclass(old, torch.Tensor) or issubclass(new, torch.Tensor)):
                raise StructureChanged(f"a {old.__name__} is now a {new.__name__}")


class PlannerCapture:
    """For a planner of the user's own, or values that only DCP can take apart: it is asked anew on every save."""

    def __init__(self, planner: SavePlanner, local: SavePlan, items: Sequence[WriteItem], is_coordinator: bool) -> None:
        """Keep what was planned.

        Args:
            planner: The planner, for saves that come without one.
            local: What it planned on this rank alone.
            items: The items of this rank's final plan.
            is_coordinator: Whether this is the first rank.
        """
        self._planner = planner
        self._is_coordinator = is_coordinator
        self._local = local
        self._tensor_items, self._object_items = split_items(items)

    def take(self, state_dict: Mapping[str, Any], planner: SavePlanner | None) -> Values:
        planner = planner or self._planner
        planner.set_up_planner(dict(state_dict), StorageMeta(), self._is_coordinator)
        local = planner.create_local_plan()
        if local.items != self._local.items or local.planner_data != self._local.planner_data:
            raise StructureChanged("the planner plans something else now")
        tensors = []
        for item in self._tensor_items:
            tensor = planner.resolve_data(item)
            if not isinstance(tensor, torch.Tensor) or has_no_bytes(tensor):
                raise UnsavableStateError(
                    f"{item.index.fqn!r} has no plain bytes, and its planner does not say how to save it"
                )
            tensors.append(tensor.detach())
        values = []
        for item in self._object_items:
            buffer = planner.resolve_data(item)
            if isinstance(buffer, torch.Tensor):
                raise UnsavableStateError(
                    f"the planner planned {item.index.fqn!r} as bytes and resolved it to a tensor"
                )
            values.append(Raw(buffer.getbuffer()))
        return tensors, values


class Opaque:
    """Stands for a tensor without plain bytes while DCP plans, so that DCP takes it for an object."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ``UnsavableStateError`` for a ``tensor`` that cannot be an object either."""
        if tensor.device.type == "meta":
            raise UnsavableStateError(
                f"{name!r} is on the meta device and has no values to save; materialise it first, or leave it out"
            )
        if tensor.is_nested and tensor.layout == torch.strided:
            raise UnsavableStateError(
                f"{name!r} is a nested tensor of strided layout, which torch cannot reload; use layout=torch.jagged"
            )


def is_opaque(value: object) -> bool:
    """Whether ``value`` is a tensor that has no plain bytes of its own: sparse, quantised, a subclass, without data."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return type(value) not in PLAIN or has_no_bytes(value)


def split_items(items: Sequence[WriteItem]) -> tuple[list[WriteItem], list[WriteItem]]:
    """Those for tensors, and those for objects."""
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    return [item for item in items if item.type != WriteItemType.BYTE_IO], objects
