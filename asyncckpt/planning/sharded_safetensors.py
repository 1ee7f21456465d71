"""The plan of safetensors files that all ranks write together: each its parts of the tensors, where they belong.

DCP's planner says who has which part of a tensor. The first rank divides the tensors among files and lays these out, as
if it had all of them; what a rank writes there are runs of bytes, rows of its tensors or parts of rows.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.draft import Draft, DraftInput
from asyncckpt.planning.file_set import ShardedSafetensors
from asyncckpt.planning.layout import DataLayout, Place, TensorSpec
from asyncckpt.planning.plan import FlatCapture, PlannerCapture, split_items
from asyncckpt.planning.replicas import Replicas
from asyncckpt.planning.safetensors_plan import Form, check_apart, check_metadata, in_order, lay_out
from asyncckpt.planning.safetensors_shards import shard
from asyncckpt.planning.structure import Fingerprint, stateful_to_dict
from asyncckpt.shm.segment import round_up
from asyncckpt.worker.extent import Extent, packed
from asyncckpt.worker.index import Index, Item, spans
from asyncckpt.worker.segment_layout import JointData, Region

# In the image. Of every dtype more than it needs; and a row of small parts is copied from devices at once.
_ALIGNMENT = 64


class _File(NamedTuple):
    """A file of ``nbytes``, which begins with ``header``; only the first rank, which writes that, knows it."""

    name: str
    nbytes: int
    header: bytes


class _Places(NamedTuple):
    """What the first rank tells another: which of its items it writes (see ``kept_items``), the ``files``, and of each
    tensor that it has, by its name, the number of its file and its first byte there, and what it is: its stored dtype,
    and its shape.

    ``beside``: small files, for the first rank alone.
    """

    kept: bytes | SavePlan
    files: Sequence[_File]
    begins: Mapping[str, tuple[int, int]]
    forms: Mapping[str, Form]
    beside: Mapping[str, bytes]


class _Part(NamedTuple):
    """A rank's part of a file, ``nbytes`` from ``begin`` of the image."""

    path: str
    file_bytes: int
    begin: int
    nbytes: int
    index_head: bytes
    spans: array[int]
    extents: array[int]


@dataclass
class ShardedSafetensorsPlan:
    """How the parts of one rank are laid out: one after the other, those of each file from a page on.

    ``beside``: constant small files, by their names, on the first rank.
    """

    layout: DataLayout
    values: FlatCapture | PlannerCapture
    fingerprint: Fingerprint
    parts: Sequence[_Part]
    beside: Mapping[str, bytes]
    replicas: Replicas

    def capture(self, content: ShardedSafetensors) -> Sequence[torch.Tensor]:
        """The caller's own tensors in the order of the layout. Raises ``StructureChanged``, ``UnsavableStateError``."""
        tensors, _ = self.values.take(stateful_to_dict(content.state_dict), None)
        self.fingerprint.check(tensors)
        return tensors

    def constants(self) -> dict[str, bytes | memoryview]:
        """What the worker has to know of the layout, by the name of its region in the segment."""
        constants: dict[str, bytes | memoryview] = {f"beside {name}": data for name, data in self.beside.items()}
        for number, part in enumerate(self.parts):
            constants[f"index_head {number}"] = part.index_head
            constants[f"spans {number}"] = memoryview(part.spans).cast("B")
            constants[f"extents {number}"] = memoryview(part.extents).cast("B")
        return constants

    def large_files(self, begin: int, regions: Mapping[str, Region]) -> Iterator[JointData]:
        """The parts, of which the first begins at ``begin`` of the image, in bytes."""
        for number, part in enumerate(self.parts):
            yield JointData(
                begin=begin + part.begin,
                nbytes=round_up(part.nbytes),
                length=part.nbytes,
                index_head=regions[f"index_head {number}"],
                spans=regions[f"spans {number}"],
                extents=regions[f"extents {number}"],
                path=part.path,
                file_bytes=part.file_bytes,
            )


class ShardedSafetensorsDraft(Draft):
    """A plan being made, with all ranks."""

    def __init__(self, name: str, content: ShardedSafetensors, rank: int, world_size: int) -> None:
        """Plan nothing yet.

        Args:
            name: Of the file, if it becomes one.
            content: What stands in it.
            rank, world_size: As of ``Draft``.

        Raises:
            UnsavableStateError: The metadata is not text.
        """
        check_metadata(content.metadata)
        given = DraftInput(stateful_to_dict(content.state_dict), None, folder=name)
        super().__init__(given, rank, world_size)
        self._file, self._content = name, content

    def local_plan(self) -> SavePlan:
        """What this rank has. No two of its tensors share memory: who loads the file would have them apart."""
        local = super().local_plan()
        tensors = {name: value for name, value in self.values().items() if isinstance(value, torch.Tensor)}
        check_apart({name: getattr(value, "_local_tensor", value) for name, value in tensors.items()})
        return local

    def global_plans(self, plans: list[SavePlan]) -> list[Any]:
        """First rank: who writes what, and where."""
        ours = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
        kept = super().global_plans(plans)
        forms: dict[str, Form] = {}
        for name in ours:
            about = self.global_metadata.state_dict_metadata[name]
            if not isinstance(about, TensorStorageMetadata):
                raise UnsavableStateError(
                    f"{name!r} is no tensor with plain bytes, and safetensors stores such tensors alone"
                )
            forms[name] = self._content.stored_as(about.properties.dtype), tuple(about.size)
        files: list[_File] = []
        places: dict[str, tuple[int, int]] = {}
        divided, beside = shard(self._file, forms, self._content.max_shard_bytes)
        for number, (file, names) in enumerate(divided.items()):
            order = in_order({name: forms[name][0] for name in names})
            header, begins = lay_out({name: forms[name] for name in order}, self._content.metadata)
            nbytes = len(header) + sum(math.prod(forms[name][1]) * forms[name][0].itemsize for name in names)
            files.append(_File(file, nbytes, header))
            places |= {name: (number, begin) for name, begin in begins.items()}
        answers = []
        for rank, (its_kept, local) in enumerate(zip(kept, plans, strict=True)):
            known = files if rank == 0 else [each._replace(header=b"") for each in files]
            its = dict.fromkeys(item.index.fqn for item in local.items)
            answers.append(
                _Places(
                    kept=its_kept,
                    files=known,
                    begins={name: places[name] for name in its},
                    forms={name: forms[name] for name in its},
                    beside=beside if rank == 0 else {},
                )
            )
        return answers

    def lay_out(self, final: _Places, number: int) -> None:
        """Lay out this rank's parts."""
        items, _ = split_items(self.finished(self.final_plan(final.kept)))
        ordered = sorted(items, key=lambda item: _first_byte(item, final.begins))
        values = self.capture_of(ordered)
        tensors = self.taken(values)[0]
        self._check_forms(final, ordered, tensors)
        layout, parts = _lay_out_parts(final, ordered, tensors, self._content)
        self.plan = ShardedSafetensorsPlan(
            layout=layout,
            values=values,
            fingerprint=Fingerprint(tensors, []),
            parts=parts,
            beside=final.beside,
            replicas=self.replicas(number),
        )

    def _check_forms(self, final: _Places, items: Sequence[WriteItem], tensors: Sequence[torch.Tensor]) -> None:
        """That what this rank has, also where another writes it, is of the tensors that the file is laid out for."""
        for item in self.local.items:
            name, about = item.index.fqn, item.tensor_data
            dtype, shape = final.forms[name]
            if about is None or tuple(about.size) != shape or self._content.stored_as(about.properties.dtype) != dtype:
                raise UnsavableStateError(f"{name!r} has another dtype or shape on this rank than on others")
        for item, tensor in zip(items, tensors, strict=True):
            stored = self._content.stored_as(tensor.dtype), tuple(tensor.shape)
            if stored != (final.forms[item.index.fqn][0], _box(item)[2]):
                raise UnsavableStateError(
                    f"{item.index.fqn!r} is a part of {_box(item)[2]} elements of {final.forms[item.index.fqn][0]}, and"
                    f" its memory on this rank has {tuple(tensor.shape)} of {tensor.dtype}: its DTensor is not true"
                )

    def metadata(self, places: list[Any]) -> list[bytes]:
        """There is no ``.metadata``."""
        return [b""] * len(places)

    def finish(self, metadata: bytes) -> None:
        """All was known before."""


def _first_byte(item: WriteItem, begins: Mapping[str, tuple[int, int]]) -> tuple[int, int, int]:
    """The file, the tensor in it, and the part in that."""
    file, begin = begins[item.index.fqn]
    shape, offsets, _ = _box(item)
    return file, begin, sum(at * math.prod(shape[number + 1 :]) for number, at in enumerate(offsets))


def _box(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The shape of the whole tensor, and which part of it the item is: offsets and shape, in elements."""
    about = item.tensor_data
    if about is None:
        raise UnsavableStateError(f"{item.index.fqn!r} is no tensor, and safetensors stores tensors alone")
    return tuple(about.size), tuple(about.chunk.offsets), tuple(about.chunk.sizes)


def _lay_out_parts(
    final: _Places,
    items: Sequence[WriteItem],
    tensors: Sequence[torch.Tensor],
    content: ShardedSafetensors,
) -> tuple[DataLayout, list[_Part]]:
    """Place what this rank has; ``items`` in the order of the files."""
    specs: list[TensorSpec] = []
    places: list[Place] = []
    constants: list[tuple[int, bytes]] = []
    parts: list[_Part] = []
    begin, its = 0, iter(zip(items, tensors, strict=True))
    following = next(its, None)
    for number, file in enumerate(final.files):
        part = _PartLayout(begin, file)
        while following is not None and final.begins[following[0].index.fqn][0] == number:
            item, tensor = following
            spec = TensorSpec(content.stored_as(tensor.dtype), tuple(tensor.shape), name=item.index.fqn)
            specs.append(spec)
            places.append(part.add(item, spec, final.begins[item.index.fqn][1]))
            following = next(its, None)
        constants += part.constants
        if part.nbytes:
            parts.append(part.finished())
            begin = round_up(begin + part.nbytes)
    converted = [spec.dtype != tensor.dtype for spec, tensor in zip(specs, tensors, strict=True)]
    begins = [part.begin for part in parts] or [0]
    return DataLayout(specs, places, [], begin, constants, begins, converted), parts


class _PartLayout:
    """A rank's part of a ``file``, from ``begin`` of the image on, as tensors are added to it."""

    def __init__(self, begin: int, file: _File) -> None:
        """It has the header, where that is known."""
        self._begin, self._file = begin, file
        self._items: list[Item] = []
        self._extents: list[Extent] = []
        self.nbytes = 0
        self.constants: list[tuple[int, bytes]] = []
        if file.header:
            self.constants.append((begin, file.header))
            self._extend([Extent(0, len(file.header), 1, 0, len(file.header))])

    def add(self, item: WriteItem, spec: TensorSpec, at: int) -> Place:
        """The next tensor, or a part of it, whose first byte, of all of it, stands ``at`` in the file."""
        shape, offsets, sizes = _box(item)
        nbytes = math.prod(sizes) * spec.dtype.itemsize
        extents = list(extents_of(self.nbytes, at, spec.dtype.itemsize, shape, offsets, sizes))
        is_next = bool(self._extents and extents) and self._extents[-1].end == extents[0].begin
        if extents and not (is_next and (self._begin + self.nbytes) % spec.dtype.itemsize == 0):
            gap = -self.nbytes % _ALIGNMENT
            # Checksums are of all of the part, and who reads the file sees zeros here.
            self.constants += [(self._begin + self.nbytes, bytes(gap))] if gap else []
            self.nbytes += gap
            extents = [extent._replace(at=extent.at + gap) for extent in extents]
        place = Place(self.nbytes, nbytes, self.nbytes, nbytes)
        self._extend(extents)
        dtype = str(spec.dtype).removeprefix("torch.")
        self._items.append(Item(f"{self._file.name}/{item.index.fqn}", "tensor", dtype, [*sizes], [*offsets], *place))
        return place.since(-self._begin)

    def finished(self) -> _Part:
        """Nothing is added any more."""
        file = self._file
        head = Index.head(file.name, self._items, self._extents)
        bounds = spans((item.at for item in self._items), self.nbytes)
        return _Part(file.name, file.nbytes, self._begin, self.nbytes, head, bounds, packed(self._extents))

    def _extend(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            last = self._extents[-1] if self._extents else None
            self.nbytes = extent.at + extent.nbytes
            is_next = last is not None and (last.end, last.at + last.nbytes) == (extent.begin, extent.at)
            if last is not None and is_next and last.runs == extent.runs == 1:
                run_bytes = last.run_bytes + extent.run_bytes
                self._extents[-1] = last._replace(run_bytes=run_bytes, stride=run_bytes)
            else:
                self._extents.append(extent)


def extents_of(
    at: int, begin: int, itemsize: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[Extent]:
    """Where a part of a tensor stands.

    Args:
        at: Its first byte in the image's part of the file.
        begin: The first byte of the whole tensor in the file.
        itemsize: Of an element, in bytes.
        shape: Of the whole tensor.
        offsets, sizes: Of the part, in elements.
    """
    if 0 in sizes:
        return
    strides = [itemsize * math.prod(shape[number + 1 :]) for number in range(len(shape))]
    begin += sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    # From the last dimension on, as long as all of each is there: that is one run.
    number, run = len(shape), itemsize
    while number > 0:
        number -= 1
        run *= sizes[number]
        if sizes[number] != shape[number]:
            break
    # Then one dimension of runs, and with it those above it that go on at the same distance.
    count, stride = 1, run
    while number > 0 and count == 1:
        number -= 1
        count, stride = sizes[number], strides[number] if sizes[number] > 1 else run
    while number > 0 and sizes[number] == shape[number]:
        number -= 1
        count *= sizes[number]
    for each in product(*(range(size) for size in sizes[:number])):
        first = begin + sum(place * stride for place, stride in zip(each, strides, strict=False))
        yield Extent(at, run, count, first, stride)
        at += run * count
