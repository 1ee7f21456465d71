"""``asyncckpt verify``: check whether checkpoints are as they were written, and report which parts were not checked."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.loading.contents import SetsOfFiles, checkpoints_at
from asyncckpt.loading.data_file import CheckedFiles
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import Report, is_stock, read_manifest, verify, verify_files
from asyncckpt.report.answers import DAMAGED, GOOD, Answers, Kind, kind_of, number, size_of, still_there
from asyncckpt.storage import absolute, is_address, storage_for

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_ALL = "every byte, by the checksums that were written with it"


class _Damage(NamedTuple):
    """A file, and its damage as text."""

    file: str
    what: str


@dataclass
class _Verified:
    """The result of a check: the ``checked`` and ``unchecked`` parts, as texts, and the damages.

    ``shared``: see ``Report``.
    """

    path: str
    kind: Kind
    nbytes: int = 0
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    damages: list[_Damage] = field(default_factory=list)
    shared: int = 0

    def take(self, report: Report) -> None:
        """Copy the results of a report."""
        self.nbytes, self.shared = report.nbytes, report.shared
        self.damages += [_Damage(error.path or self.path, error.message) for error in report.damages]

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON data."""
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


def verify_checkpoints(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Report whether each checkpoint at ``given`` is good. ``given`` may be a file or a folder in a set of files."""
    with answers.about(given), Progress("verifying", shown=not args.json) as bar:
        if (found := _verify_in_set(absolute(given), bar.update)) is not None:
            _show(answers, found)
            return
        paths = checkpoints_at(given)
        if not paths:
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=given)
        for path in paths:
            with contextlib.suppress(CheckpointError):  # verify reports the error
                bar.expect(read_manifest(path).nbytes)
        for path in paths:
            with answers.about(path), still_there(path, given):
                is_ours = not is_stock(path)
                _show(answers, _verify_ours(path, bar, args.checked) if is_ours else _verify_stock(absolute(path)))


def _verify_ours(path: str, bar: Progress, checked: CheckedFiles) -> _Verified:
    report = verify(path, bar.update, checked)
    found = _Verified(report.path, "asyncckpt")
    found.take(report)
    with contextlib.suppress(CheckpointError):
        found.kind = kind_of(read_manifest(path))
        found.checked.append(_ALL)
    if not found.checked:  # the manifest is damaged
        found.unchecked.append(f"all else, as {os.path.basename(path)} has no manifest that can be read")
    return found


def _verify_in_set(path: str, progress: Callable[[int], object]) -> _Verified | None:
    """Check a file, or a folder of DCP, by the checksums of the set of files that contains it.

    Return None if no set does.
    """
    is_folder = is_stock(path)
    is_file = storage_for(path).size(path) is not None if is_address(path) else os.path.isfile(path)
    if not (is_folder or is_file):
        return None
    with ExitStack() as held:
        place = SetsOfFiles(held).with_file(os.path.join(path, METADATA_NAME) if is_folder else path)
        if place is None:
            return None
        source, its = place
        within = its.removesuffix(METADATA_NAME)
        names = [name for name in source.manifest.files if name.startswith(within)] if is_folder else [its]
        report = Report(path)
        verify_files(source, names, report, progress)
    found = _Verified(path, "file set")
    found.take(report)
    found.checked.append(f"every byte, by the checksums of the set {source.path}, which this is in")
    return found


def _verify_stock(path: str) -> _Verified:
    """Check a checkpoint of stock DCP as far as possible. It has no checksums."""
    # Imported here, because checkpoints of this library are verified without torch.
    from asyncckpt.loading.dcp_reader import read_stock_metadata

    found = _Verified(path, "dcp")
    try:
        metadata = read_stock_metadata(path, weights_only=True)
    except DamagedCheckpointError as error:
        found.damages.append(_Damage(error.path or path, error.message))
        return found
    ends: dict[str, int] = {}  # end of the last value of each file
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        size = storage_for(path).size(file := os.path.join(path, name))
        if size is None:
            found.damages.append(_Damage(file, "a file of this checkpoint is missing"))
        elif size < end:
            found.damages.append(_Damage(file, f"a value ends at {end:,}, and the file has {size:,} bytes"))
        found.nbytes += size or 0
    found.damages += [_Damage(os.path.join(path, METADATA_NAME), what) for what in _missing(metadata)]
    found.checked.append(
        f"{METADATA_NAME}, and that all it names is there ({number(len(ends), 'file')}, each long enough)"
    )
    found.unchecked.append("the bytes of the values: stock DCP has no checksums")
    return found


def _missing(metadata: Metadata) -> Iterator[str]:
    """Yield a text for each value that ``.metadata`` names without a place."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    known = metadata.storage_data or {}
    for name, about in metadata.state_dict_metadata.items():
        offsets = [each.offsets for each in about.chunks] if isinstance(about, TensorStorageMetadata) else [None]
        if not all(MetadataIndex(name, its) in known for its in offsets):
            yield f"it does not say where {name!r} is stored"


def _show(answers: Answers, found: _Verified) -> None:
    answers.add(found.facts())
    for damage in found.damages:
        answers.line(f"{damage.file}: {damage.what}")
    answers.fail(DAMAGED if found.damages else GOOD)
    if not found.damages:
        about = "" if found.kind == "asyncckpt" else f" ({found.kind})"
        shared = f", of which {size_of(found.shared)} are shared and were read before" if found.shared else ""
        answers.line(f"{found.path}{about}: good, {size_of(found.nbytes)}{shared}")
    if found.checked != [_ALL]:
        answers.line("".join(f"  checked: {each}\n" for each in found.checked).rstrip("\n"))
    for each in found.unchecked:
        answers.line(f"  not checked: {each}")
