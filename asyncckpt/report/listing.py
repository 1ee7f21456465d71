"""``asyncckpt ls`` and ``inspect``: the checkpoints of a folder with the cost of each, and the values of one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.manifest import CALLED_AT, METADATA_NAME, Manifest
from asyncckpt.loading.contents import Value, checkpoints_at, contents
from asyncckpt.loading.source import HF_INDEX_NAME, read_manifest, stock_kind
from asyncckpt.report.answers import (
    AUTHORS,
    Answers,
    checkpoint_at,
    duration,
    kind_of,
    number,
    shape_of,
    size_of,
    still_there,
    time_of,
)
from asyncckpt.storage import storage_for


@dataclass(frozen=True)
class Measured:
    """Measurements of one save. A value is None if the manifest does not have it.

    ``called_at``: the call of ``save``, in seconds since the epoch. ``stall_s``: how long the call blocked the slowest
    rank. ``durable_after_s``: from the call until all ranks had written and the manifest was made. ``cost_s``,
    ``lag_s``: the same two values without waits for a free slot. ``bytes_per_s``: the speed from the first rank's start
    of writing until the last rank's end.
    """

    called_at: float | None
    stall_s: float | None
    durable_after_s: float | None
    cost_s: float | None
    lag_s: float | None
    bytes_per_s: float | None

    @classmethod
    def of(cls, manifest: Manifest) -> Measured:
        """Return the measurements of a manifest."""
        timings = manifest.timings
        # Prefer the first rank's time: its host made the manifest, and the clocks of other hosts may differ.
        called_at = next((each for each in timings.get(CALLED_AT, ()) if each is not None), None)
        stalls = [each for each in timings.get("stall_s", ()) if each is not None]
        waits = [each or 0.0 for each in timings.get("slot_s", [None] * manifest.world_size)]
        rows = zip(timings.get("stall_s", ()), waits, strict=False)
        costs = [max(0.0, stall - waited) for stall, waited in rows if stall is not None]
        lag_s = None if called_at is None else manifest.created - called_at
        write_s = _write_s(timings)
        return cls(
            called_at=called_at,
            stall_s=max(stalls, default=None),
            durable_after_s=None if lag_s is None else max(0.0, lag_s),
            cost_s=max(costs, default=None),
            lag_s=None if lag_s is None else max(0.0, lag_s - min(waits, default=0.0)),
            bytes_per_s=manifest.nbytes / write_s if write_s else None,
        )


def _write_s(timings: Mapping[str, Sequence[float | None]]) -> float | None:
    rows = zip(*(timings.get(name, ()) for name in (CALLED_AT, "write_from_s", "write_s")), strict=False)
    spans: list[tuple[float, float]] = [
        (at + begin, at + begin + nseconds)
        for at, begin, nseconds in rows
        if at is not None and begin is not None and nseconds is not None
    ]
    if spans:
        return max(end for _, end in spans) - min(begin for begin, _ in spans)
    # An export, for example, has one rank, and only the time of writing.
    took: list[float] = [each for each in timings.get("write_s", ()) if each is not None]
    return max(took, default=None)


_OF_SAVES = ("stall_s", "durable_after_s", "bytes_per_s")  # measurements that a checkpoint of stock DCP lacks
# The ends of the names of files that count, by the kind of checkpoint. Without ends, all files of the folder count.
_ENDINGS = {"dcp": (METADATA_NAME, ".distcp"), "huggingface": (".safetensors", HF_INDEX_NAME)}
_HEADERS = ("step", "written at", "size", "on disk", "stall", "durable after", "speed", "path")


class DiskUse:
    """Counter of the disk space of checkpoints that may share files.

    A shared file counts once, with the checkpoint that is listed first.
    """

    def __init__(self) -> None:
        """Start with no checkpoint."""
        self._counted: set[tuple[int, int]] = set()  # device and inode of files with several names

    def of_ours(self, path: str, manifest: Manifest) -> int:
        """Return the bytes that the checkpoint ``path`` adds to the checkpoints before it. Raises ``StorageError``.

        Only large files are shared; the sizes of small files are in the manifest.
        """
        nbytes = 0
        for name, facts in manifest.files.items():
            nbytes += self.of_file(os.path.join(path, name), facts["bytes"]) if "index" in facts else facts["bytes"]
        return nbytes

    def of_file(self, path: str, nbytes: int) -> int:
        """Return the disk space of a file of ``nbytes``; 0 if it was counted before. Raises ``StorageError``."""
        its = storage_for(path).identity(path)
        if its is None:  # on an object store, where no file is shared
            return nbytes
        if its.links > 1:
            if its[:2] in self._counted:
                return 0
            self._counted.add(its[:2])
        return its.allocated


def list_checkpoints(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Show a row for each checkpoint at ``given``."""
    with answers.about(given):
        paths = checkpoints_at(given)
        sizes, on_disk = [], []
        for path in paths:
            with answers.about(path), still_there(path, given):
                facts = (_facts_of_stock if stock_kind(path) else _facts_of_ours)(path, args.disk_use)
                answers.add(facts)
                _list(answers, facts)
                sizes.append(facts["bytes"])
                on_disk.append(facts["bytes_on_disk"])
        if paths != [given]:
            total = f", {size_of(sum(sizes))}, {size_of(sum(on_disk))} on disk" if sizes else ""
            answers.line(f"{given}: {number(len(paths), 'checkpoint')}{total}")


def _list(answers: Answers, facts: Mapping[str, Any]) -> None:
    """Show the row of a checkpoint."""
    path = facts["path"] if facts["kind"] == "asyncckpt" else f"{facts['path']} ({facts['kind']})"
    written = "" if facts["created"] is None else time_of(facts["created"])
    sizes = size_of(facts["bytes"]), size_of(facts["bytes_on_disk"])
    times = ("" if seconds is None else duration(seconds) for seconds in (facts["stall_s"], facts["durable_after_s"]))
    speed = "" if facts["bytes_per_s"] is None else f"{size_of(facts['bytes_per_s'])}/s"
    answers.row(_HEADERS, facts["step"], written, *sizes, *times, speed, path)


def _facts_of_ours(path: str, disk_use: DiskUse) -> dict[str, Any]:
    manifest = read_manifest(path)
    on_disk = disk_use.of_ours(path, manifest)
    return {"path": path, "kind": kind_of(manifest)} | facts_of(manifest) | {"bytes_on_disk": on_disk}


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """Return the measurements as JSON data."""
    its = Measured.of(manifest)
    return {
        "step": manifest.step,
        "created": manifest.created,
        "ranks": manifest.world_size,
        "bytes": manifest.nbytes,
        **{name: getattr(its, name) for name in _OF_SAVES},
        "timings": dict(manifest.timings),
    }


def _facts_of_stock(path: str, disk_use: DiskUse) -> dict[str, Any]:
    """Return the size of a checkpoint of another library, and when it was written."""
    storage, kind = storage_for(path), stock_kind(path)
    names = [name for name in storage.names_in(path) if name.endswith(_ENDINGS.get(kind or "", ("",)))]
    sizes = {file: storage.size(file) or 0 for name in names for file in (os.path.join(path, name),)}
    stamp = storage.stamp(os.path.join(path, METADATA_NAME) if kind == "dcp" else next(iter(sizes)))
    return {
        "path": path,
        "kind": kind,
        "created": None if stamp is None else stamp.modified / 1e9,
        "bytes": sum(sizes.values()),
        "bytes_on_disk": sum(disk_use.of_file(file, its) for file, its in sizes.items()),
        **dict.fromkeys(("step", "ranks", *_OF_SAVES)),
    }


def inspect_checkpoint(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Show the contents of the checkpoint at ``given``; for a folder of checkpoints, of the newest."""
    with answers.about(given):
        if (path := checkpoint_at(answers, given)) is None:
            return
        if (kind := stock_kind(path)) is not None:
            values = contents(path)
            # Imported here, because checkpoints of this library can be inspected without torch.
            from asyncckpt.loading.rank_files import RankFiles

            written = f", written by {number(RankFiles(path).ranks, 'rank')}" if kind == "torch_checkpointing" else ""
            answers.line(f"{path}: a checkpoint of {AUTHORS[kind]}{written}, without checksums")
            answers.add({"path": path, "kind": kind, "values": [value.facts() for value in values]})
            _show_values(answers, values, shards=args.shards)
            return
        with storage_for(path).reading(path):  # so that retention does not remove it
            values, manifest = contents(path), read_manifest(path)
        what = "a checkpoint" if manifest.step is None else f"the checkpoint of step {manifest.step}"
        its_kind = kind_of(manifest)
        if its_kind == "file set":
            what += ", a set of files"
        written = f"written by {number(manifest.world_size, 'rank')} at {time_of(manifest.created)}"
        answers.line(f"{path}: {what}, {written}")
        facts: dict[str, Any] = {"path": path, "kind": its_kind, **facts_of(manifest), "files": manifest.files}
        answers.add(facts | {"values": [value.facts() for value in values]})
        _show_values(answers, values, shards=args.shards)
        _show_the_rest(answers, manifest)


def _show_the_rest(answers: Answers, manifest: Manifest) -> None:
    if small := [f"{name} ({size_of(manifest.files[name]['bytes'])})" for name in manifest.small_files()]:
        answers.line(f"small files: {', '.join(small)}")
    first = [
        f"{name.removesuffix('_s')} {duration(seconds)}"
        for name, (seconds, *_) in manifest.timings.items()
        if name.endswith("_s") and not name.endswith("_from_s") and seconds is not None
    ]
    if first:
        answers.line(f"rank 0: {', '.join(first)}")


def _show_values(answers: Answers, values: list[Value], *, shards: bool) -> None:
    headers = "name type shape from size file" if shards else "name type shape size shards"
    for value in values:
        kind = value.dtype or "object"
        if not shards:
            size = size_of(value.nbytes)
            answers.row(headers.split(), value.name, kind, shape_of(value.shape), size, len(value.shards))
        for each in value.shards if shards else ():
            begin, size = ",".join(map(str, each.offsets)), size_of(each.nbytes)
            answers.row(headers.split(), value.name, kind, shape_of(each.shape), begin, size, each.file)
    answers.show_table()
    tensors = sum(bool(value.dtype) for value in values)
    objects = number(len(values) - tensors, "object")
    answers.line(f"\n{number(tensors, 'tensor')} and {objects}, {size_of(sum(value.nbytes for value in values))}")
