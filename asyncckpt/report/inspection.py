"""``asyncckpt inspect``: what is in a checkpoint, or in a file of others."""

from __future__ import annotations

import argparse
from typing import Any

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.loading.contents import Value, contents
from asyncckpt.loading.source import read_manifest
from asyncckpt.report.answers import Answers
from asyncckpt.report.archives import records
from asyncckpt.report.formats import duration, number, shape_of, size_of, time_of
from asyncckpt.report.listing import facts_of
from asyncckpt.report.others import values_in
from asyncckpt.report.places import OthersKind, found_at, is_legacy, kind_of_others, kind_of_ours, newest_of
from asyncckpt.worker.manifest import Manifest
from asyncckpt.worker.storage import absolute, storage_for


def inspect_checkpoint(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Show what is in the checkpoint at ``given``, or in the newest of those there."""
    with answers.about(given):
        paths = found_at(given)
        if not paths:
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=given)
        path = given
        if paths != [given]:
            if (newest := newest_of(answers, paths)) is None:
                return
            path = newest
            answers.line(f"{given}: {number(len(paths), 'checkpoint')}; this is the newest of them")
        if (kind := kind_of_others(path)) is not None:
            _inspect_others(answers, path, kind, args)
            return
        with storage_for(path).reading(path):  # retention leaves it alone
            values, manifest = contents(path), read_manifest(path)
        what = "a checkpoint" if manifest.step is None else f"the checkpoint of step {manifest.step}"
        its_kind = kind_of_ours(manifest)
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


def _inspect_others(answers: Answers, path: str, kind: OthersKind, args: argparse.Namespace) -> None:
    if kind == "dcp":
        values, about = contents(path), "a checkpoint of stock DCP, without checksums"
    else:
        about = f"a file of {kind}"
        try:
            values = values_in(absolute(path), kind)
        except DamagedCheckpointError:
            if kind == "torch.save" and is_legacy(path):
                raise CheckpointError(
                    "torch.save wrote this in its form of before torch 1.6, which has no table of its tensors: load it"
                    " with torch.load, and save it again",
                    path=path,
                ) from None
            raise
        except CheckpointError as error:  # it could run code, say
            if kind != "torch.save":
                raise
            _show_records(answers, path, error)
            return
    answers.line(f"{path}: {about}")
    answers.add({"path": path, "kind": kind, "values": [value.facts() for value in values]})
    _show_values(answers, values, shards=args.shards)


def _show_records(answers: Answers, path: str, why: CheckpointError) -> None:
    """Of a file of ``torch.save`` whose pickle is not run: what stands in the archive."""
    its = records(path)
    answers.line(f"{path}: a file of torch.save, of which only the records can be shown: {why.message}")
    facts: dict[str, Any] = {"path": path, "kind": "torch.save", "unchecked": [why.message]}
    answers.add(facts | {"records": [{"name": name, "bytes": nbytes} for name, nbytes in its]})
    for name, nbytes in its:
        answers.row(("record", "size"), name, size_of(nbytes))
    answers.show_table()


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
