"""``asyncckpt ls``: the checkpoints of a folder, with what each has cost."""

from __future__ import annotations

import argparse
import os
from typing import Any

from asyncckpt.format.manifest import METADATA_NAME, Manifest
from asyncckpt.loading.contents import checkpoints_at
from asyncckpt.loading.source import is_stock, read_manifest
from asyncckpt.report.answers import Answers
from asyncckpt.report.formats import duration, number, size_of, time_of
from asyncckpt.report.measured import Measured
from asyncckpt.report.places import kind_of, still_there
from asyncckpt.storage import storage_for

_HEADERS = ("step", "written at", "size", "on disk", "stall", "durable after", "speed", "path")


class DiskUse:
    """Counts what checkpoints take of the disk, where some share files.

    A file counts once, with the checkpoint that is listed first.
    """

    def __init__(self) -> None:
        """None was listed yet."""
        self._counted: set[tuple[int, int]] = set()  # of files that have several names, the device and the inode

    def of_ours(self, path: str, manifest: Manifest) -> int:
        """The bytes that the checkpoint ``path`` adds to those before it. Raises ``StorageError``.

        Only large files are shared; of the small ones the manifest says enough.
        """
        nbytes = 0
        for name, facts in manifest.files.items():
            nbytes += self.of_file(os.path.join(path, name), facts["bytes"]) if "index" in facts else facts["bytes"]
        return nbytes

    def of_file(self, path: str, nbytes: int) -> int:
        """The bytes that a file of ``nbytes`` takes of the disk; 0: it was counted. Raises ``StorageError``."""
        its = storage_for(path).identity(path)
        if its is None:  # on an object store, where each has bytes of its own
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
                facts = (_list_stock if is_stock(path) else _list_ours)(answers, path, args.disk_use)
                answers.add(facts)
                sizes.append(facts["bytes"])
                on_disk.append(facts["bytes_on_disk"])
        if paths != [given]:
            total = f", {size_of(sum(sizes))}, {size_of(sum(on_disk))} on disk" if sizes else ""
            answers.line(f"{given}: {number(len(paths), 'checkpoint')}{total}")


def _list_ours(answers: Answers, path: str, disk_use: DiskUse) -> dict[str, Any]:
    manifest = read_manifest(path)
    its, kind = Measured.of(manifest), kind_of(manifest)
    on_disk = disk_use.of_ours(path, manifest)
    sizes = [size_of(manifest.nbytes), size_of(on_disk)]
    cells = [_shown(its.stall_s), _shown(its.durable_after_s)]
    speed = "" if its.bytes_per_s is None else f"{size_of(its.bytes_per_s)}/s"
    about = path if kind == "asyncckpt" else f"{path} ({kind})"
    answers.row(_HEADERS, manifest.step, time_of(manifest.created), *sizes, *cells, speed, about)
    return {"path": path, "kind": kind} | facts_of(manifest) | {"bytes_on_disk": on_disk}


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """For JSON."""
    its = Measured.of(manifest)
    return {
        "step": manifest.step,
        "created": manifest.created,
        "ranks": manifest.world_size,
        "bytes": manifest.nbytes,
        "stall_s": its.stall_s,
        "durable_after_s": its.durable_after_s,
        "bytes_per_s": its.bytes_per_s,
        "timings": dict(manifest.timings),
    }


def _list_stock(answers: Answers, path: str, disk_use: DiskUse) -> dict[str, Any]:
    """List a checkpoint of stock DCP: its size, and when it was written."""
    storage = storage_for(path)
    names = [name for name in storage.names_in(path) if name == METADATA_NAME or name.endswith(".distcp")]
    sizes = {file: storage.size(file) or 0 for name in names for file in (os.path.join(path, name),)}
    nbytes, on_disk = sum(sizes.values()), sum(disk_use.of_file(file, its) for file, its in sizes.items())
    stamp = storage.stamp(os.path.join(path, METADATA_NAME))
    created = None if stamp is None else stamp.modified / 1e9
    written = "" if created is None else time_of(created)
    answers.row(_HEADERS, "", written, size_of(nbytes), size_of(on_disk), "", "", "", f"{path} (dcp)")
    known = {"path": path, "kind": "dcp", "created": created, "bytes": nbytes, "bytes_on_disk": on_disk}
    return known | dict.fromkeys(("step", "ranks", "stall_s", "durable_after_s", "bytes_per_s"))


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
