"""``asyncckpt ls``: the checkpoints of a folder, with what each has cost."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

from asyncckpt.loading.source import read_manifest
from asyncckpt.report.answers import Answers
from asyncckpt.report.disk_use import DiskUse
from asyncckpt.report.formats import duration, number, size_of, time_of
from asyncckpt.report.measured import Measured
from asyncckpt.report.places import OthersKind, found_at, kind_of_others, kind_of_ours, still_there
from asyncckpt.worker.manifest import METADATA_NAME, Manifest
from asyncckpt.worker.storage import storage_for

_HEADERS = ("step", "written at", "size", "on disk", "stall", "durable after", "speed", "path")


def list_checkpoints(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Show a row for each checkpoint at ``given``."""
    with answers.about(given):
        paths = found_at(given)
        sizes, on_disk = [], []
        for path in paths:
            with answers.about(path), still_there(path, given):
                kind = kind_of_others(path)
                list_one = _list_ours if kind is None else partial(_list_others, kind=kind)
                facts = list_one(answers, path, args.disk_use)
                answers.add(facts)
                sizes.append(facts["bytes"])
                on_disk.append(facts["bytes_on_disk"])
        if paths != [given]:
            total = f", {size_of(sum(sizes))}, {size_of(sum(on_disk))} on disk" if sizes else ""
            answers.line(f"{given}: {number(len(paths), 'checkpoint')}{total}")


def _list_ours(answers: Answers, path: str, disk_use: DiskUse) -> dict[str, Any]:
    manifest = read_manifest(path)
    its, kind = Measured.of(manifest), kind_of_ours(manifest)
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


def _list_others(answers: Answers, path: str, disk_use: DiskUse, kind: OthersKind) -> dict[str, Any]:
    """What is known of what others have stored: how large it is, and when it was written."""
    storage, files = storage_for(path), [path]
    if kind == "dcp":
        names = [name for name in storage.names_in(path) if name == METADATA_NAME or name.endswith(".distcp")]
        files = [os.path.join(path, name) for name in names]
    sizes = {file: storage.size(file) or 0 for file in files}
    nbytes, on_disk = sum(sizes.values()), sum(disk_use.of_file(file, its) for file, its in sizes.items())
    stamp = storage.stamp(os.path.join(path, METADATA_NAME) if kind == "dcp" else path)
    created = None if stamp is None else stamp.modified / 1e9
    written = "" if created is None else time_of(created)
    answers.row(_HEADERS, "", written, size_of(nbytes), size_of(on_disk), "", "", "", f"{path} ({kind})")
    known = {"path": path, "kind": kind, "created": created, "bytes": nbytes, "bytes_on_disk": on_disk}
    return known | dict.fromkeys(("step", "ranks", "stall_s", "durable_after_s", "bytes_per_s"))


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
