"""``asyncckpt verify``: whether checkpoints are as they were written, and what could not be checked of them."""

from __future__ import annotations

import argparse
import contextlib
import os

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.shared_files import CheckedFiles
from asyncckpt.loading.source import read_manifest, verify
from asyncckpt.report.answers import DAMAGED, GOOD, Answers
from asyncckpt.report.formats import size_of
from asyncckpt.report.others import Damage, Verified, verify_others
from asyncckpt.report.places import found_at, kind_of_others, kind_of_ours, still_there
from asyncckpt.worker.storage import absolute

_ALL = "every byte, by the checksums that were written with it"


def verify_checkpoints(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Say of each checkpoint at ``given`` whether it is good."""
    with answers.about(given), Progress("verifying", shown=not args.json) as bar:
        paths = found_at(given)
        if not paths:
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=given)
        for path in paths:
            with contextlib.suppress(CheckpointError):  # verify says what is wrong
                bar.expect(read_manifest(path).nbytes)
        for path in paths:
            with answers.about(path), still_there(path, given):
                kind = kind_of_others(path)
                found = (
                    _verify_ours(path, bar, args.checked)
                    if kind is None
                    else verify_others(absolute(path), kind, bar.update)
                )
                _show(answers, found)


def _verify_ours(path: str, bar: Progress, checked: CheckedFiles) -> Verified:
    report = verify(path, bar.update, checked)
    found = Verified(report.path, "asyncckpt", report.nbytes, shared=report.shared)
    found.damages = [Damage(error.path or path, error.message) for error in report.damages]
    with contextlib.suppress(CheckpointError):
        found.kind = kind_of_ours(read_manifest(path))
        found.checked.append(_ALL)
    if not found.checked:  # its manifest is what is damaged
        found.unchecked.append(f"all else, as {os.path.basename(path)} has no manifest that can be read")
    return found


def _show(answers: Answers, found: Verified) -> None:
    answers.add(found.facts())
    for damage in found.damages:
        answers.line(f"{damage.file}: {damage.what}")
    answers.fail(DAMAGED if found.damages else GOOD)
    if not found.damages:
        about = "" if found.kind == "asyncckpt" else f" ({found.kind})"
        shared = f", of which {size_of(found.shared)} are shared and were read before" if found.shared else ""
        answers.line(f"{found.path}{about}: good, {size_of(found.nbytes)}{shared}")
    if found.kind not in ("asyncckpt", "file set"):
        answers.line("".join(f"  checked: {each}\n" for each in found.checked).rstrip("\n"))
    for each in found.unchecked:
        answers.line(f"  not checked: {each}")
