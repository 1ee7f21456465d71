"""Lay out a checkpoint as if one rank had saved it: a data file, its index, DCP's metadata and the manifest."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence

import torch
import xxhash
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncckpt.exporting.batches import FilePlan, PlacedTensor, Window
from asyncckpt.exporting.selection import Selection
from asyncckpt.format.index import Index, Item, spans
from asyncckpt.format.manifest import METADATA_NAME, Manifest, data_name, index_name, of_all_ranks, own_version
from asyncckpt.format.storage_meta import storage_meta
from asyncckpt.planning.layout import DataLayout, TensorSpec
from asyncckpt.planning.metadata import pickle_metadata
from asyncckpt.storage import step_of
from asyncckpt.storage.history import time_of_creation
from asyncckpt.threads import without_gc


class CheckpointTarget:
    """The layout of a checkpoint. ``plan`` is its data file. The other files are known once that file is written."""

    def __init__(self, selection: Selection, pickles: Mapping[str, bytes]) -> None:
        """Lay out the selected values. ``pickles`` has the objects, by the names under which they are stored."""
        self._selection = selection
        numbers = {name: number for number, name in enumerate(selection.tensors)}
        specs = [
            TensorSpec(dtype, tensor.shape, numbers[selection.tied[name]] if name in selection.tied else None, name)
            for name, (tensor, dtype) in selection.tensors.items()
        ]
        objects = [pickles[stored] for stored in selection.objects.values()]
        layout = DataLayout.lay_out(specs, list(map(len, objects)))
        self._items = [
            Item(spec.name, "tensor", str(spec.dtype).removeprefix("torch."), [*spec.shape], [0] * len(spec.shape), *at)
            for spec, at in zip(specs, layout.tensors, strict=True)
        ]
        self._items += [
            Item(name, "object", "", [], [], *at) for name, at in zip(selection.objects, layout.objects, strict=True)
        ]
        self._sums = _SpanSums(spans((item.at for item in self._items), layout.lengths[0]))
        constants = [
            *layout.constants,
            *((place.at, data) for place, data in zip(layout.objects, objects, strict=True)),
        ]
        placed = [
            PlacedTensor(tensor, dtype, place.payload_at, place.at + place.nbytes)
            for (name, (tensor, dtype)), place in zip(selection.tensors.items(), layout.tensors, strict=True)
            if name not in selection.tied
        ]
        covered = [(at, at + len(data)) for at, data in constants]
        gaps = _gaps([*covered, *((each.payload_at, each.payload_end) for each in placed)], layout.lengths[0])
        self.plan = FilePlan(data_name(0), placed, sorted([*constants, *gaps]), layout.lengths[0], self._sums.add)

    def metadata(self, path: str, attempt: str) -> bytes:
        """Return DCP's metadata for a checkpoint at ``path``. ``attempt`` is unique to the checkpoint."""
        known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for item in self._items:
            offsets = None
            if item.kind == "tensor":
                offsets, size = torch.Size(item.offsets), torch.Size(item.shape)
                dtype = self._selection.tensors[item.name][1]
                known[item.name] = TensorStorageMetadata(
                    TensorProperties(dtype=dtype), size, [ChunkStorageMetadata(offsets, size)]
                )
            else:
                known[item.name] = BytesStorageMetadata()
            storage[MetadataIndex(item.name, offsets)] = _StorageInfo(self.plan.name, item.at, item.nbytes)
        metadata = Metadata(known, dict(self._selection.keys), storage, StorageMeta())
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        return pickle_metadata(metadata)[:-1] + storage_meta(path, attempt)

    def manifest(self, path: str, attempt: str, small: Mapping[str, bytes], seconds: float) -> bytes:
        """Return the manifest of a checkpoint at ``path``, with the data file and the files ``small``."""
        files: dict[str, dict[str, object]] = {
            self.plan.name: {"bytes": self.plan.nbytes, "index": index_name(0)},
            **{name: {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)} for name, data in small.items()},
        }
        step = step_of(path)
        return Manifest(
            attempt=attempt,
            step=step,
            created=time.time() if step is None else time_of_creation(os.path.dirname(path)),
            world_size=1,
            keep=False,
            nbytes=self.plan.nbytes + sum(map(len, small.values())),
            files=files,
            timings=of_all_ranks([{"write_s": seconds}]),
            version=own_version(),
        ).encode()

    @without_gc
    def small_files(self, path: str, attempt: str) -> dict[str, bytes]:
        """Return the other files that the manifest names. Call this after the data file is written."""
        index = Index.head(self.plan.name, self._items) + Index.tail(self.plan.nbytes, self._sums.found)
        return {index_name(0): index, METADATA_NAME: self.metadata(path, attempt)}


class _SpanSums:
    """The checksums of the spans of a file, computed part by part."""

    def __init__(self, bounds: array[int]) -> None:
        self._bounds = bounds
        self._digest = xxhash.xxh3_64()
        self.found = array("Q")

    def add(self, window: Window) -> None:
        """Add the next part."""
        begin = window.begin
        while begin < window.end:
            bound = self._bounds[len(self.found) + 1]
            end = min(bound, window.end)
            self._digest.update(window[begin:end])
            if end == bound:
                self.found.append(self._digest.intdigest())
                self._digest.reset()
            begin = end


def _gaps(covered: Sequence[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield zeros for all bytes that are not ``covered``. Each covered range is a first byte and an end."""
    end = 0
    for first, last in sorted(covered):
        if first > end:
            yield end, bytes(first - end)
        end = max(end, last)
    if end < nbytes:
        yield end, bytes(nbytes - end)
