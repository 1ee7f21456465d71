"""Plan a set of files. Each large file has a plan. The large files stand in one image, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from asyncckpt.format.segment_layout import ArchiveData, FileSetLayout, LargeFile, Region, SafetensorsData
from asyncckpt.format.write_request import ANY_PLAN
from asyncckpt.planning.draft import Draft, DraftInput, make_plans
from asyncckpt.planning.file_set import DcpFolder, FileSet, SafetensorsFile
from asyncckpt.planning.layout import DataLayout, Place
from asyncckpt.planning.plan import CheckpointPlan
from asyncckpt.planning.replicas import Sample
from asyncckpt.planning.safetensors_plan import SafetensorsPlan
from asyncckpt.planning.structure import StructureChanged, stateful_to_dict
from asyncckpt.planning.torch_file_plan import TorchFileContents, TorchFilePlan
from asyncckpt.ranks.group import Group

_Contents = DraftInput | SafetensorsFile | TorchFileContents
_PartPlan = CheckpointPlan | SafetensorsPlan | TorchFilePlan


class FileSetContents:
    """A set of files, divided into ``large`` and ``small`` files.

    Archives of ``torch.save`` come last among the large files, because the worker completes them. All other large files
    consist of the trainer's bytes alone.
    """

    def __init__(self, files: FileSet) -> None:
        """Divide ``files``, and call ``state_dict()`` of all ``Stateful`` values."""
        self.kind = files.kind
        folders: dict[str, _Contents] = {}
        tensors: dict[str, _Contents] = {}
        archives: dict[str, _Contents] = {}
        self.small: dict[str, bytes] = {}
        for name, content in files.contents.items():
            match content:
                case DcpFolder(state_dict, planner):
                    folders[name] = DraftInput(stateful_to_dict(state_dict), planner, folder=name)
                case SafetensorsFile():
                    tensors[name] = content
                case TorchFileContents():
                    archives[name] = content
                case bytes():
                    self.small[name] = content
        self.folders = list(folders)
        self.large = {**folders, **tensors, **archives}

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for sets that may fit the same plan."""
        large = (
            (name, type(content), content.key if isinstance(content, DraftInput) else None)
            for name, content in self.large.items()
        )
        return self.kind, *large

    @property
    def names(self) -> frozenset[str]:
        """The names of the large files, each with the kind of the set."""
        return frozenset(f"{self.kind}\0{name}" for name in self.large)

    @property
    def pickle_bytes(self) -> tuple[int, ...]:
        """The length of the pickle of each archive, in bytes."""
        return tuple(len(each.pickle) for each in self.large.values() if isinstance(each, TorchFileContents))


def make_file_set_plan(contents: FileSetContents, group: Group, number: int, assumed: tuple[str, ...]) -> FileSetPlan:
    """Plan a set of files. All ranks plan the folders of DCP together, and all ranks raise an error of any rank there.

    Args:
        contents: The set of this rank.
        group: The ranks, which all call this.
        number: The number of the plan: new, and the same on all ranks.
        assumed: The patterns of frozen names in folders of DCP, as in ``DraftInput``.

    Raises:
        UnsavableStateError: A value cannot be saved.
        RankFailedError, SaveTimeoutError: Another rank failed, or the ranks did not meet in time.
    """
    drafts = {
        name: Draft(content._replace(assumed=assumed), group.rank, group.world_size)
        for name, content in contents.large.items()
        if isinstance(content, DraftInput)
    }
    make_plans(list(drafts.values()), group, number)
    parts: dict[str, _PartPlan] = {}
    for name, content in contents.large.items():
        match content:
            case DraftInput():
                parts[name] = drafts[name].plan
            case SafetensorsFile(tensors, metadata):
                parts[name] = SafetensorsPlan.of(tensors, metadata)
            case TorchFileContents():
                parts[name] = TorchFilePlan.of(content, number)
    layout = DataLayout.joined([each.layout for each in parts.values()])
    return FileSetPlan(number if parts else ANY_PLAN, parts, layout, contents.names)


@dataclass
class FileSetPlan:
    """The layout of sets of one structure. ``parts``: the plans of the large files, by name, in the order of the image.

    If there are no large files, ``number`` is ``ANY_PLAN``, which fits every plan of the other ranks.
    """

    number: int
    parts: Mapping[str, _PartPlan]
    layout: DataLayout
    names: frozenset[str]  # a new plan replaces a plan with the same names

    @cached_property
    def objects(self) -> _SetObjects:
        """The objects of all large files."""
        return _SetObjects([each for each in self.parts.values() if isinstance(each, CheckpointPlan | TorchFilePlan)])

    def capture(self, contents: FileSetContents) -> Sequence[torch.Tensor]:
        """Return the tensors of all large files, in the order of the layout, and take the objects into ``objects``.

        Raises ``StructureChanged`` if this plan does not fit the set, ``UnsavableStateError`` if it cannot be saved.
        """
        tensors: list[torch.Tensor] = []
        for content, part in zip(contents.large.values(), self.parts.values(), strict=True):
            match content, part:
                case DraftInput(), CheckpointPlan():
                    tensors += part.capture(content.state_dict, content.planner)
                case SafetensorsFile(), SafetensorsPlan():
                    tensors += part.capture(content.tensors, content.metadata)
                case TorchFileContents(), TorchFilePlan():
                    tensors += part.capture(content)
                case _:
                    raise StructureChanged("a file of another kind")
        return tensors

    def sample(self, contents: FileSetContents, number: int) -> Sample:
        """Return the digests that ranks compare in save ``number``, for the folders that they write together."""
        found: list[tuple[str, object]] = []
        for (file, content), part in zip(contents.large.items(), self.parts.values(), strict=True):
            if isinstance(content, DraftInput) and isinstance(part, CheckpointPlan):
                values = part.replicas.values(partial(stateful_to_dict, content.state_dict), number)
                found += [(f"{file}/{name}", value) for name, value in values]
        return Sample(found)

    def note_end(self, *, is_committed: bool) -> None:
        """Note that a save by this plan has ended; see ``CheckpointPlan.note_end``."""
        for part in self.parts.values():
            if isinstance(part, CheckpointPlan):
                part.note_end(is_committed=is_committed)

    def constants(self) -> dict[str, bytes | memoryview]:
        """Return the bytes that are the same in every save, by the name of their region in the segment."""
        return {
            f"{name} {part}": data
            for part, (file, plan) in enumerate(self.parts.items())
            for name, data in _constants(file, plan).items()
        }

    def segment_layout(self, slots: tuple[int, ...], regions: Mapping[str, Region]) -> FileSetLayout:
        """Return the layout of a segment with images at ``slots`` (offsets in bytes), for the worker."""
        files: list[LargeFile] = []
        metadata: list[tuple[str, Region]] = []
        begin = 0
        for number, (name, plan) in enumerate(self.parts.items()):
            end = f" {number}"
            its = {key.removesuffix(end): region for key, region in regions.items() if key.endswith(end)}
            match plan:
                case CheckpointPlan():
                    files += plan.large_files(begin, its)
                    metadata.append((name, its["metadata"]))
                case SafetensorsPlan():
                    files.append(SafetensorsData(begin, plan.layout.nbytes, path=name, length=plan.length, **its))
                case TorchFilePlan():
                    files.append(ArchiveData(begin, plan.layout.nbytes, path=name, **its))
            begin += plan.layout.nbytes
        return FileSetLayout(tuple(files), self.layout.nbytes, slots, tuple(metadata))


class _SetObjects:
    """The objects of all plans of a set, with the interface of ``StoredObjects``."""

    def __init__(self, plans: Sequence[CheckpointPlan | TorchFilePlan]) -> None:
        self._plans = plans

    def forget_slots(self) -> None:
        """Note that the slots are in other memory now."""
        for plan in self._plans:
            plan.objects.forget_slots()

    def own_pickles(self) -> Iterator[tuple[str, bytes]]:
        """Yield ``StoredObjects.own_pickles`` of all folders of DCP."""
        for plan in self._plans:
            if isinstance(plan, CheckpointPlan):
                yield from plan.objects.own_pickles()

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """Write the objects of all plans; see ``StoredObjects.write``."""
        begin = 0
        for plan in self._plans:
            end = begin + len(plan.layout.objects)
            plan.objects.write(slot, image, places[begin:end])
            begin = end


def _constants(file: str, plan: _PartPlan) -> dict[str, bytes | memoryview]:
    match plan:
        case SafetensorsPlan():
            head, bounds = plan.index(file)
            return {"index_head": head, "spans": _cast(bounds)}
        case TorchFilePlan():
            return {"index_head": plan.index_head(file), **plan.constants()}
        case _:
            return plan.constants()


def _cast(numbers: array[int]) -> memoryview:
    return memoryview(numbers).cast("B")
