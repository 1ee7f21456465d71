"""``asyncckpt export``: export a checkpoint, and report the result. torch is imported when the command runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncckpt.errors import CheckpointError
from asyncckpt.report.answers import Answers, number, size_of

if TYPE_CHECKING:
    from asyncckpt.exporting.export import Exported

_SOME = 4


def show_export(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Export the checkpoint at ``given``, and report the result."""
    with answers.about(given):
        from asyncckpt.exporting.export import export

        names = ("to", "dtype", "only", "rename", "max_shard_size", "weights_only")
        try:
            done = export(given, args.out, **{name: getattr(args, name) for name in names}, progress=not args.json)
        except ValueError as error:  # an option is invalid
            raise CheckpointError(str(error)) from error
        answers.add(done.facts())
        answers.line(f"{done.path}: {number(done.tensors, 'tensor')} in {size_of(done.nbytes)}, from {done.source}")
        for line in _remarks(done):
            answers.line(line)


def _remarks(done: Exported) -> Iterator[str]:
    """Yield remarks about an export, as text lines."""
    if done.tied:
        pairs = ", ".join(f"{name} is {kept}" for name, kept in list(done.tied.items())[:_SOME])
        yield f"tied, and so written once: {pairs}{_more(len(done.tied))}"
    if done.objects:
        yield f"left out, as no tensors: {', '.join(done.objects[:_SOME])}{_more(len(done.objects))}"
    if done.tops:
        yield f"the names begin with {', '.join(done.tops)}: --only {done.tops[0]} exports that part alone, without it"


def _more(count: int) -> str:
    return f", and {count - _SOME} more" if count > _SOME else ""
