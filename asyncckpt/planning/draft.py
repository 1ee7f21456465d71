"""Make the plan of a folder of DCP, together with all ranks. DCP's own planner decides, with its usual behavior."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError
from asyncckpt.format.index import Index, Item, spans
from asyncckpt.format.manifest import data_name
from asyncckpt.planning.dcp_plan import (
    DcpFolder,
    DcpPlan,
    FlatCapture,
    Opaque,
    PlannerCapture,
    is_opaque,
    split_items,
)
from asyncckpt.planning.frozen import matcher
from asyncckpt.planning.layout import DataLayout, PlannedFile, TensorSpec
from asyncckpt.planning.metadata import (
    PLANNED_BY,
    StoredPlaces,
    check_shards,
    fresh,
    is_sharded,
    kept_items,
    pickle_metadata,
    planning,
)
from asyncckpt.planning.objects import StoredObjects
from asyncckpt.planning.replicas import Replicas
from asyncckpt.planning.structure import Fingerprint, StructureChanged, alias_key
from asyncckpt.ranks.group import Group
from asyncckpt.threads import without_gc


@dataclass(frozen=True)
class StoredPlan:
    """The plan of one rank, as stored in the checkpoint of an ``attempt``.

    ``indexes``: the indexes of the rank's data files, in the order of the files. ``metadata``: DCP's metadata without
    the storage metadata of the save; empty except on the first rank.
    """

    attempt: str
    indexes: Sequence[Index]
    metadata: bytes = b""

    @property
    def names(self) -> frozenset[str]:
        """The names of the values in the rank's data files."""
        return frozenset(item.name for index in self.indexes for item in index.items)


def restored_plan(draft: Draft, stored: StoredPlan, number: int) -> DcpPlan | None:
    """Return the plan of a checkpoint for a new state, or None if the plan does not fit.

    Use the plan only if all ranks restore a plan of the same attempt.

    Args:
        draft: The draft for the state.
        stored: The plan that the checkpoint has.
        number: The number of the new plan.

    Raises:
        UnsavableStateError: The state cannot be saved.
    """
    if not draft.is_plain:
        return None
    draft.plan_alone()
    if any(index.asked != draft.asked for index in stored.indexes):
        return None
    items = [item for index in stored.indexes for item in index.items]
    local = {(item.index.fqn, tuple(item.index.offset or ())): item for item in draft.local.items}
    final = [local.get((item.name, tuple(item.offsets))) for item in items]
    if None in final:
        return None
    draft.reserved = [item.nbytes for item in items if item.kind == "object"]
    try:
        draft.lay_out(SavePlan([item for item in final if item is not None]), number)
    except StructureChanged:  # an object has grown
        return None
    plan: DcpPlan = draft.plan
    # Compare all bytes: a tensor may have another place if its device changed, or if it shares bytes with another now.
    heads = [Index.head(index.data, index.items, asked=index.asked) for index in stored.indexes]
    if heads != [file.index_head for file in plan.planned]:
        return None
    draft.finish(stored.metadata)
    return plan


def make_plans(drafts: Sequence[Draft], group: Group, number: int) -> None:
    """Plan several state dicts together, with all ranks. Afterwards each draft has its ``plan``.

    If any rank raises an error, all ranks raise it.

    Args:
        drafts: The drafts of this rank. All ranks have the same number of drafts.
        group: The ranks, which all call this.
        number: The number of the plans: new, and the same on all ranks.

    Raises:
        UnsavableStateError: A value cannot be saved.
        RankFailedError, SaveTimeoutError: Another rank failed, or the ranks did not meet in time.
    """
    if not drafts:
        return

    def plan() -> list[SavePlan]:
        return [each.local_plan() for each in drafts]

    finals = group.ask_all("plan", number, plan, _for_each([each.global_plans for each in drafts]))

    def lay_out() -> list[Any]:
        return [each.lay_out(final, number) for each, final in zip(drafts, finals, strict=True)]

    metadata = group.ask_all("layout", number, lay_out, _for_each([each.metadata for each in drafts]))
    for draft, its in zip(drafts, metadata, strict=True):
        draft.finish(its)


def _for_each(decide: Sequence[Callable[[list[Any]], Sequence[Any]]]) -> Callable[[list[list[Any]]], list[list[Any]]]:
    """First rank: return a function that applies the ``decide`` function of each draft to the reports of all ranks.

    The returned function takes the reports of each rank for all drafts, and returns the answers in the same order.
    """

    def answers(said: list[list[Any]]) -> list[list[Any]]:
        by_draft = zip(decide, zip(*said, strict=True), strict=True)
        return [list(its) for its in zip(*(answer(list(its)) for answer, its in by_draft), strict=True)]

    return answers


class Draft:
    """A plan under construction. All ranks take its steps together."""

    def __init__(self, content: DcpFolder, folder: str, assumed: tuple[str, ...], rank: int, world_size: int) -> None:
        """Plan nothing yet.

        Args:
            content: The state dict to plan.
            folder: Its folder in the checkpoint; "": the top.
            assumed: Patterns of frozen names (``Config.assume_unchanged``).
            rank: The number of this rank.
            world_size: The number of ranks.
        """
        self.plan: Any  # a ``DcpPlan``; ``lay_out`` sets it, and ``finish`` adds the metadata
        self._content = content
        self._state_dict = content.state
        self._folder, self._assumed = folder, assumed
        self._planner, self._rank, self._world_size = fresh(content.planner), rank, world_size
        self._flat: dict[str, Any] | None = None
        self.local = SavePlan([])
        self.asked = ""
        """A digest of this rank's local plan; "": the draft is not plain, or not planned yet."""
        self.reserved: Sequence[int] | None = None
        """The bytes to reserve for each object; None: as many as the object needs."""
        # First rank: the final plans of all ranks, and DCP's metadata under construction.
        self._finals: list[SavePlan] = []
        self.global_metadata = Metadata({})

    @property
    def is_plain(self) -> bool:
        """True if DCP's default planner plans the state, and the state stands at the top of its checkpoint."""
        return type(self._planner) is DefaultSavePlanner and not self._folder

    @without_gc
    def plan_alone(self) -> None:
        """Make the local plan of this rank."""
        planner = self._planner
        with planning():
            planner.set_up_planner(dict(self._state_dict), StorageMeta(), self._rank == 0)
            if isinstance(planner, DefaultSavePlanner):
                check_shards(planner.state_dict)
            if type(planner) is DefaultSavePlanner and not any(map(is_sharded, planner.state_dict.values())):
                self._flat = planner.state_dict
                # Plan and store a tensor without plain bytes as an object.
                planner.state_dict = {
                    name: Opaque(name, value) if is_opaque(value) else value for name, value in self._flat.items()
                }
            self.local = planner.create_local_plan()
        if self.is_plain:
            self.asked = self._digest()

    def local_plan(self) -> SavePlan:
        """Make and return the local plan of this rank."""
        self.plan_alone()
        return self.local

    def _digest(self) -> str:
        who = PLANNED_BY, self._rank, self._world_size, getattr(self._planner, "dedup_save_to_lowest_rank", None)
        hasher = hashlib.blake2b(repr((*who, self.local.planner_data)).encode(), digest_size=16)
        for item in self.local.items:
            hasher.update(repr(item).encode())
        return hasher.hexdigest()

    def replicas(self, number: int) -> Replicas:
        """Return the values that other ranks may have too."""
        values = self.values() if self._world_size > 1 else {}
        names = [str(name) for name, value in values.items() if not (isinstance(value, DTensor) or is_sharded(value))]
        return Replicas(self._state_dict, names, number)

    def values(self) -> Mapping[str, Any]:
        """Return the values of the state by name. Empty if the planner shows no state dict."""
        values: Any = self._flat if self._flat is not None else getattr(self._planner, "state_dict", None)
        return values if isinstance(values, Mapping) else {}

    @without_gc
    def global_plans(self, plans: list[SavePlan]) -> list[Any]:
        """First rank: decide which rank writes which item. Return the final plan of each rank."""
        with planning():
            # A copy, because the planner of torch 2.6 removes items from the plans in the list.
            self._finals, self.global_metadata = self._planner.create_global_plan(list(plans))
        if type(self._planner) is DefaultSavePlanner:
            return list(map(kept_items, plans, self._finals))
        return self._finals

    @without_gc
    def lay_out(self, final: Any, number: int) -> Any:
        """Lay out this rank's files for the ``final`` plan (see ``final_plan``). Return the places of the items."""
        final = self.final_plan(final)
        items = self.finished(final)
        values = self.capture_of(items)
        tensors, objects = self.taken(values)
        kinds = self._kinds(items, tensors)
        order = sorted(range(len(items)), key=kinds.__getitem__)
        if order != list(range(len(items))):
            items = [items[number] for number in order]
            values = self.capture_of(items)
            tensors, objects = self.taken(values)
        aliases = _aliases(tensors)
        specs = [
            TensorSpec(tensor.dtype, tuple(tensor.shape), aliases.get(number), name)
            for number, (tensor, name) in enumerate(zip(tensors, values.tensor_names, strict=True))
        ]
        tensor_items, object_items = split_items(items)
        if self._flat is not None:
            _check_parts(tensor_items, tensors)
        stored = StoredObjects([item.index.fqn for item in object_items], objects, self.reserved)
        counts = self._counts([kinds[number] for number in order], items)
        layout = DataLayout.lay_out(specs, stored.reserved, [*counts.values()])
        files = self._planned_files([*counts], layout, tensor_items, object_items)
        self.plan = DcpPlan(
            layout=layout,
            objects=stored,
            fingerprint=Fingerprint(tensors, sorted(aliases.items())),
            values=values,
            names=frozenset(item.index.fqn for item in self.local.items),
            planned=files,
            compared=self.replicas(number),
            frozen=self._content.frozen,
        )
        tensor_places, object_places = iter(layout.tensors), iter(layout.objects)
        places = [next(object_places if item.type == WriteItemType.BYTE_IO else tensor_places) for item in items]
        same = [item.index for item in final.items] == [item.index for item in items]
        return StoredPlaces(
            array("Q", (place.at for place in places)),
            array("Q", (place.nbytes for place in places)),
            None if same else [item.index for item in items],
            [(file.prefix, file.begin) for file in files],
        )

    @without_gc
    def metadata(self, places: list[Any]) -> list[bytes]:
        """First rank: return an answer for each rank. The first rank gets DCP's metadata, all others get no bytes.

        ``places``: the places of the items of each rank.
        """
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for rank, (plan, its) in enumerate(zip(self._finals, places, strict=True)):
            storage.update(its.storage(rank, plan))
        self.global_metadata.storage_data = storage
        self.global_metadata.storage_meta = StorageMeta()
        self.global_metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        return [pickle_metadata(self.global_metadata)] + [b""] * (len(places) - 1)

    def finish(self, metadata: bytes) -> None:
        """Complete the plan with ``metadata``, this rank's answer from the method ``metadata``."""
        self.plan.metadata = metadata

    def final_plan(self, said: SavePlan | bytes) -> SavePlan:
        """Return this rank's final plan.

        ``said``: the answer of the first rank, either the whole plan or a byte for each local item (``kept_items``).
        """
        return said if isinstance(said, SavePlan) else SavePlan(list(compress(self.local.items, said)))

    def finished(self, final: SavePlan) -> Sequence[WriteItem]:
        """Return the items of the ``final`` plan of this rank."""
        with planning():
            items: Sequence[WriteItem] = self._planner.finish_plan(final).items
        return items

    def taken(self, values: FlatCapture | PlannerCapture) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        """Return the tensors and the objects of the state."""
        try:
            return values.take(self._state_dict, self._planner)
        except StructureChanged as error:
            raise UnsavableStateError(f"the state dict changes while it is looked at: {error}") from error

    def capture_of(self, items: Sequence[WriteItem]) -> FlatCapture | PlannerCapture:
        if self._flat is not None and isinstance(self._planner, DefaultSavePlanner):
            return FlatCapture(self._state_dict, self._flat, self._planner.flatten_state_dict, items)
        return PlannerCapture(self._planner, self.local, items, self._rank == 0)

    def _kinds(self, items: Sequence[WriteItem], tensors: Sequence[torch.Tensor]) -> list[tuple[bool, bool, bool]]:
        """Return the kind of each item. Items of one kind stand side by side in the image.

        A kind has three parts: whether the item is a frozen tensor, whether the item goes to the file with the prefix,
        and whether the item is on the host. AdamW has its steps on the host, between its moments on the device. In that
        order the moments could not be copied many at a time.
        """
        its = iter(tensors)
        is_frozen = self._is_frozen()
        kinds = []
        for item in items:
            name = item.index.fqn
            is_separate = bool(self._content.separate) and name.startswith(self._content.separate)
            if item.type == WriteItemType.BYTE_IO:
                kinds.append((False, is_separate, True))
            else:
                kinds.append((is_frozen(name), is_separate, next(its).is_cpu))
        return kinds

    def _is_frozen(self) -> Callable[[str], bool]:
        """Return a function that tells whether the tensor with a name is frozen."""
        values = {name: value for name, value in self.values().items() if isinstance(value, torch.nn.Parameter)}
        frozen = self._content.frozen | {name for name, value in values.items() if not value.requires_grad}
        is_assumed = matcher(self._assumed)
        return lambda name: name in frozen or is_assumed(name)

    def _name(self, item: WriteItem) -> str:
        """Return the name of an item in the index."""
        return f"{self._folder}/{item.index.fqn}" if self._folder else item.index.fqn

    def _counts(
        self, kinds: Sequence[tuple[bool, bool, bool]], items: Sequence[WriteItem]
    ) -> dict[tuple[bool, bool], tuple[int, int]]:
        """Return the number of tensors and the number of objects of each data file."""
        of = Counter((kind[:2], item.type == WriteItemType.BYTE_IO) for kind, item in zip(kinds, items, strict=True))
        files = {(False, False), (False, bool(self._content.separate)), *(file for file, _ in of)}
        return {file: (of[file, False], of[file, True]) for file in sorted(files)}

    def _planned_files(
        self,
        which: Sequence[tuple[bool, bool]],
        layout: DataLayout,
        tensors: Sequence[WriteItem],
        objects: Sequence[WriteItem],
    ) -> list[PlannedFile]:
        """Return the data files, each with an index of its items. ``which``: the first two parts of their kinds."""
        indexed: list[list[Item]] = [[] for _ in layout.begins]
        for item, spec, place in zip(tensors, layout.specs, layout.tensors, strict=True):
            offsets = list(item.index.offset or [0] * len(spec.shape))
            dtype = str(spec.dtype).removeprefix("torch.")
            file = layout.file_of(place)
            its_place = place.since(layout.begins[file])
            indexed[file].append(Item(self._name(item), "tensor", dtype, list(spec.shape), offsets, *its_place))
        for item, place in zip(objects, layout.objects, strict=True):
            file = layout.file_of(place)
            its_place = place.since(layout.begins[file])
            indexed[file].append(Item(self._name(item), "object", "", [], [], *its_place))
        files = []
        for number, items in enumerate(indexed):
            begin, end = [*layout.begins, layout.nbytes][number : number + 2]
            is_frozen, is_separate = which[number]
            prefix = self._content.separate if is_separate else ""
            data = os.path.join(self._folder, data_name(self._rank, number, prefix))
            head = Index.head(data, items, asked=self.asked)
            bounds = spans((item.at for item in items), layout.lengths[number])
            files.append(PlannedFile(prefix, begin, end - begin, head, bounds, is_frozen))
        return files


def _check_parts(items: Sequence[WriteItem], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ``UnsavableStateError`` if this rank's part of a tensor differs in shape from the part that DCP notes."""
    for item, tensor in zip(items, tensors, strict=True):
        if item.tensor_data is not None and item.tensor_data.chunk.sizes != tensor.shape:
            raise UnsavableStateError(
                f"{item.index.fqn!r} is by its placements a part of {tuple(item.tensor_data.chunk.sizes)} elements on"
                f" this rank, and its memory has {tuple(tensor.shape)}: its DTensor is not true"
            )


def _aliases(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the number of an earlier tensor with the same bytes, for each tensor that has one.

    The shared bytes are stored once, under both names.
    """
    first: dict[Any, int] = {}
    aliases = {}
    for number, tensor in enumerate(tensors):
        key = alias_key(tensor)
        if key is not None and first.setdefault(key, number) != number:
            aliases[number] = first[key]
    return aliases
