"""The plan: what of a state dict goes where. Made once for a structure, then only checked.

DCP's own planner turns the state dict into write items and spreads what all ranks have over them, so that what DCP
users know (DTensor, nested dicts, ...) works as they know it, and DCP's metadata comes out as DCP reads it. What is
left to do on a later save is ``capture``: see that the state still has the planned structure, and hand its tensors over
in the order of the image.
"""

from __future__ import annotations

import contextlib
import pickle
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError
from asyncckpt.fingerprint import Fingerprint, alias_key
from asyncckpt.group import Group
from asyncckpt.image import Image, TensorSpec
from asyncckpt.objects import Raw, StoredObjects
from asyncckpt.structure import PLAIN, Structure, StructureChanged, has_no_bytes, picker
from asyncckpt.worker.manifest import Index, Item, data_name, spans
from asyncckpt.worker.messages import Layout, Region

StateDict = Mapping[str, Any]

_spec, _local_tensor = attrgetter("_spec"), attrgetter("_local_tensor")


class _Source(Protocol):
    """Gets the planned values out of a state dict."""

    def read(self, state_dict: StateDict, planner: SavePlanner | None) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        """Tensors and objects, in the order of the image. Raises ``StructureChanged``."""


@dataclass
class Plan:
    """How states of one structure are laid out, and the bytes of the files that come out the same every time."""

    number: int
    """The same on all ranks, and for no other plan."""
    image: Image
    objects: StoredObjects
    fingerprint: Fingerprint
    data_name: str
    metadata: bytes
    index_head: bytes
    bounds: array[int]
    names: frozenset[str]
    source: _Source

    def capture(self, state_dict: StateDict, planner: SavePlanner | None = None) -> Sequence[torch.Tensor]:
        """The tensors of ``state_dict`` in the order of the image; its objects are taken into ``objects``.

        ``planner``: the user's for this save, of the kind this was planned with. The tensors are the caller's own,
        nothing is copied yet. Raises ``StructureChanged`` if this plan is not for this state dict,
        ``UnsavableStateError`` if a value cannot be saved.
        """
        tensors, values = self.source.read(state_dict, planner)
        self.fingerprint.check(tensors)
        self.objects.refresh(values)
        return tensors

    def constants(self) -> dict[str, bytes | memoryview]:
        """The files that are the same in every save, by the name of their region."""
        bounds = memoryview(self.bounds).cast("B")
        return {"metadata": self.metadata, "index_head": self.index_head, "spans": bounds}

    def layout(self, slots: tuple[int, ...], regions: dict[str, Region]) -> Layout:
        """Where all that stands in a segment with ``slots``, offsets in bytes."""
        return Layout(self.data_name, self.image.nbytes, slots, **regions)


def make_plan(state_dict: StateDict, slots: int, planner: SavePlanner | None, group: Group, number: int) -> Plan:
    """Plan ``state_dict`` (without ``Stateful`` values) with all ranks of ``group``, for images in ``slots`` slots.

    ``planner`` is DCP's default one unless given; ``number`` is the same on all ranks, and new. What any rank raises,
    all raise: ``UnsavableStateError``, ``RankFailedError``, ``SaveTimeoutError``.
    """
    draft = _Draft(state_dict, _default_planner(planner) or planner or DefaultSavePlanner(), slots, group.rank)
    draft.final = group.consult("plan", number, draft.local_plan, draft.global_plans)
    metadata = group.consult("layout", number, draft.lay_out, draft.metadata)
    return draft.plan(metadata, number)


def flat_names(state_dict: StateDict, planner: SavePlanner | None) -> frozenset[str]:
    """The names of the values of ``state_dict``, as DCP's default planner would give them."""
    default = _default_planner(planner)
    if default is not None and not default.flatten_state_dict:
        return frozenset(map(str, state_dict))
    return frozenset(flatten_state_dict(dict(state_dict))[0])


def _default_planner(planner: SavePlanner | None) -> DefaultSavePlanner | None:
    """A planner of DCP's own that does as ``planner``, but knows nothing of earlier saves; None for a user's own."""
    if planner is None:
        return DefaultSavePlanner()
    if type(planner) is not DefaultSavePlanner:
        return None
    return DefaultSavePlanner(
        flatten_state_dict=planner.flatten_state_dict,
        flatten_sharded_tensors=planner.flatten_sharded_tensors,
        dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
    )


# Where a rank's items stand in its file: their offsets and sizes in bytes, in the order of its final plan.
_Places = tuple["array[int]", "array[int]", Sequence[MetadataIndex] | None]


class _Draft:
    """A plan being made, step by step, as all ranks take them together."""

    def __init__(self, state_dict: StateDict, planner: SavePlanner, slots: int, rank: int) -> None:
        self._state_dict = state_dict
        self._planner = planner
        self._slots = slots
        self._rank = rank
        self._flat: dict[str, Any] | None = None
        self._local = SavePlan([])
        self.final = SavePlan([])
        # First rank: what all have, until it becomes the metadata.
        self._finals: list[SavePlan] = []
        self._metadata = Metadata({})

    def local_plan(self) -> SavePlan:
        """What this rank has."""
        planner = self._planner
        with _planning():
            planner.set_up_planner(dict(self._state_dict), StorageMeta(), self._rank == 0)
            if type(planner) is DefaultSavePlanner and not any(map(_is_sharded, planner.state_dict.values())):
                self._flat = planner.state_dict
                # What has no plain bytes is planned, and stored, as an object.
                planner.state_dict = {
                    name: _Opaque(name, value) if _is_opaque(value) else value for name, value in self._flat.items()
                }
            self._local = planner.create_local_plan()
        return self._local

    def global_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        """First rank: who writes what."""
        with _planning():
            self._finals, self._metadata = self._planner.create_global_plan(plans)
        return self._finals

    def lay_out(self) -> _Places:
        """Where this rank's part stands in its file."""
        with _planning():
            asked, self.final = self.final, self._planner.finish_plan(self.final)
        self._tensor_items = [item for item in self.final.items if item.type != WriteItemType.BYTE_IO]
        self._object_items = [item for item in self.final.items if item.type == WriteItemType.BYTE_IO]
        if self._flat is not None and isinstance(self._planner, DefaultSavePlanner):
            nested = self._planner.flatten_state_dict
            self._source: _Source = _FlatSource(
                self._state_dict, nested, self._flat, self._tensor_items, self._object_items
            )
        else:
            self._source = _PlannerSource(
                self._planner, self._local, self._tensor_items, self._object_items, self._rank == 0
            )
        try:
            self._tensors, values = self._source.read(self._state_dict, self._planner)
        except StructureChanged as error:
            raise UnsavableStateError(f"the state dict changes while it is looked at: {error}") from error
        self._alias = _aliases(self._tensors)
        self._specs = [
            TensorSpec(tensor.dtype, tuple(tensor.shape), self._alias.get(number))
            for number, tensor in enumerate(self._tensors)
        ]
        self._objects = StoredObjects([item.index.fqn for item in self._object_items], values, self._slots)
        self._image = Image.lay_out(self._specs, self._objects.rooms)
        tensors, objects = iter(self._image.tensors), iter(self._image.objects)
        places = [next(objects if item.type == WriteItemType.BYTE_IO else tensors) for item in self.final.items]
        same = [item.index for item in asked.items] == [item.index for item in self.final.items]
        return (
            array("Q", (place.at for place in places)),
            array("Q", (place.nbytes for place in places)),
            None if same else [item.index for item in self.final.items],
        )

    def metadata(self, places: list[_Places]) -> list[bytes]:
        """First rank: DCP's metadata, with the places of all ranks; for the first alone, which writes it."""
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for rank, (plan, (at, nbytes, indices)) in enumerate(zip(self._finals, places, strict=True)):
            if indices is None:
                indices = [item.index for item in plan.items]
            data = data_name(rank)
            for index, offset, size in zip(indices, at, nbytes, strict=True):
                storage[index] = _StorageInfo(data, offset, size)
        self._metadata.storage_data = storage
        self._metadata.storage_meta = StorageMeta()
        return [pickle.dumps(self._metadata)] + [b""] * (len(places) - 1)

    def plan(self, metadata: bytes, number: int) -> Plan:
        """The result."""
        image, data = self._image, data_name(self._rank)
        items: list[Item] = []
        for item, spec, place in zip(self._tensor_items, self._specs, image.tensors, strict=True):
            offsets = list(item.index.offset or [0] * len(spec.shape))
            items.append(Item(item.index.fqn, "tensor", _dtype_name(spec.dtype), list(spec.shape), offsets, *place))
        for item, place in zip(self._object_items, image.objects, strict=True):
            items.append(Item(item.index.fqn, "object", "", [], [], *place))
        return Plan(
            number=number,
            image=image,
            objects=self._objects,
            fingerprint=Fingerprint(self._tensors, sorted(self._alias.items())),
            data_name=data,
            metadata=metadata,
            index_head=Index.head(data, image.nbytes, items),
            bounds=spans((item.at for item in items), image.nbytes),
            names=frozenset(item.index.fqn for item in self._local.items),
            source=self._source,
        )


@contextlib.contextmanager
def _planning() -> Iterator[None]:
    """What a planner raises is about the state dict."""
    try:
        yield
    except UnsavableStateError:
        raise
    except Exception as error:
        raise UnsavableStateError(f"the state dict cannot be planned: {type(error).__name__}: {error}") from error


def _aliases(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Which tensors are the same bytes as an earlier one: stored once, under both names."""
    first: dict[Any, int] = {}
    aliases = {}
    for number, tensor in enumerate(tensors):
        key = alias_key(tensor)
        if key is not None and first.setdefault(key, number) != number:
            aliases[number] = first[key]
    return aliases


class _FlatSource:
    """For DCP's default planner: the structure is compared, the values are picked by position."""

    def __init__(
        self,
        state_dict: StateDict,
        nested: bool,
        flat: Mapping[str, Any],
        tensor_items: Sequence[WriteItem],
        object_items: Sequence[WriteItem],
    ) -> None:
        self._structure = Structure(state_dict, nested)
        leaves = self._structure.leaves(state_dict)
        if len(leaves) != len(flat) or any(one is not other for one, other in zip(leaves, flat.values(), strict=True)):
            raise UnsavableStateError("DCP flattens this state dict in an order of its own: please report this")
        position = {name: number for number, name in enumerate(flat)}
        tensor_at = [position[item.index.fqn] for item in tensor_items]
        object_at = [position[item.index.fqn] for item in object_items]
        self._tensors, self._objects = picker(tensor_at), picker(object_at)
        self._types = list(map(type, leaves))
        self._opaque_at = {at for at in object_at if isinstance(leaves[at], torch.Tensor)}
        # DTensors, by their place among the tensors: their local bytes are stored, their spec is part of the structure.
        self._sharded = [number for number, at in enumerate(tensor_at) if isinstance(leaves[at], DTensor)]
        self._pick_sharded = picker(self._sharded)
        self._specs = [leaves[tensor_at[number]]._spec for number in self._sharded]

    def read(self, state_dict: StateDict, planner: SavePlanner | None) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        leaves = self._structure.leaves(state_dict)
        types = list(map(type, leaves))
        if types != self._types:
            self._check_types(types)
        for at in self._opaque_at:
            if not _is_opaque(leaves[at]):
                raise StructureChanged("a tensor has plain bytes now, and had none")
        tensors = list(self._tensors(leaves))
        if self._sharded:
            sharded = self._pick_sharded(tensors)
            if list(map(_spec, sharded)) != self._specs:  # in C, and at a glance where they are the same objects
                raise StructureChanged("a DTensor is placed differently")
            for number, local in zip(self._sharded, map(_local_tensor, sharded), strict=True):
                tensors[number] = local if type(local) is torch.Tensor else _waited_for(local)
        return tensors, self._objects(leaves)

    def _check_types(self, types: Sequence[type]) -> None:
        """An object may become one of another type; a tensor that comes or goes is another structure."""
        for old, new in zip(self._types, types, strict=True):
            if old is not new and (issubclass(old, torch.Tensor) or issubclass(new, torch.Tensor)):
                raise StructureChanged(f"a {old.__name__} is now a {new.__name__}")


class _PlannerSource:
    """For a planner of the user's own, or values only DCP can take apart: it is asked anew on every save."""

    def __init__(
        self,
        planner: SavePlanner,
        local: SavePlan,
        tensor_items: Sequence[WriteItem],
        object_items: Sequence[WriteItem],
        is_coordinator: bool,
    ) -> None:
        self._planner = planner
        self._is_coordinator = is_coordinator
        self._local = local
        self._tensor_items = tensor_items
        self._object_items = object_items

    def read(self, state_dict: StateDict, planner: SavePlanner | None) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
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


class _Opaque:
    """Stands for a tensor without plain bytes while DCP plans, which so takes it for an object."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            raise UnsavableStateError(
                f"{name!r} is on the meta device and has no values to save; materialise it first, or leave it out"
            )
        if tensor.is_nested and tensor.layout == torch.strided:
            raise UnsavableStateError(
                f"{name!r} is a nested tensor of strided layout, which torch cannot reload; use layout=torch.jagged"
            )


def _is_opaque(value: object) -> bool:
    """Whether ``value`` is a tensor that has no plain bytes of its own: sparse, quantised, a subclass, without data."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return type(value) not in PLAIN or has_no_bytes(value)


def _is_sharded(value: object) -> bool:
    """Whether DCP has its own way to take ``value`` apart (ShardedTensor and its like, but not DTensor)."""
    return hasattr(value, "__create_write_items__") and not isinstance(value, DTensor) or hasattr(value, "local_shards")


def _waited_for(local: Any) -> torch.Tensor:
    """A DTensor's local tensor, which a collective may still be filling."""
    wait: Callable[[], torch.Tensor] | None = getattr(local, "wait", None)
    tensor: torch.Tensor = local if wait is None else wait()
    return tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
