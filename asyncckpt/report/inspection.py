"""``asyncckpt inspect``: show the contents of a checkpoint, of this library or of stock DCP."""

from __future__ import annotations

import argparse
from typing import Any

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.format.manifest import Manifest
from asyncckpt.loading.contents import Value, checkpoints_at, contents
from asyncckpt.loading.source import is_stock, read_manifest
from asyncckpt.report.answers import Answers, duration, kind_of, newest_of, number, shape_of, size_of, time_of
from asyncckpt.report.listing import facts_of
from asyncckpt.storage import storage_for


def inspect_checkpoint(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Show the contents of the checkpoint at ``given``; for a folder of checkpoints, of the newest."""
    with answers.about(given):
        paths = checkpoints_at(given)
        if not paths:
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=given)
        path = given
        if paths != [given]:
            if (newest := newest_of(answers, paths)) is None:
                return
            path = newest
            answers.line(f"{given}: {number(len(paths), 'checkpoint')}; this is the newest of them")
        if is_stock(path):
            values = contents(path)
            answers.line(f"{path}: a checkpoint of stock DCP, without checksums")
            answers.add({"path": path, "kind": "dcp", "values": [value.facts() for value in values]})
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
    phases = {name.removesuffix("_s"): ranks[0] for name, ranks in manifest.timings.items() if name.endswith("_s")}
    first = [
        f"{name} {duration(seconds)}"
        for name, seconds in phases.items()
        if seconds is not None and not name.endswith("_from")
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
