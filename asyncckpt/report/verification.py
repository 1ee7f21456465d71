"""``asyncckpt verify``: check whether checkpoints are as they were written, and report which parts were not checked."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.loading.contents import checkpoints_at, set_with_file
from asyncckpt.loading.data_file import CheckedFiles
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import Report, is_stock, read_manifest, stock_kind, verify, verify_files
from asyncckpt.report.answers import AUTHORS, DAMAGED, Answers, Kind, kind_of, number, size_of, still_there
from asyncckpt.storage import absolute, is_address, storage_for

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_ALL = "every byte, by the checksums that were written with it"


@dataclass
class _Verified:
    """The result of a check: a report, and the ``checked`` and ``unchecked`` parts, as texts."""

    report: Report
    kind: Kind
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        report = self.report
        return {
            "path": report.path,
            "kind": self.kind,
            "bytes": report.nbytes,
            "bytes_shared": report.shared,
            "ok": not report.damages,
            "checked": self.checked,
            "unchecked": self.unchecked,
            "damages": [{"file": error.path or report.path, "what": error.message} for error in report.damages],
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
                if (kind := stock_kind(path)) is None:
                    _show(answers, _verify_ours(path, bar, args.checked))
                else:
                    check = _verify_stock if kind == "dcp" else _verify_rank_files
                    _show(answers, check(absolute(path), kind, bar.update))


def _verify_ours(path: str, bar: Progress, checked: CheckedFiles) -> _Verified:
    report = verify(path, bar.update, checked)
    try:
        return _Verified(report, kind_of(read_manifest(path)), [_ALL])
    except CheckpointError:
        rest = f"all else, as {os.path.basename(path)} has no manifest that can be read"
        return _Verified(report, "asyncckpt", unchecked=[rest])


def _verify_in_set(path: str, progress: Callable[[int], object]) -> _Verified | None:
    """Check a file, or a folder of DCP, by the checksums of the set of files that contains it.

    Return None if no set contains it.
    """
    is_folder = is_stock(path)
    is_file = storage_for(path).size(path) is not None if is_address(path) else os.path.isfile(path)
    if not (is_folder or is_file):
        return None
    with ExitStack() as held:
        place = set_with_file(os.path.join(path, METADATA_NAME) if is_folder else path, held)
        if place is None:
            return None
        source, its = place
        within = its.removesuffix(METADATA_NAME)
        names = [name for name in source.manifest.files if name.startswith(within)] if is_folder else [its]
        report = Report(path)
        verify_files(source, names, report, progress)
    return _Verified(report, "file set", [f"every byte, by the checksums of the set {source.path}, which this is in"])


def _verify_stock(path: str, _kind: Kind, _progress: object) -> _Verified:
    """Check a checkpoint of stock DCP as far as possible. It has no checksums."""
    # Imported here, because checkpoints of this library are verified without torch.
    from asyncckpt.loading.dcp_reader import read_stock_metadata

    report = Report(path)
    try:
        metadata = read_stock_metadata(path, weights_only=True)
    except DamagedCheckpointError as error:
        report.damages.append(error)
        return _Verified(report, "dcp")
    ends: dict[str, int] = {}  # end of the last value of each file
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    damages: list[tuple[str, str]] = []
    for name, end in sorted(ends.items()):
        size = storage_for(path).size(os.path.join(path, name))
        if size is None:
            damages.append((name, "a file of this checkpoint is missing"))
        elif size < end:
            damages.append((name, f"a value ends at {end:,}, and the file has {size:,} bytes"))
        report.nbytes += size or 0
    damages += [(METADATA_NAME, what) for what in _missing(metadata)]
    report.damages += [DamagedCheckpointError(what, path=os.path.join(path, name)) for name, what in damages]
    what = f"{METADATA_NAME}, and that all it names is there ({number(len(ends), 'file')}, each long enough)"
    return _Verified(report, "dcp", [what], ["the bytes of the values: stock DCP has no checksums"])


def _verify_rank_files(path: str, kind: Kind, progress: Callable[[int], object]) -> _Verified:
    """Check a checkpoint of torch_checkpointing or of Hugging Face as far as possible. Only archives have CRCs."""
    # Imported here, because checkpoints of this library are verified without torch.
    from asyncckpt.loading.rank_files import RankFiles

    report, archives, others = Report(path), 0, 0
    try:
        source = RankFiles(path)
        archives = sum(file.is_archive for file in source.files.values())
        others = len(source.files) - archives
        report.nbytes = sum(storage_for(path).size(os.path.join(path, name)) or 0 for name in source.files)
        report.damages += source.damages(progress)
        if not report.damages:
            source.read()
    except DamagedCheckpointError as error:
        report.damages.append(error)
    checked = [f"the CRC of each record of {number(archives, 'file')}"] * (archives > 0)
    checked += [f"the structure of {number(others, 'file')} without checksums"] * (others > 0)
    checked += ["that their shards are all of each tensor"] * (archives + others > 0)
    unchecked = [f"all else: {AUTHORS[kind]} has no other checksums"]
    return _Verified(report, kind, [", and ".join(checked)] if checked else [], unchecked)


def _missing(metadata: Metadata) -> Iterator[str]:
    """Yield a text for each value that ``.metadata`` names without a place."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    known = metadata.storage_data or {}
    for name, about in metadata.state_dict_metadata.items():
        offsets = [each.offsets for each in about.chunks] if isinstance(about, TensorStorageMetadata) else [None]
        if not all(MetadataIndex(name, its) in known for its in offsets):
            yield f"it does not say where {name!r} is stored"


def _show(answers: Answers, found: _Verified) -> None:
    facts, report = found.facts(), found.report
    answers.add(facts)
    for damage in facts["damages"]:
        answers.line(f"{damage['file']}: {damage['what']}")
    if report.damages:
        answers.fail(DAMAGED)
    else:
        about = "" if found.kind == "asyncckpt" else f" ({found.kind})"
        shared = f", of which {size_of(report.shared)} are shared and were read before" if report.shared else ""
        answers.line(f"{report.path}{about}: good, {size_of(report.nbytes)}{shared}")
    for each in found.checked if found.checked != [_ALL] else ():
        answers.line(f"  checked: {each}")
    for each in found.unchecked:
        answers.line(f"  not checked: {each}")
