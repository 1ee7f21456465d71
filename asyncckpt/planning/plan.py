"""The plan of a checkpoint: what of a state dict goes where. Made once for a structure, then only checked.

DCP's own planner turns the state dict into write items and spreads what all ranks have over them, so that what DCP
users know (DTensor, nested dicts, ...) works as they know it, and DCP's metadata comes out as DCP reads it. What is
left to do on a later save is ``capture``: see that the state still has the planned structure, and hand its tensors over
in the order of the layout.
"""

from __future__ import annotations

import contextlib
import pickle
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.capture import Capture, FlatCapture, Opaque, PlannerCapture, is_opaque, split_items
from asyncckpt.planning.fingerprint import Fingerprint, alias_key
from asyncckpt.planning.layout import DataLayout, TensorSpec
from asyncckpt.planning.objects import StoredObjects
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.ranks.group import Group
from asyncckpt.worker.manifest import Index, Item, data_name, spans
from asyncckpt.worker.messages import CheckpointLayout, Region

StateDict = Mapping[str, Any]


@dataclass
class CheckpointPlan:
    """How states of one structure are laid out, and the bytes of the files that come out the same every time."""

    number: int
    """The same on all ranks, and for no other plan."""
    layout: DataLayout
    objects: StoredObjects
    fingerprint: Fingerprint
    values: Capture
    names: frozenset[str]
    data_name: str
    index_head: bytes
    spans: array[int]
    metadata: bytes = b""
    """DCP's; on the first rank alone, which writes it."""

    def capture(self, state_dict: StateDict, planner: SavePlanner | None = None) -> Sequence[torch.Tensor]:
        """The tensors of ``state_dict`` in the order of the layout; its objects are taken into ``objects``.

        ``planner``: the user's for this save, of the kind this was planned with. The tensors are the caller's own,
        nothing is copied yet. Raises ``StructureChanged`` if this plan is not for this state dict,
        ``UnsavableStateError`` if a value cannot be saved.
        """
        tensors, objects = self.values.take(state_dict, planner)
        self.fingerprint.check(tensors)
        self.objects.refresh(objects)
        return tensors

    def constants(self) -> dict[str, bytes | memoryview]:
        """The files that are the same in every save, by the name of their region."""
        return {
            "metadata": self.metadata,
            "index_head": self.index_head,
            "spans": memoryview(self.spans).cast("B"),
        }

    def segment_layout(self, slots: tuple[int, ...], regions: Mapping[str, Region]) -> CheckpointLayout:
        """Where all that stands in a segment with images at ``slots``, offsets in bytes."""
        return CheckpointLayout(self.data_name, self.layout.nbytes, slots, **regions)


def make_plan(
    state_dict: StateDict, slots: int, planner: SavePlanner | None, group: Group, number: int
) -> CheckpointPlan:
    """Plan a state dict with all ranks. What any rank raises, all raise.

    Args:
        state_dict: This rank's part, without ``Stateful`` values.
        slots: How many slots the images will have.
        planner: The user's own; None: DCP's default one.
        group: The ranks, which all call this.
        number: The number of the plan: new, and the same on all ranks.

    Returns:
        The plan of this rank's file.

    Raises:
        UnsavableStateError: A value cannot be saved.
        RankFailedError: Another rank failed.
        SaveTimeoutError: The ranks did not meet in time.
    """
    draft = Draft(state_dict, _fresh(planner), slots, group.rank)
    final = group.ask_all("plan", number, draft.local_plan, draft.global_plans)
    metadata = group.ask_all("layout", number, partial(draft.lay_out, final, number), draft.metadata)
    return draft.plan(metadata)


def flat_names(state_dict: StateDict, planner: SavePlanner | None) -> frozenset[str]:
    """The names of the values of ``state_dict``, as DCP's default planner would give them."""
    if type(planner) is DefaultSavePlanner and not planner.flatten_state_dict:
        return frozenset(map(str, state_dict))
    return frozenset(flatten_state_dict(dict(state_dict))[0])


def _fresh(planner: SavePlanner | None) -> SavePlanner:
    """A planner of DCP's own that does as ``planner``, but knows nothing of earlier saves; a user's own as it is."""
    if planner is None:
        return DefaultSavePlanner()
    if type(planner) is not DefaultSavePlanner:
        return planner
    return DefaultSavePlanner(
        flatten_state_dict=planner.flatten_state_dict,
        flatten_sharded_tensors=planner.flatten_sharded_tensors,
        dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
    )


# Where a rank's items stand in its file: their offsets and sizes in bytes, in the order of its final plan, and their
# indices where those are not the ones that the first rank knows.
_Places = tuple["array[int]", "array[int]", Sequence[MetadataIndex] | None]


class Draft:
    """A plan being made, step by step, as all ranks take the steps together."""

    def __init__(self, state_dict: StateDict, planner: SavePlanner, slots: int, rank: int) -> None:
        """The arguments are those of ``make_plan``, for the rank ``rank``."""
        self._state_dict = state_dict
        self._planner = planner
        self._slots = slots
        self._rank = rank
        self._flat: dict[str, Any] | None = None
        self._local = SavePlan([])
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
                    name: Opaque(name, value) if is_opaque(value) else value for name, value in self._flat.items()
                }
            self._local = planner.create_local_plan()
        return self._local

    def global_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        """First rank: who writes what."""
        with _planning():
            self._finals, self._metadata = self._planner.create_global_plan(plans)
        return self._finals

    def lay_out(self, final: SavePlan, number: int) -> _Places:
        """Lay out this rank's file for its ``final`` plan; returns where its items stand."""
        with _planning():
            items = self._planner.finish_plan(final).items
        values = self._capture(items)
        try:
            tensors, objects = values.take(self._state_dict, self._planner)
        except StructureChanged as error:
            raise UnsavableStateError(f"the state dict changes while it is looked at: {error}") from error
        aliases = _aliases(tensors)
        specs = [
            TensorSpec(tensor.dtype, tuple(tensor.shape), aliases.get(number)) for number, tensor in enumerate(tensors)
        ]
        tensor_items, object_items = split_items(items)
        stored = StoredObjects([item.index.fqn for item in object_items], objects, self._slots)
        layout = DataLayout.lay_out(specs, stored.reserved)
        indexed = _index_items(layout, tensor_items, object_items)
        data = data_name(self._rank)
        self._plan = CheckpointPlan(
            number=number,
            layout=layout,
            objects=stored,
            fingerprint=Fingerprint(tensors, sorted(aliases.items())),
            values=values,
            names=frozenset(item.index.fqn for item in self._local.items),
            data_name=data,
            index_head=Index.head(data, layout.nbytes, indexed),
            spans=spans((item.at for item in indexed), layout.nbytes),
        )
        tensor_places, object_places = iter(layout.tensors), iter(layout.objects)
        places = [next(object_places if item.type == WriteItemType.BYTE_IO else tensor_places) for item in items]
        same = [item.index for item in final.items] == [item.index for item in items]
        return (
            array("Q", (place.at for place in places)),
            array("Q", (place.nbytes for place in places)),
            None if same else [item.index for item in items],
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

    def plan(self, metadata: bytes) -> CheckpointPlan:
        """The result."""
        self._plan.metadata = metadata
        return self._plan

    def _capture(self, items: Sequence[WriteItem]) -> Capture:
        if self._flat is not None and isinstance(self._planner, DefaultSavePlanner):
            return FlatCapture(self._state_dict, self._flat, self._planner.flatten_state_dict, items)
        return PlannerCapture(self._planner, self._local, items, self._rank == 0)


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


def _index_items(layout: DataLayout, tensors: Sequence[WriteItem], objects: Sequence[WriteItem]) -> list[Item]:
    """The items of the index, in the order of the file."""
    items = []
    for item, spec, place in zip(tensors, layout.specs, layout.tensors, strict=True):
        offsets = list(item.index.offset or [0] * len(spec.shape))
        dtype = str(spec.dtype).removeprefix("torch.")
        items.append(Item(item.index.fqn, "tensor", dtype, list(spec.shape), offsets, *place))
    for item, place in zip(objects, layout.objects, strict=True):
        items.append(Item(item.index.fqn, "object", "", [], [], *place))
    return items


def _is_sharded(value: object) -> bool:
    """Whether DCP has its own way to take ``value`` apart (ShardedTensor and its like, but not DTensor)."""
    return hasattr(value, "__create_write_items__") and not isinstance(value, DTensor) or hasattr(value, "local_shards")
