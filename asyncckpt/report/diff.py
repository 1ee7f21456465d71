"""``asyncckpt diff``: what was added, removed or changed from one stored state to another."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from typing import Any

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.loading.contents import Value
from asyncckpt.loading.progress import Progress
from asyncckpt.report.answers import DIFFERENT, GOOD, UNUSABLE, Answers
from asyncckpt.report.differences import Difference, OthersState, ReadableState, StateComparison, compare_states
from asyncckpt.report.formats import number, shape_of, size_of
from asyncckpt.report.indexed import IndexedCheckpoint
from asyncckpt.report.others import values_of_state
from asyncckpt.report.places import found_at, newest_of
from asyncckpt.worker.manifest import MANIFEST_NAME
from asyncckpt.worker.storage import absolute, storage_for

_HEADERS = ("name", "change", "in A", "in B", "size")
_MEASURED = ("greatest difference", "mean difference", "NaN", "infinite")


def show_diff(answers: Answers, _: None, args: argparse.Namespace) -> None:
    """Show what differs between ``args.a`` and ``args.b``; then this ends with 1, and where nobody knows, with 2."""
    with answers.about(args.a), Progress("comparing", shown=not args.json) as bar, ExitStack() as held:
        try:
            a, b = (_opened(answers, given, held) for given in (args.a, args.b))
            found = compare_states(a, b, bar, measured=args.values)
        except DamagedCheckpointError:
            answers.fail(UNUSABLE)
            raise
        _show(answers, a, b, found, args)


def _opened(answers: Answers, given: str, held: ExitStack) -> ReadableState:
    path = absolute(_place(answers, given))
    if storage_for(path).exists(os.path.join(path, MANIFEST_NAME)):
        return IndexedCheckpoint(path, held)
    # Only here: all that is ours can be looked at without torch.
    from asyncckpt.exporting.opening import open_state

    state = open_state(path, held, [], weights_only=True)
    return OthersState(path, state, values_of_state(state))


def _place(answers: Answers, given: str) -> str:
    """What is compared of ``given``: of a root the newest checkpoint."""
    try:
        paths = found_at(given)
    except CheckpointNotFoundError:  # or it is a folder of safetensors
        return given
    if paths == [given]:
        return given
    if (newest := newest_of(answers, paths)) is None:
        raise CheckpointError("there is no checkpoint here that can be read", path=given)
    if answers.status != GOOD:  # one of them is damaged, as was said
        answers.fail(UNUSABLE)
    answers.line(f"{given}: {number(len(paths), 'checkpoint')}; {newest} is the newest of them")
    return newest


def _show(
    answers: Answers, a: ReadableState, b: ReadableState, found: StateComparison, args: argparse.Namespace
) -> None:
    facts: dict[str, Any] = {"a": a.path, "b": b.path, "is_same": not found.differences, "same": len(found.same)}
    facts |= {"read": found.read, "differences": [each.facts() for each in found.differences]}
    answers.add(facts)
    for each in found.differences:
        cells = [each.name, ", ".join(each.changes), *map(_form, each.both), size_of(each.nbytes)]
        answers.row((*_HEADERS, *(_MEASURED if args.values else ())), *cells, *(_measured(each) if args.values else ()))
    answers.show_table()
    same = f"{number(len(found.same), 'value')}, {size_of(sum(value.nbytes for value in found.same))}"
    if not found.differences:
        answers.line(f"no difference in {same}")
        return
    answers.fail(DIFFERENT)
    answers.line(f"\n{number(len(found.differences), 'difference')}; the same: {same}")
    for one, other in ((a, b), (b, a)):
        if (part := _part_of(one, other)) is not None:
            answers.line(
                f"{other.path} has names of {part!r} in {one.path}: asyncckpt export --only {part} writes that part,"
                " with the same names"
            )


def _part_of(whole: ReadableState, other: ReadableState) -> str | None:
    """Return the key under which ``whole`` has all names of ``other``; None: there is none, or they share names."""
    if not other.values or not whole.values.keys().isdisjoint(other.values):
        return None
    first = next(iter(other.values))
    parts = (name.removesuffix(f".{first}") for name in whole.values if name.endswith(f".{first}"))
    return next((part for part in parts if all(f"{part}.{name}" in whole.values for name in other.values)), None)


def _form(value: Value | None) -> str:
    """A value, in a cell."""
    return "" if value is None else f"{value.dtype or 'object'} {shape_of(value.shape)}".rstrip()


def _measured(difference: Difference) -> list[str]:
    its = difference.measured
    if its is None:
        return [""] * len(_MEASURED)
    numbers = ["" if each is None else f"{each:.4g}" for each in (its.greatest, its.mean)]
    return [*numbers, *("{:,} / {:,}".format(*each) if any(each) else "" for each in (its.nan, its.infinite))]
