"""What others have stored, which has no checksums of ours: what can be checked of it, and what cannot."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.loading.contents import Shard, Value
from asyncckpt.loading.data_file import read_plain
from asyncckpt.loading.set_of_file import SetsOfFiles
from asyncckpt.loading.source import Report, verify_files
from asyncckpt.report.archives import CheckedRecords, check_records
from asyncckpt.report.formats import number
from asyncckpt.report.places import Kind, OthersKind, is_archive, is_legacy
from asyncckpt.report.safetensors_header import tensors_in
from asyncckpt.worker.manifest import METADATA_NAME
from asyncckpt.worker.storage import storage_for

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from asyncckpt.exporting.stored import StoredState

_END_BYTES, _READ_BYTES = 64, 1 << 20


class Damage(NamedTuple):
    """A file, and what is wrong with it."""

    file: str
    what: str


class _Other(NamedTuple):
    """An entry of a file of DCP's that is no archive."""

    file: str
    name: str
    is_zero: bool


@dataclass
class Verified:
    """What a check has found: what was ``checked``, what ``unchecked``, both in words, and what is damaged.

    ``shared``: as of a report.
    """

    path: str
    kind: Kind
    nbytes: int = 0
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    shared: int = 0

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "bytes": self.nbytes,
            "bytes_shared": self.shared,
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
        if found.packed:
            self.unchecked.append(f"the bytes of {number(found.packed, 'record')} that are compressed")


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
        if _verify_by_set(verified, progress):
            return verified
        if kind == "dcp":
            _verify_dcp(verified, progress)
        elif kind == "torch.save":
            _verify_torch_file(verified, progress)
        else:
            _verify_safetensors(verified)
    except DamagedCheckpointError as error:
        verified.damages.append(Damage(error.path or path, error.message))
    return verified


def _verify_by_set(verified: Verified, progress: Callable[[int], object]) -> bool:
    """Check by the checksums of a set of ours that this is in. Returns whether it is in one."""
    is_folder = verified.kind == "dcp"
    with ExitStack() as held:
        path = os.path.join(verified.path, METADATA_NAME) if is_folder else verified.path
        if (found := SetsOfFiles(held).with_file(path)) is None:
            return False
        source, its = found
        within = its.removesuffix(METADATA_NAME) if is_folder else its
        names = [each for each in source.manifest.files if (each.startswith(within) if is_folder else each == its)]
        report = Report(verified.path)
        verify_files(source, names, report, progress)
    verified.nbytes = report.nbytes
    verified.damages += [Damage(error.path or verified.path, error.message) for error in report.damages]
    verified.checked.append(f"every byte, by the checksums of the set {source.path}, which this is in")
    return True


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
    path = verified.path
    verified.nbytes = storage_for(path).size(path) or 0
    tensors = tensors_in(path)
    verified.checked.append(f"the header, and that the bytes of {number(len(tensors), 'tensor')} are the file")
    verified.unchecked.append("the bytes of the tensors: safetensors has no checksums")


def _verify_dcp(verified: Verified, progress: Callable[[int], object]) -> None:
    # Only here: all that is ours can be looked at without torch.
    from asyncckpt.loading.dcp_reader import read_stock_metadata

    path = verified.path
    metadata = read_stock_metadata(path, weights_only=True)
    places: dict[str, list[tuple[int, int, str]]] = {}
    transformed = 0
    for index, place in (metadata.storage_data or {}).items():
        if getattr(place, "transform_descriptors", None):
            transformed += 1
        else:
            places.setdefault(place.relative_path, []).append((place.offset, place.length, index.fqn))
    verified.damages += [Damage(os.path.join(path, METADATA_NAME), what) for what in _missing(metadata)]
    found, others = CheckedRecords(), []
    for name, its in sorted(places.items()):
        others += _verify_entries(verified, os.path.join(path, name), sorted(its), found, progress)
    for other in others:  # DCP writes all entries in one form
        if other.is_zero or found.archives:
            what = "has nothing but zeros" if other.is_zero else "is no archive of torch.save, as the others are"
            verified.damages.append(Damage(other.file, f"{other.name!r} {what}"))
    verified.checked.append(
        f"{METADATA_NAME}, and that all it names is there ({number(len(places), 'file')}, each long enough)"
    )
    verified.take_records(found)
    if others and not found.archives:
        verified.unchecked.append(f"the bytes of {number(len(others), 'value')} that are no archives of torch.save")
    if transformed:
        verified.unchecked.append(f"{number(transformed, 'value')} stored by way of DCP's extensions")


def _verify_entries(
    verified: Verified,
    path: str,
    places: list[tuple[int, int, str]],
    found: CheckedRecords,
    progress: Callable[[int], object],
) -> list[_Other]:
    """Check a file of DCP's. Returns the entries that have no form that can be checked."""
    storage, others = storage_for(path), []
    if (size := storage.size(path)) is None:
        verified.damages.append(Damage(path, "a file of this checkpoint is missing"))
        return []
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
                found.add(its)
                verified.damages += [Damage(path, f"{name!r}: {damage}") for damage in its.damages]
            else:
                others.append(_Other(path, name, _is_zero(file, begin, end)))
    return others


def _is_zero(file: Any, begin: int, end: int) -> bool:
    """Whether there are bytes, and none but zeros: of a block that was lost."""
    return begin < end and not any(
        any(read_plain(file, at, min(at + _READ_BYTES, end))) for at in range(begin, end, _READ_BYTES)
    )


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


def values_in(path: str, kind: OthersKind) -> list[Value]:
    """The values in a file of ``torch.save`` or safetensors. Raises ``CheckpointError``."""
    folder, file = os.path.split(path)
    if kind == "safetensors":
        return [
            Value(each.name, each.dtype, [Shard(file, each.end - each.begin, each.offsets, each.shape)])
            for each in tensors_in(path)
        ]
    # Only here: safetensors can be looked at without torch.
    from asyncckpt.exporting.source_files import SourceFiles
    from asyncckpt.exporting.torch_file_source import open_torch_file

    with ExitStack() as held:
        return values_of_state(open_torch_file(SourceFiles(folder, held), file, weights_only=True))


def values_of_state(state: StoredState) -> list[Value]:
    """The values of a stored state, in its order."""
    values = []
    for name in state.keys:
        if (its := state.tensors.get(name)) is None:
            data = state.objects[name]
            if isinstance(data, bytes):
                values.append(Value(name, "", [Shard(os.path.basename(state.path), len(data))]))
            else:
                values.append(Value(name, "", [Shard(data.file, data.end - data.begin)]))
            continue
        size = its.dtype.itemsize
        shards = [Shard(box.file, math.prod(box.shape) * size, box.offsets, box.shape) for box in its.boxes]
        # One without elements may be stored nowhere.
        shards = shards or [Shard("", 0, (0,) * len(its.shape), its.shape)]
        values.append(Value(name, str(its.dtype).removeprefix("torch."), shards))
    return values
