"""``asyncckpt ls``: the checkpoints of a folder, with what each has cost."""

from __future__ import annotations

import argparse
import os
from typing import Any

from asyncckpt.loading.source import read_manifest
from asyncckpt.report.answers import Answers
from asyncckpt.report.formats import duration, number, size_of, time_of
from asyncckpt.report.measured import Measured
from asyncckpt.report.places import OthersKind, found_at, kind_of_listed, kind_of_ours, still_there
from asyncckpt.worker.manifest import METADATA_NAME, Manifest
from asyncckpt.worker.storage import storage_for

_HEADERS = ("step", "written at", "size", "stall", "durable after", "speed", "path")


def list_checkpoints(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Show a row for each checkpoint at ``given``."""
    with answers.about(given):
        paths = found_at(given)
        if paths != [given]:
            answers.line(f"{given}: {number(len(paths), 'checkpoint')}")
        for path in paths:
            with answers.about(path), still_there(path, given):
                if (kind := kind_of_listed(path, given)) is not None:
                    _list_others(answers, path, kind)
                    continue
                manifest = read_manifest(path)
                its, kind_of_it = Measured.of(manifest), kind_of_ours(manifest)
                cells = [_shown(its.stall_s), _shown(its.durable_after_s)]
                speed = "" if its.bytes_per_s is None else f"{size_of(its.bytes_per_s)}/s"
                about = path if kind_of_it == "asyncckpt" else f"{path} ({kind_of_it})"
                written, size = time_of(manifest.created), size_of(manifest.nbytes)
                answers.row(_HEADERS, manifest.step, written, size, *cells, speed, about)
                answers.add({"path": path, "kind": kind_of_it} | facts_of(manifest))


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


def _list_others(answers: Answers, path: str, kind: OthersKind) -> None:
    """What is known of what others have stored: how large it is, and when it was written."""
    storage = storage_for(path)
    if kind == "dcp":
        names = [name for name in storage.names_in(path) if name == METADATA_NAME or name.endswith(".distcp")]
        nbytes = sum(storage.size(os.path.join(path, name)) or 0 for name in names)
        stamp = storage.stamp(os.path.join(path, METADATA_NAME))
    else:
        nbytes, stamp = storage.size(path) or 0, storage.stamp(path)
    created = None if stamp is None else stamp.modified / 1e9
    written = "" if created is None else time_of(created)
    answers.row(_HEADERS, "", written, size_of(nbytes), "", "", "", f"{path} ({kind})")
    unknown = dict.fromkeys(("step", "ranks", "stall_s", "durable_after_s", "bytes_per_s"))
    answers.add({"path": path, "kind": kind, "created": created, "bytes": nbytes} | unknown)


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
