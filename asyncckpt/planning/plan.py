"""The plan of a save: a set of files. The large files stand in one image, one after the other.

A state dict is a set of one folder of DCP, at the top of its checkpoint. A file of ``torch.save`` alone is a set of one
file without a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TypeAlias

import torch

from asyncckpt.format.segment_layout import ImageLayout, LargeFile, Region
from asyncckpt.format.write_request import ANY_PLAN, CopiedRank
from asyncckpt.planning.dcp_plan import DcpFolder, DcpPlan
from asyncckpt.planning.draft import Draft, StoredPlan, make_plans, restored_plan
from asyncckpt.planning.file_set import Content, FileSet
from asyncckpt.planning.layout import DataLayout
from asyncckpt.planning.part_plan import PartPlan
from asyncckpt.planning.replicas import Sample
from asyncckpt.planning.safetensors_plan import SafetensorsFile, SafetensorsPlan
from asyncckpt.planning.torch_file_plan import TorchFileContents, TorchFilePlan
from asyncckpt.ranks.group import Group

_Large: TypeAlias = DcpFolder | SafetensorsFile | TorchFileContents


class Contents:
    """The contents of a save: ``large`` files and folders, and ``small`` files, by name.

    Archives of ``torch.save`` come last among the large files, because the worker completes them. All other large files
    consist of the trainer's bytes alone. ``pickle_bytes``: the length of the pickle of each archive, in bytes.
    """

    def __init__(self, kind: str | None, contents: Mapping[str, Content], *, is_held: bool = False) -> None:
        """Divide the ``contents`` of a set. ``kind``, ``is_held``: see ``FileSet``; kind None: this is a state dict."""
        self.kind, self.is_held = kind, is_held
        found: dict[type, dict[str, _Large]] = {DcpFolder: {}, SafetensorsFile: {}, TorchFileContents: {}}
        self.small: dict[str, bytes] = {}
        for name, content in contents.items():
            if isinstance(content, bytes):
                self.small[name] = content
            else:
                # A folder keeps the states of its values. The next save of the same set has to ask for them again.
                found[type(content)][name] = replace(content) if isinstance(content, DcpFolder) else content
        self.large = {name: content for of_kind in found.values() for name, content in of_kind.items()}
        self.pickle_bytes = tuple(len(each.pickle) for each in contents.values() if isinstance(each, TorchFileContents))

    @classmethod
    def of(cls, given: FileSet | DcpFolder | TorchFileContents) -> Contents:
        """Return the contents of a set, of a state dict, or of a single file. Raises the error of a set that has one.

        Single files with storages of other sizes get memory of their own.
        """
        match given:
            case DcpFolder():
                return cls(None, {"": given})
            case TorchFileContents():
                return cls(f"{given.alignment} {hash(tuple(given.sizes))}", {"": given})
            case FileSet():
                if given.error is not None:
                    raise given.error
                return cls(given.kind, given.contents, is_held=given.is_held)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for contents that may fit the same plan."""
        options = (content.key if isinstance(content, DcpFolder) else None for content in self.large.values())
        return self.kind, self.is_held, *zip(self.large, map(type, self.large.values()), options, strict=True)

    @property
    def names(self) -> frozenset[str]:
        """The names that a plan for these contents will have, as far as they are known."""
        return self.folders()[""].names if self.kind is None else _names_of_set(self.kind, self.large)

    def folders(self) -> dict[str, DcpFolder]:
        """Return the folders of DCP, by name."""
        return {name: content for name, content in self.large.items() if isinstance(content, DcpFolder)}


def _names_of_set(kind: str, parts: Iterable[str]) -> frozenset[str]:
    """Return the names of the parts of a set, each with the kind of the set."""
    return frozenset(f"{kind}\0{name}" for name in parts)


def make_plan(contents: Contents, group: Group, number: int, assumed: tuple[str, ...]) -> Plan:
    """Plan a save. All ranks plan the folders of DCP together, and all ranks raise an error of any rank there.

    Args:
        contents: The contents of this rank.
        group: The ranks, which all call this.
        number: The number of the plan: new, and the same on all ranks.
        assumed: ``Config.assume_unchanged``.

    Raises:
        UnsavableStateError: A value cannot be saved.
        RankFailedError, SaveTimeoutError: Another rank failed, or the ranks did not meet in time.
    """
    drafts = {name: _draft(its, name, group, assumed) for name, its in contents.folders().items()}
    make_plans(list(drafts.values()), group, number)
    parts: dict[str, PartPlan] = {}
    for name, content in contents.large.items():
        match content:
            case DcpFolder():
                parts[name] = drafts[name].plan
            case SafetensorsFile():
                parts[name] = SafetensorsPlan.of(content)
            case TorchFileContents():
                parts[name] = TorchFilePlan.of(content)
    return Plan(number if parts else ANY_PLAN, contents.kind, parts, is_held=contents.is_held)


def restore_plan(
    contents: Contents, stored: StoredPlan, group: Group, number: int, assumed: tuple[str, ...]
) -> Plan | None:
    """Return the plan of a checkpoint for a new state dict, or None if the plan does not fit.

    Args:
        contents, group, number, assumed: See ``make_plan``.
        stored: The plan as the checkpoint has it.

    Raises:
        UnsavableStateError: A value cannot be saved.
    """
    if contents.kind is not None:
        return None
    plan = restored_plan(_draft(contents.folders()[""], "", group, assumed), stored, number)
    return None if plan is None else Plan(number, None, {"": plan})


def _draft(folder: DcpFolder, name: str, group: Group, assumed: tuple[str, ...]) -> Draft:
    return Draft(folder, name, assumed, group.rank, group.world_size)


@dataclass
class Plan:
    """The layout of saves of one structure.

    Attributes:
        number: Unique among plans, and the same on all ranks. ``ANY_PLAN`` if there is no part.
        kind: See ``FileSet``; None: this is the plan of a state dict.
        is_held: See ``FileSet``.
        parts: The plans of the large files and folders, by name, in the order of the image.
        copied_ranks: The ranks of other hosts that this rank's worker keeps copies of.
    """

    number: int
    kind: str | None
    parts: Mapping[str, PartPlan]
    is_held: bool = False
    copied_ranks: tuple[CopiedRank, ...] = ()

    @cached_property
    def layout(self) -> DataLayout:
        """The places of the items of all parts in the image."""
        return DataLayout.joined([part.layout for part in self.parts.values()])

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the values of a state dict, or of the parts of a set. A new plan replaces one of these names."""
        return self.folders()[""].names if self.kind is None else _names_of_set(self.kind, self.parts)

    def folders(self) -> dict[str, DcpPlan]:
        """Return the plans of the folders of DCP, by name."""
        return {name: part for name, part in self.parts.items() if isinstance(part, DcpPlan)}

    @property
    def is_state(self) -> bool:
        """Whether this is the plan of a state dict. Then other hosts can keep copies of the whole checkpoint."""
        return self.kind is None

    @property
    def devices(self) -> object | None:
        """See ``Forms.devices``; None: unknown."""
        return next(iter(self.parts.values())).devices if len(self.parts) == 1 else None

    def capture(self, contents: Contents, *, is_raw: bool = False) -> Sequence[torch.Tensor]:
        """Return the tensors of all parts, in the order of the layout. See ``PartPlan.capture``."""
        captured = [self.parts[name].capture(content, is_raw=is_raw) for name, content in contents.large.items()]
        return captured[0] if len(captured) == 1 else list(chain.from_iterable(captured))

    def is_frozen_as(self, contents: Contents) -> bool:
        """Return True if the same parameters of modules are frozen as when the plan was made."""
        return all(contents.folders()[name].frozen == part.frozen for name, part in self.folders().items())

    def sample(self, contents: Contents, number: int) -> Sample:
        """Return the digests that ranks compare in save ``number``, for the folders that they write together."""
        found: list[tuple[str, object]] = []
        for part, content in contents.large.items():
            values = self.parts[part].replicas(content, number)
            found += [(f"{part}/{name}" if part else name, value) for name, value in values]
        return Sample(found)

    def note_end(self, *, is_committed: bool) -> None:
        """Note that a save by this plan has ended."""
        for part in self.parts.values():
            part.note_end(is_committed=is_committed)

    def own_pickles(self) -> Iterator[tuple[str, bytes]]:
        """Yield the names and bytes of the objects that pickle by code of their own, such as classes and arrays."""
        return chain.from_iterable(part.objects.own_pickles() for part in self.parts.values())

    def forget_slots(self) -> None:
        """Note that the slots are in other memory now, which holds no objects."""
        for part in self.parts.values():
            part.objects.forget_slots()

    def write_objects(self, slot: int, image: memoryview) -> None:
        """Write the objects that were captured last into a slot with this ``image``."""
        begin = 0
        for part in self.parts.values():
            end = begin + len(part.layout.objects)
            part.objects.write(slot, image, self.layout.objects[begin:end])
            begin = end

    def constants(self) -> dict[str, bytes | memoryview]:
        """Return the bytes that are the same in every save, by the name of their region in the segment."""
        return {
            f"{number} {constant}": data
            for number, (name, part) in enumerate(self.parts.items())
            for constant, data in part.constants(name).items()
        }

    def image_layout(self, slots: tuple[int, ...], regions: Mapping[str, Region]) -> ImageLayout:
        """Return the layout of a segment with images at ``slots`` (offsets in bytes), for the worker."""
        files: list[LargeFile] = []
        metadata: list[tuple[str, Region]] = []
        begin = 0
        for number, (name, part) in enumerate(self.parts.items()):
            start = f"{number} "
            its = {key.removeprefix(start): region for key, region in regions.items() if key.startswith(start)}
            files += part.files(name, begin, its)
            if isinstance(part, DcpPlan):
                metadata.append((name, its["metadata"]))
            begin += part.layout.nbytes
        is_held = self.is_held or "" in self.folders()
        return ImageLayout(tuple(files), self.layout.nbytes, slots, tuple(metadata), is_held)
