"""``asyncckpt diff``: report values that were added, removed or changed between two checkpoints, by their indexes.

An index has a checksum for each span of a data file. If a value has the same spans in both checkpoints, the checksums
tell whether it is the same. Otherwise, as after a change of the number of ranks, its bytes are read.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.exporting.source_files import OpenFiles
from asyncckpt.format.archive import is_archive, stretched
from asyncckpt.format.index import Index, Item
from asyncckpt.loading.contents import Shard, Value, checkpoints_at, values_of
from asyncckpt.loading.data_file import ChecksummedFile, read_pool
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import StorageSource, is_stock
from asyncckpt.report.answers import DIFFERENT, GOOD, UNUSABLE, Answers, newest_of, number, shape_of, size_of
from asyncckpt.storage import absolute, storage_for

_HEADERS = ("name", "change", "in A", "in B", "size")
_MEASURED = ("elements that differ", "largest difference")


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # the offsets of a shard in its tensor, and its shape


@dataclass(frozen=True)
class _Stored:
    """An item, and the index that has it."""

    item: Item
    index: Index

    def spans(self) -> dict[tuple[int, int], int]:
        """Return the checksum of each span of the item, by its first byte and its end, counted from the item on.

        A span also has the header before the payload, and the zeros up to the next item.
        """
        item, bounds = self.item, self.index.bounds
        first, last = bisect_left(bounds, item.at), bisect_left(bounds, item.at + item.nbytes)
        edges = pairwise(bound - item.at for bound in bounds[first : last + 1])
        return dict(zip(edges, self.index.checksums[first:last], strict=True))

    def is_same(self, other: _Stored) -> bool | None:
        """Compare the checksums of two items.

        Return None if the checksums do not tell whether the payloads are the same.
        """
        leads = {each.item.payload_at - each.item.at for each in (self, other)}
        if len(leads) > 1 or self.item.payload_bytes != other.item.payload_bytes:
            return None
        ones, others = self.spans(), other.spans()
        if any(ones[span] != others[span] for span in ones.keys() & others.keys()):
            return False
        return True if ones.keys() == others.keys() else None


class _Checkpoint:
    """A checkpoint of this library, or a set of files, protected against removal until ``held`` ends."""

    def __init__(self, path: str, held: ExitStack) -> None:
        """Read the manifest and the indexes. Raises ``CheckpointError``."""
        held.enter_context(storage_for(path).reading(path))
        self.path = path
        self._held = held
        self._source = StorageSource(path)
        self._open_files = OpenFiles()
        self._files: dict[str, ChecksummedFile] = {}
        indexes = list(self._source.indexes())
        self.boxes: dict[str, dict[_Box, _Stored]] = {}
        """The place of each stored part, by the name of the value, then by the offsets and the shape of the part."""
        for index in indexes:
            for item in index.items:
                box = (*item.offsets,), (*item.shape,)
                self.boxes.setdefault(item.name, {}).setdefault(box, _Stored(item, index))
        self.small = {name: self._source.manifest.files[name] for name in self._source.manifest.small_files()}
        """The manifest's entries of the small files of a set, by name."""
        self.values = {value.name: value for value in values_of(indexes, path)}
        self.values |= {name: Value(name, "", [Shard(name, its["bytes"])]) for name, its in self.small.items()}

    def file(self, stored: _Stored) -> ChecksummedFile:
        """Open the file of an item. Raises ``DamagedCheckpointError``, ``StorageError``."""
        name = stored.index.data
        if name not in self._files:
            self._files[name] = self._held.enter_context(closing(self._source.open(name, self._open_files.open)))
        return self._files[name]

    def data(self, name: str, pool: ThreadPoolExecutor) -> bytes:
        """Read an object, a record or a small file. Raises ``DamagedCheckpointError``, ``StorageError``."""
        if name in self.small:
            return self._source.read(name)
        # Imported here, because most of ``diff`` needs no torch.
        from asyncckpt.report.value_comparison import read_object

        (stored,) = self.boxes[name].values()
        return read_object(self.file(stored), stored.item, pool)


@dataclass
class _Difference:
    """A value that differs. ``a``, ``b``: the value in each checkpoint; None: missing.

    ``measured``: the number of elements that differ, and the largest absolute difference.
    """

    name: str
    a: Value | None
    b: Value | None
    changes: list[str]
    measured: tuple[int, float | None] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Return the number of bytes of the larger value."""
        return max(value.nbytes for value in (self.a, self.b) if value is not None)

    @property
    def is_measurable(self) -> bool:
        """Return whether both are tensors of one shape."""
        return bool(self.a and self.b and self.a.dtype and self.b.dtype and self.a.shape == self.b.shape)

    def facts(self) -> dict[str, Any]:
        """Return the difference as JSON data."""
        a, b = (
            value and {"dtype": value.dtype, "shape": value.shape, "bytes": value.nbytes} for value in (self.a, self.b)
        )
        measured = self.measured and dict(zip(("elements", "max_abs"), self.measured, strict=True))
        return {"name": self.name, "changes": self.changes, "a": a, "b": b, "values": measured}


def show_diff(answers: Answers, _: None, args: argparse.Namespace) -> None:
    """Show the differences between ``args.a`` and ``args.b``, and set the exit status."""
    with answers.about(args.a), Progress("comparing", shown=not args.json) as bar, ExitStack() as held:
        try:
            a, b = (_Checkpoint(absolute(_place(answers, given)), held) for given in (args.a, args.b))
            found, to_read = _by_indexes(a, b)
            if args.values:
                to_read |= {each.name: each for each in found if each.is_measurable}
            found = [each for each in found if each.name not in to_read] + list(
                _read(a, b, to_read, bar, is_asked=args.values)
            )
        except DamagedCheckpointError:
            answers.fail(UNUSABLE)
            raise
        found.sort(key=lambda each: (-each.nbytes, each.name))
        _show(answers, a, b, found, len(to_read), is_measured=args.values)


def _place(answers: Answers, given: str) -> str:
    """Return the checkpoint at ``given``; for a root, its newest checkpoint."""
    paths = checkpoints_at(given)
    if paths == [given]:
        if is_stock(given):
            raise CheckpointError(
                "stock DCP wrote this, without an index: asyncckpt export --to dcp makes a checkpoint with one",
                path=given,
            )
        return given
    if (newest := newest_of(answers, paths)) is None:
        raise CheckpointError("there is no checkpoint here that can be read", path=given)
    if answers.status != GOOD:  # one of the checkpoints is damaged, which has been reported
        answers.fail(UNUSABLE)
    answers.line(f"{given}: {number(len(paths), 'checkpoint')}; {newest} is the newest of them")
    return newest


def _by_indexes(a: _Checkpoint, b: _Checkpoint) -> tuple[list[_Difference], dict[str, _Difference]]:
    """Return the differences, and, by name, the values that the indexes do not suffice to compare."""
    found: list[_Difference] = []
    unknown: dict[str, _Difference] = {}
    for name in dict.fromkeys((*a.values, *b.values)):
        one, other = a.values.get(name), b.values.get(name)
        if one is None or other is None:
            found.append(_Difference(name, one, other, ["added" if one is None else "removed"]))
        elif changes := [each for each in ("dtype", "shape") if getattr(one, each) != getattr(other, each)]:
            found.append(_Difference(name, one, other, changes))
        elif (is_same := _is_same(a, b, name)) is None:
            unknown[name] = _Difference(name, one, other, ["value"])
        elif not is_same:
            found.append(_Difference(name, one, other, ["value"]))
    return found, unknown


def _is_same(a: _Checkpoint, b: _Checkpoint, name: str) -> bool | None:
    if name in a.small and name in b.small:
        return a.small[name] == b.small[name]
    ones, others = a.boxes.get(name, {}), b.boxes.get(name, {})
    if ones.keys() != others.keys():
        return None
    verdicts = {stored.is_same(others[box]) for box, stored in ones.items()}
    return False if False in verdicts else None if None in verdicts else True


def _read(
    a: _Checkpoint, b: _Checkpoint, to_read: Mapping[str, _Difference], bar: Progress, *, is_asked: bool
) -> Iterator[_Difference]:
    """Read values from both checkpoints. Yield the values that differ, with the measure of each if ``is_asked``."""
    if not to_read:
        return
    from asyncckpt.report.value_comparison import measure, read_tensor  # here: most of ``diff`` needs no torch

    bar.expect(sum(each.nbytes for each in to_read.values()))
    with read_pool(a.path) as pool:
        for name, each in to_read.items():
            if each.is_measurable and each.a:
                stored = [[(side.file(its), its.item) for its in side.boxes[name].values()] for side in (a, b)]
                one, other = (
                    read_tensor(parts, each.a.shape, side.path, pool)
                    for parts, side in zip(stored, (a, b), strict=True)
                )
                measured = measure(one, other)
                is_same = each.changes == ["value"] and not measured[0]
                each.measured = measured if is_asked else None
            else:
                is_same = _is_one_object(a.data(name, pool), b.data(name, pool))
            bar.update(each.nbytes)
            if not is_same:
                yield each


def _is_one_object(one: bytes, other: bytes) -> bool:
    """Compare the bytes of two objects without the zeros that are reserved for their growth."""
    if is_archive(one) and is_archive(other):
        nbytes = max(len(one), len(other))
        one, other = stretched(one, nbytes), stretched(other, nbytes)
    return one.rstrip(b"\0") == other.rstrip(b"\0")


def _show(
    answers: Answers, a: _Checkpoint, b: _Checkpoint, found: list[_Difference], read: int, *, is_measured: bool
) -> None:
    names = {each.name for each in found}
    same = [value for value in a.values.values() if value.name not in names]
    facts: dict[str, Any] = {"a": a.path, "b": b.path, "is_same": not found, "same": len(same), "read": read}
    answers.add(facts | {"differences": [each.facts() for each in found]})
    for each in found:
        cells = [each.name, ", ".join(each.changes), _form(each.a), _form(each.b), size_of(each.nbytes)]
        elements, largest = each.measured or (None, None)
        measured = (elements, "" if largest is None else f"{largest:.4g}") if is_measured else ()
        answers.row((*_HEADERS, *(_MEASURED if is_measured else ())), *cells, *measured)
    answers.show_table()
    about = f"{number(len(same), 'value')}, {size_of(sum(value.nbytes for value in same))}"
    if not found:
        answers.line(f"no difference in {about}")
        return
    answers.fail(DIFFERENT)
    answers.line(f"\n{number(len(found), 'difference')}; the same: {about}")
    for one, other in ((a, b), (b, a)):
        if (part := _part_of(one.values, other.values)) is not None:
            answers.line(
                f"{other.path} has names of {part!r} in {one.path}: asyncckpt export --only {part} writes that part,"
                " with the same names"
            )


def _part_of(whole: Mapping[str, Value], other: Mapping[str, Value]) -> str | None:
    """Return the key under which ``whole`` has all names of ``other``; None: there is none, or they share names."""
    if not other or not whole.keys().isdisjoint(other):
        return None
    first = next(iter(other))
    parts = (name.removesuffix(f".{first}") for name in whole if name.endswith(f".{first}"))
    return next((part for part in parts if all(f"{part}.{name}" in whole for name in other)), None)


def _form(value: Value | None) -> str:
    """Return the dtype and the shape of a value, for a cell."""
    return "" if value is None else f"{value.dtype or 'object'} {shape_of(value.shape)}".rstrip()
