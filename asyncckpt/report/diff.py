"""``asyncckpt diff``: report values that were added, removed or changed between two checkpoints, by their indexes.

An index has a checksum for each span of a data file. If a value has the same spans in both checkpoints, the checksums
tell whether the value is the same. Otherwise, as after a change of the number of ranks, only its bytes can tell, which
``--values`` reads.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.format.archive import is_archive, stretched
from asyncckpt.format.index import Index, Item
from asyncckpt.loading.contents import Shard, Value, values_of
from asyncckpt.loading.data_file import read_pool
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import StorageSource, stock_kind
from asyncckpt.report.answers import (
    AUTHORS,
    DIFFERENT,
    GOOD,
    UNUSABLE,
    Answers,
    checkpoint_at,
    number,
    shape_of,
    size_of,
)
from asyncckpt.storage import absolute, storage_for

if TYPE_CHECKING:
    import torch

_OTHERWISE = "stored otherwise"
_HEADERS = ("name", "change", "in A", "in B", "size")
_MEASURED = ("elements that differ", "largest difference")
_CONVERTED = 1 << 20  # elements that are converted to float64 at once


class _Difference(NamedTuple):
    """The changes of a value, the number of elements that differ, and the largest absolute difference."""

    changes: list[str]
    elements: int | None = None
    largest: float | None = None


class _Checkpoint:
    """A checkpoint of this library, or a set of files, protected against removal until ``held`` ends."""

    def __init__(self, path: str, held: ExitStack) -> None:
        """Read the manifest and the indexes. Raises ``CheckpointError``."""
        held.enter_context(storage_for(path).reading(path))
        self.path = path
        self._source = StorageSource(path)
        indexes = list(self._source.indexes())
        files = self._source.manifest.files
        self._small = {name: files[name] for name in self._source.manifest.small_files()}
        self.values = {value.name: value for value in values_of(indexes, path)}
        self.values |= {name: Value(name, "", [Shard(name, its["bytes"])]) for name, its in self._small.items()}
        self._parts: dict[str, dict[tuple[int, ...], tuple[Index, Item]]] = {}
        for index in indexes:
            for item in index.items:  # DCP stores each part once
                self._parts.setdefault(item.name, {}).setdefault((*item.offsets, *item.shape), (index, item))

    def spans(self, name: str) -> dict[tuple[object, ...], object]:
        """Return the checksums of a value, by the place of each span in the shards of the value.

        A span also has the header before the payload, and the zeros up to the next item.
        """
        if name in self._small:
            return {(): self._small[name].get("xxh3")}
        found: dict[tuple[object, ...], object] = {}
        for box, (index, item) in self._parts[name].items():
            first, last = (bisect_left(index.bounds, at) for at in (item.at, item.at + item.nbytes))
            for span in range(first, last):
                begin, end = (index.bounds[each] - item.payload_at for each in (span, span + 1))
                place = (*box, item.payload_bytes, begin, end)
                found[place] = index.checksums[span]
        return found

    def object(self, name: str, pool: ThreadPoolExecutor) -> bytes:
        """Read an object, a record or a small file. Raises ``DamagedCheckpointError``, ``StorageError``."""
        if name in self._small:
            return self._source.read(name)
        ((index, item),) = self._parts[name].values()
        return self._read(index, item, pool).numpy().tobytes()

    def tensor(self, name: str, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Read a whole tensor. Raises ``DamagedCheckpointError``, also if a shard is missing, and ``StorageError``."""
        import torch

        from asyncckpt.exporting.checkpoint_source import box_of, whole
        from asyncckpt.loading.read_requests import dtype_named

        parts, shape = self._parts[name].values(), self.values[name].shape
        boxes = [box_of(index.data, item) for index, item in parts]
        dtype = whole(name, {dtype_named(item.dtype) for _, item in parts}, shape, boxes, self.path).dtype
        found = torch.empty(shape, dtype=dtype, device="cpu")
        for index, item in parts:
            at = tuple(slice(begin, begin + n) for begin, n in zip(item.offsets, item.shape, strict=True))
            found[at] = self._read(index, item, pool).view(dtype).view(item.shape)
        return found

    def _read(self, index: Index, item: Item, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Read the payload of an item."""
        import torch

        from asyncckpt.loading.data_file import fetch

        data = torch.empty(item.payload_bytes, dtype=torch.uint8, device="cpu")
        with closing(self._source.open(index.data)) as file:
            place = (index.data, item.payload_at, item.payload_at + item.payload_bytes, data.data_ptr())
            fetch({index.data: file}, [place], pool)
        return data


def show_diff(answers: Answers, _: None, args: argparse.Namespace) -> None:
    """Show the differences between ``args.a`` and ``args.b``, and set the exit status."""
    with answers.about(args.a), Progress("comparing", shown=not args.json) as bar, ExitStack() as held:
        try:
            a, b = (_Checkpoint(absolute(_place(answers, given)), held) for given in (args.a, args.b))
            found = _by_indexes(a, b)
            if args.values:
                found = _by_values(a, b, found, bar)
        except DamagedCheckpointError:
            answers.fail(UNUSABLE)
            raise
        _show(answers, a, b, found, is_measured=args.values)


def _place(answers: Answers, given: str) -> str:
    """Return the checkpoint at ``given``; for a root, its newest checkpoint."""
    path = checkpoint_at(answers, given)
    if path is None:
        raise CheckpointNotFoundError("there is no checkpoint here that can be read", path=given)
    if (kind := stock_kind(path)) is not None:
        raise CheckpointError(
            f"{AUTHORS[kind]} wrote this, without an index: asyncckpt export --to dcp makes a checkpoint with one",
            path=path,
        )
    if answers.status != GOOD:  # one of the checkpoints is damaged, which has been reported
        answers.fail(UNUSABLE)
    return path


def _by_indexes(a: _Checkpoint, b: _Checkpoint) -> dict[str, _Difference]:
    """Return the differences by name, as far as the indexes tell."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys((*a.values, *b.values)):
        one, other = a.values.get(name), b.values.get(name)
        if one is None or other is None:
            found[name] = ["added" if one is None else "removed"]
        elif changes := [each for each in ("dtype", "shape") if getattr(one, each) != getattr(other, each)]:
            found[name] = changes
        elif (ones := a.spans(name)) != (others := b.spans(name)):
            is_known = any(ones[span] != others[span] for span in ones.keys() & others.keys())
            found[name] = ["value" if is_known else _OTHERWISE]
    return {name: _Difference(changes) for name, changes in found.items()}


def _by_values(
    a: _Checkpoint, b: _Checkpoint, found: Mapping[str, _Difference], bar: Progress
) -> dict[str, _Difference]:
    """Return the differences that remain after reading the values, each tensor with its measure."""
    to_read = {name for name, each in found.items() if each.changes == [_OTHERWISE]}
    to_read |= {name for name, each in found.items() if each.changes == ["value"] and a.values[name].dtype}
    remaining = {name: each for name, each in found.items() if name not in to_read}
    bar.expect(sum(a.values[name].nbytes for name in to_read))
    with read_pool(a.path) as pool:
        for name in sorted(to_read):
            if (difference := _read(a, b, name, pool)) is not None:
                remaining[name] = difference
            bar.update(a.values[name].nbytes)
    return remaining


def _read(a: _Checkpoint, b: _Checkpoint, name: str, pool: ThreadPoolExecutor) -> _Difference | None:
    """Read a value from both checkpoints. Return None if it is the same."""
    if a.values[name].dtype:
        elements, largest = _measure(a.tensor(name, pool), b.tensor(name, pool))
        return _Difference(["value"], elements, largest) if elements else None
    is_same = _is_one_object(a.object(name, pool), b.object(name, pool))
    return None if is_same else _Difference(["value"])


def _is_one_object(one: bytes, other: bytes) -> bool:
    """Compare the bytes of two objects without the zeros that are reserved for their growth."""
    if is_archive(one) and is_archive(other):
        one, other = (stretched(each, max(len(one), len(other))) for each in (one, other))
    return one.rstrip(b"\0") == other.rstrip(b"\0")


def _measure(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float | None]:
    """Count the elements with other bytes in two tensors of one dtype and shape.

    Returns:
        The count, and the largest absolute difference of two finite elements in float64. The difference is None if no
            two elements are finite, or torch cannot convert the dtype.
    """
    import torch

    count, largest = 0, None
    for a, b in zip(*(torch.split(each.reshape(-1), _CONVERTED) for each in (one, other)), strict=True):
        rows = (each.view(torch.uint8).view(len(each), each.itemsize) for each in (a, b))
        count += int(torch.ne(*rows).any(dim=1).sum())
        wide = torch.complex128 if a.is_complex() else torch.float64
        try:
            differences = (a.to(wide) - b.to(wide)).abs()
        except (RuntimeError, NotImplementedError, TypeError):  # torch only knows the bytes of some dtypes
            continue
        finite = differences[differences.isfinite()]
        largest = max(largest or 0.0, float(finite.max())) if len(finite) else largest
    return count, largest


def _show(
    answers: Answers, a: _Checkpoint, b: _Checkpoint, found: Mapping[str, _Difference], *, is_measured: bool
) -> None:
    def nbytes(name: str) -> int:
        return max(side.values[name].nbytes for side in (a, b) if name in side.values)

    differences = []
    for name in sorted(found, key=lambda name: (-nbytes(name), name)):
        changes, elements, largest = found[name]
        one, other = a.values.get(name), b.values.get(name)
        values = None if elements is None else {"elements": elements, "max_abs": largest}
        differences.append({"name": name, "changes": changes, "a": _facts(one), "b": _facts(other), "values": values})
        measured = (elements, "" if largest is None else f"{largest:.4g}") if is_measured else ()
        cells = (name, ", ".join(changes), _form(one), _form(other), size_of(nbytes(name)))
        answers.row((*_HEADERS, *(_MEASURED if is_measured else ())), *cells, *measured)
    same = [value for value in a.values.values() if value.name not in found]
    undecided = sum(each.changes == [_OTHERWISE] for each in found.values())
    facts = {"a": a.path, "b": b.path, "is_same": not found, "same": len(same), "undecided": undecided}
    answers.add({**facts, "differences": differences})
    answers.show_table()
    about = f"{number(len(same), 'value')}, {size_of(sum(value.nbytes for value in same))}"
    if not found:
        answers.line(f"no difference in {about}")
        return
    answers.fail(DIFFERENT)
    answers.line(f"\n{number(len(found), 'difference')}; the same: {about}")
    if undecided:
        answers.line(f"{number(undecided, 'value')} {_OTHERWISE}: --values reads what the indexes cannot decide")


def _facts(value: Value | None) -> dict[str, Any] | None:
    return None if value is None else {"dtype": value.dtype, "shape": value.shape, "bytes": value.nbytes}


def _form(value: Value | None) -> str:
    """Return the dtype and the shape of a value, for a cell."""
    return "" if value is None else f"{value.dtype or 'object'} {shape_of(value.shape)}".rstrip()
