"""The plan of a folder of DCP: the place of each value of a state dict. ``draft.py`` makes one plan for each structure.

A later save only captures: it checks that the state still has the planned structure, and returns the tensors in the
order of the layout. With DCP's default planner, tensors are picked by position. A user's own planner runs on each save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError
from asyncckpt.format.segment_layout import DataFile, Region
from asyncckpt.planning.frozen import frozen_parameters
from asyncckpt.planning.layout import DataLayout, PlannedFile
from asyncckpt.planning.metadata import flat_names, options
from asyncckpt.planning.objects import Raw, StoredObjects
from asyncckpt.planning.part_plan import PartPlan
from asyncckpt.planning.replicas import Replicas
from asyncckpt.planning.structure import (
    PLAIN,
    Fingerprint,
    StateDict,
    Structure,
    StructureChanged,
    has_no_bytes,
    leaf_keys,
    picker,
    plain_part,
    stateful_to_dict,
    stateful_types,
)
from asyncckpt.threads import without_gc

_spec, _local_tensor = attrgetter("_spec"), attrgetter("_local_tensor")


@dataclass(frozen=True)
class DcpFolder:
    """A folder with a state dict, as ``torch.distributed.checkpoint.save`` writes it.

    ``given``: this rank's part of the state dict, with ``Stateful`` values. ``planner``: DCP's or the user's; None:
    DCP's default planner. ``separate``: a prefix of names; values with the prefix are stored in a file of their own;
    "": no prefix.
    """

    given: StateDict
    planner: SavePlanner | None = None
    separate: str = ""

    @cached_property
    def state(self) -> StateDict:
        """The state dict, with each ``Stateful`` value replaced by its state."""
        return stateful_to_dict(self.given)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of the frozen parameters of modules."""
        return frozen_parameters(self.given)

    @property
    def key(self) -> Any:
        """A key that is equal for folders with equal planning options."""
        if self.planner is None or type(self.planner) is DefaultSavePlanner:
            return *options(self.planner or DefaultSavePlanner()).values(), self.separate
        return type(self.planner), self.separate

    @property
    def names(self) -> frozenset[str]:
        """The names of the values, as DCP's default planner gives them."""
        return flat_names(self.state, self.planner)


@dataclass
class DcpPlan(PartPlan):
    """The layout of states of one structure, and the bytes of the files that are the same in every save.

    ``metadata`` is DCP's metadata on the first rank, and empty on all others. ``frozen``: the names of the parameters
    that were frozen in modules of the state when the plan was made.
    """

    layout: DataLayout
    objects: StoredObjects
    fingerprint: Fingerprint
    values: FlatCapture | PlannerCapture
    names: frozenset[str]
    planned: Sequence[PlannedFile]
    compared: Replicas
    frozen: frozenset[str] = frozenset()
    metadata: bytes = b""

    @property
    def devices(self) -> object | None:
        return self.fingerprint.devices

    def capture(self, content: DcpFolder, *, is_raw: bool = False) -> Sequence[torch.Tensor]:
        state = content.given if is_raw else content.state
        tensors, objects = self.values.take(state, content.planner, is_raw=is_raw)
        self.fingerprint.check(tensors)
        self.objects.refresh(objects)
        return tensors

    def replicas(self, content: DcpFolder, number: int) -> Iterable[tuple[str, object]]:
        return self.compared.values(lambda: content.state, number)

    def note_end(self, *, is_committed: bool) -> None:
        self.compared.on_end(is_committed=is_committed)

    def constants(self, name: str) -> dict[str, bytes | memoryview]:
        constants: dict[str, bytes | memoryview] = {"metadata": self.metadata}
        for number, file in enumerate(self.planned):
            constants |= {f"index_head {number}": file.index_head, f"spans {number}": memoryview(file.spans).cast("B")}
        return constants

    def files(self, name: str, begin: int, regions: Mapping[str, Region]) -> Sequence[DataFile]:
        return [
            DataFile(
                begin=begin + file.begin,
                nbytes=file.nbytes,
                length=file.spans[-1],
                index_head=regions[f"index_head {number}"],
                spans=regions[f"spans {number}"],
                number=number,
                prefix=file.prefix,
                folder=name,
                is_frozen=file.is_frozen,
            )
            for number, file in enumerate(self.planned)
        ]


class FlatCapture:
    """Captures values as DCP's default planner would: compares the structure, then picks the values by position."""

    def __init__(
        self, state_dict: StateDict, flat: Mapping[str, Any], nested: bool, items: Sequence[WriteItem]
    ) -> None:
        """Learn where the values are.

        Args:
            state_dict: The state that was planned.
            flat: The values of the state by name, as DCP flattened the state.
            nested: Whether DCP flattened nested containers.
            items: The items of this rank's final plan.
        """
        self._structure = Structure(state_dict, nested)
        leaves = self._structure.leaves(state_dict)
        if len(leaves) != len(flat) or any(one is not other for one, other in zip(leaves, flat.values(), strict=True)):
            # A mapping may make new values on every access. Then only the names tell the order.
            keys = leaf_keys(state_dict) if nested else zip(state_dict)
            if [".".join(map(str, each)) for each in keys] != list(map(str, flat)):
                raise UnsavableStateError("DCP flattens this state dict in an order of its own: please report this")
        position = {name: number for number, name in enumerate(flat)}
        tensor_items, object_items = split_items(items)
        self.tensor_names = [item.index.fqn for item in tensor_items]
        tensor_at, object_at = ([position[item.index.fqn] for item in its] for its in (tensor_items, object_items))
        self._pick_tensors, self._pick_objects = picker(tensor_at), picker(object_at)
        self._types = list(map(type, leaves))
        self._opaque_at = {at for at in object_at if isinstance(leaves[at], torch.Tensor)}
        # DTensors, by position among the tensors. Their local bytes are stored. Their specs belong to the structure.
        self._sharded = [number for number, at in enumerate(tensor_at) if isinstance(leaves[at], DTensor)]
        self._pick_sharded = picker(self._sharded)
        self._specs = [_spec(leaves[tensor_at[number]]) for number in self._sharded]
        # No value is ``Stateful``. A later state with values of the same types has no ``Stateful`` value either.
        self._is_stateless = nested and not any(stateful_types(state_dict))
        self._pick_lists = picker([at for at, leaf in enumerate(leaves) if isinstance(leaf, list)])

    def take(
        self, state_dict: StateDict, planner: SavePlanner | None, *, is_raw: bool = False
    ) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        """Return the tensors and the objects of ``state_dict``, in the order of the layout, not copied.

        Raises ``StructureChanged`` if the state differs from the planned one. With ``is_raw``, raises the same error if
        a value may be ``Stateful``.
        """
        leaves = self._structure.leaves(state_dict)
        types = list(map(type, leaves))
        if is_raw and not (self._is_stateless and types == self._types):
            raise StructureChanged("a value may have a state of its own")
        if is_raw and any(stateful_types({"lists": list(self._pick_lists(leaves))})):
            raise StructureChanged("a list has a value that has a state of its own")
        if types != self._types:
            self._check_types(types)
        if not all(is_opaque(leaves[at]) for at in self._opaque_at):
            raise StructureChanged("a tensor has plain bytes now, and had none")
        tensors = self._pick_tensors(leaves)
        if self._sharded:
            tensors = list(tensors)
            sharded = self._pick_sharded(tensors)
            if list(map(_spec, sharded)) != self._specs:  # in C; identical objects are equal without a closer look
                raise StructureChanged("a DTensor is placed differently")
            for number, local in zip(self._sharded, map(_local_tensor, sharded), strict=True):
                tensors[number] = local if type(local) is torch.Tensor else plain_part(local, self.tensor_names[number])
        return tensors, self._pick_objects(leaves)

    def _check_types(self, types: Sequence[type]) -> None:
        """Raise ``StructureChanged`` if a tensor changed its type, or an object became a tensor."""
        for old, new in zip(self._types, types, strict=True):
            if old is not new and (issubclass(old, torch.Tensor) or issubclass(new, torch.Tensor)):
                raise StructureChanged(f"a {old.__name__} is now a {new.__name__}")


class PlannerCapture:
    """Captures values by running the planner on every save.

    Used with a user's own planner, and for values that only DCP can divide.
    """

    def __init__(self, planner: SavePlanner, local: SavePlan, items: Sequence[WriteItem], is_coordinator: bool) -> None:
        """Keep the plan.

        Args:
            planner: The planner for saves without a planner of their own.
            local: The planner's local plan for this rank.
            items: The items of this rank's final plan.
            is_coordinator: Whether this is the first rank.
        """
        self._planner = planner
        self._is_coordinator = is_coordinator
        self._local = local
        self._tensor_items, self._object_items = split_items(items)
        self.tensor_names = [item.index.fqn for item in self._tensor_items]

    @without_gc
    def take(
        self, state_dict: StateDict, planner: SavePlanner | None, *, is_raw: bool = False
    ) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        """Return the tensors and objects, see ``FlatCapture.take``. ``planner``: the planner of this save, if any."""
        if is_raw:
            raise StructureChanged("a value may have a state of its own")
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
            tensors.append(plain_part(tensor.detach(), item.index.fqn))
        values = []
        for item in self._object_items:
            buffer = planner.resolve_data(item)
            if isinstance(buffer, torch.Tensor):
                raise UnsavableStateError(
                    f"the planner planned {item.index.fqn!r} as bytes and resolved it to a tensor"
                )
            values.append(Raw(buffer.getbuffer()))
        return tensors, values


def is_opaque(value: object) -> bool:
    """Return True for a tensor without plain bytes of its own: sparse, quantised, a subclass, or on the meta device."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return type(value) not in PLAIN or has_no_bytes(value)


class Opaque:
    """A placeholder for a tensor without plain bytes, so that DCP plans the tensor as an object."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        """Check the tensor. Raises ``UnsavableStateError`` if ``tensor`` cannot be saved as an object either."""
        if tensor.device.type == "meta":
            raise UnsavableStateError(
                f"{name!r} is on the meta device and has no values to save; materialise it first, or leave it out"
            )
        if tensor.is_nested and tensor.layout == torch.strided:
            raise UnsavableStateError(
                f"{name!r} is a nested tensor of strided layout, which torch cannot reload; use layout=torch.jagged"
            )


def split_items(items: Sequence[WriteItem]) -> tuple[list[WriteItem], list[WriteItem]]:
    """Return the items for tensors, and the items for objects."""
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    return [item for item in items if item.type != WriteItemType.BYTE_IO], objects
