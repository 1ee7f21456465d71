"""What others have stored, which has no checksums of ours: what can be checked of it, and what cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.loading.contents import Shard, Value
from asyncckpt.loading.data_file import read_plain
from asyncckpt.report.archives import CheckedRecords, check_records
from asyncckpt.report.formats import number
from asyncckpt.report.places import Kind, OthersKind, is_archive, is_legacy
from asyncckpt.worker.manifest import METADATA_NAME, is_index
from asyncckpt.worker.storage import storage_for

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from asyncckpt.exporting.stored import StoredState

_END_BYTES = 64
_PREFIX_BYTES = 8


class Damage(NamedTuple):
    """A file, and what is wrong with it."""

    file: str
    what: str


@dataclass
class Verified:
    """What a check has found: what was ``checked``, what ``unchecked``, both in words, and what is damaged."""

    path: str
    kind: Kind
    nbytes: int = 0
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "bytes": self.nbytes,
            "ok": not self.damages,
            "checked": self.checked,
            "unchecked": self.unchecked,
            "damages": [each._asdict() for each in self.damages],
        }

    def take_records(self, found: CheckedRecords) -> None:
        """Say how the records of archives were checked."""
        self.checked.append(f"the CRC-32 of {number(found.compared, 'record')} of torch.save")
        if found.without:
            self.unchecked.append(f"the bytes of {number(found.without, 'record')} that have no CRC-32")


def verify_others(path: str, kind: OthersKind, progress: Callable[[int], object]) -> Verified:
    """Check what can be checked of what others have stored.

    Args:
        path: Where it is.
        kind: What it is.
        progress: Is called with the bytes read since the last call.

    Raises:
        CheckpointError: Nothing of it can be checked, or it cannot be read.
    """
    verified = Verified(path, kind)
    try:
        if kind == "dcp":
            _verify_dcp(verified, progress)
        elif kind == "torch.save":
            _verify_torch_file(verified, progress)
        else:
            _verify_safetensors(verified)
    except DamagedCheckpointError as error:
        verified.damages.append(Damage(error.path or path, error.message))
    return verified


def _verify_torch_file(verified: Verified, progress: Callable[[int], object]) -> None:
    storage, path = storage_for(verified.path), verified.path
    if is_legacy(path):
        raise CheckpointError(
            "torch.save wrote this in its form of before torch 1.6, without checksums: nothing can verify it", path=path
        )
    verified.nbytes, found = storage.size(path) or 0, CheckedRecords()
    with closing(storage.open(path)) as file:
        check_records(file, 0, verified.nbytes, found, progress)
    verified.damages += [Damage(path, damage) for damage in found.damages]
    verified.take_records(found)
    verified.unchecked.append("whether its pickle names what is there: that is not run")


def _verify_safetensors(verified: Verified) -> None:
    path, storage = verified.path, storage_for(verified.path)
    verified.nbytes = storage.size(path) or 0
    with ExitStack() as held:
        state = open_file(path, "safetensors", held)
        places = [(box.begin, box.extent * its.dtype.itemsize) for its in state.tensors.values() for box in its.boxes]
    with closing(storage.open(path)) as file:
        header_end = _PREFIX_BYTES + int.from_bytes(read_plain(file, 0, _PREFIX_BYTES), "little")
    ends = [(header_end, 0), *sorted(places), (verified.nbytes, 0)]
    if any(begin + nbytes != after for (begin, nbytes), (after, _) in pairwise(ends)):
        verified.damages.append(Damage(path, "its tensors do not fill the file: bytes are missing, or too many"))
    verified.checked.append(f"the header, and that the bytes of {number(len(state.tensors), 'tensor')} are the file")
    verified.unchecked.append("the bytes of the tensors: safetensors has no checksums")


def _verify_dcp(verified: Verified, progress: Callable[[int], object]) -> None:
    # Only here: all that is ours can be looked at without torch.
    from asyncckpt.loading.dcp_reader import read_stock_metadata

    path, storage = verified.path, storage_for(verified.path)
    if any(map(is_index, storage.names_in(path))):
        raise DamagedCheckpointError("asyncckpt wrote this, and its manifest is missing: it was removed", path=path)
    metadata = read_stock_metadata(path, weights_only=True)
    places: dict[str, list[tuple[int, int, str]]] = {}
    transformed = 0
    for index, place in (metadata.storage_data or {}).items():
        if getattr(place, "transform_descriptors", None):
            transformed += 1
        else:
            places.setdefault(place.relative_path, []).append((place.offset, place.length, index.fqn))
    verified.damages += [Damage(os.path.join(path, METADATA_NAME), what) for what in _missing(metadata)]
    found, others = CheckedRecords(), 0
    for name, its in sorted(places.items()):
        others += _verify_entries(verified, os.path.join(path, name), sorted(its), found, progress)
    verified.checked.append(
        f"{METADATA_NAME}, and that all it names stands in {number(len(places), 'file')} that are long enough"
    )
    verified.take_records(found)
    if others:
        verified.unchecked.append(f"the bytes of {number(others, 'entry')} that are no archives of torch.save")
    if transformed:
        verified.unchecked.append(f"{number(transformed, 'value')} stored by way of DCP's extensions")


def _verify_entries(
    verified: Verified,
    path: str,
    places: list[tuple[int, int, str]],
    found: CheckedRecords,
    progress: Callable[[int], object],
) -> int:
    """Check a file of DCP's. Returns how many entries have no form that can be checked."""
    storage, others = storage_for(path), 0
    if (size := storage.size(path)) is None:
        verified.damages.append(Damage(path, "a file of this checkpoint is missing"))
        return 0
    verified.nbytes += size
    with closing(storage.open(path)) as file:
        for begin, nbytes, name in places:
            end = begin + nbytes
            if begin < 0 or nbytes < 0 or end > size:
                what = f"{name!r} stands from {begin:,} to {end:,}, and the file has {size:,} bytes"
                verified.damages.append(Damage(path, what))
            elif is_archive(read_plain(file, begin, min(begin + 4, end)), _tail(file, begin, end)):
                its = CheckedRecords()
                check_records(file, begin, end, its, progress)
                found.compared, found.without = found.compared + its.compared, found.without + its.without
                verified.damages += [Damage(path, f"{name!r}: {damage}") for damage in its.damages]
            else:
                others += 1
    return others


def _tail(file: Any, begin: int, end: int) -> bytes:
    return read_plain(file, max(begin, end - _END_BYTES), end)


def _missing(metadata: Metadata) -> list[str]:
    """The values that ``.metadata`` names, and does not say the place of."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    known = metadata.storage_data or {}
    missing = []
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            has_all = all(MetadataIndex(name, chunk.offsets) in known for chunk in about.chunks)
        else:
            has_all = MetadataIndex(name) in known
        if not has_all:
            missing.append(f"it does not say where {name!r} is stored")
    return missing


def open_file(path: str, kind: OthersKind, held: ExitStack) -> StoredState:
    """What is stored in a file; nothing in it can run code. Raises ``CheckpointError``."""
    from asyncckpt.exporting.safetensors_source import open_safetensors
    from asyncckpt.exporting.source_files import SourceFiles
    from asyncckpt.exporting.torch_file_source import open_torch_file

    folder, name = os.path.split(path)
    files = SourceFiles(folder, held)
    if kind == "safetensors":
        return open_safetensors(files, [name])
    return open_torch_file(files, name, weights_only=True)


def values_in(path: str, kind: OthersKind) -> list[Value]:
    """The values in a file of ``torch.save`` or safetensors. Raises ``CheckpointError``."""
    with ExitStack() as held:
        state = open_file(path, kind, held)
        values = []
        for name in state.keys:
            if (its := state.tensors.get(name)) is None:
                data = state.objects[name]
                nbytes = len(data) if isinstance(data, bytes) else data.end - data.begin
                values.append(Value(name, "", [Shard(os.path.basename(path), nbytes)]))
                continue
            size = its.numel * its.dtype.itemsize
            shards = [Shard(box.file, size, box.offsets, box.shape) for box in its.boxes]
            values.append(Value(name, str(its.dtype).removeprefix("torch."), shards))
        return values
