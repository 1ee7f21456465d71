"""What differs between two stored states: by their indexes, where both are ours, and by their bytes where those do not
say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asyncckpt.loading.contents import Value
from asyncckpt.loading.data_file import read_pool
from asyncckpt.loading.progress import Progress
from asyncckpt.report.indexed import IndexedCheckpoint
from asyncckpt.report.stored_item import StoredItem, doubtful
from asyncckpt.worker.archive import is_archive, stretched
from asyncckpt.worker.storage.storage import FileIdentity

if TYPE_CHECKING:
    from asyncckpt.exporting.stored import StoredState
    from asyncckpt.report.value_comparison import ValueDifference

# The first piece tells most values that differ, so it is a small one; the others are as large as is read at once.
_FIRST_BYTES, _PIECE_BYTES = 64 << 10, 2 << 20


class ReadableState(Protocol):
    """A stored state that can be compared with another."""

    path: str

    @property
    def values(self) -> Mapping[str, Value]:
        """By their names, in the order in which they are stored."""

    def data(self, name: str) -> bytes:
        """The bytes of what is no tensor; behind them may be zeros, as space to grow."""

    def state(self, names: list[str]) -> StoredState:
        """The tensors ``names``, to be read."""


class OthersState:
    """What others have stored: a ``ReadableState`` of all that is in it."""

    def __init__(self, path: str, state: StoredState, values: Iterable[Value]) -> None:
        """``values``: those of the ``state`` at ``path``."""
        self.path = path
        self.values = {value.name: value for value in values}
        self._state = state

    def data(self, name: str) -> bytes:
        return self._state.pickles([name])[name]

    def state(self, names: list[str]) -> StoredState:
        return self._state


@dataclass
class Difference:
    """A value that is not the same in two states; None: the one ``a``, or the other ``b``, does not have it.

    ``changes`` are "added", "removed", or some of "dtype", "shape", "value". ``measured``: how the values differ.
    """

    name: str
    a: Value | None
    b: Value | None
    changes: list[str]
    measured: ValueDifference | None = None

    @property
    def nbytes(self) -> int:
        """Of the larger one."""
        return max(value.nbytes for value in (self.a, self.b) if value is not None)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        a, b = (value and {"dtype": value.dtype, "shape": value.shape, "bytes": value.nbytes} for value in self.both)
        measured = self.measured and self.measured.facts()
        return {"name": self.name, "changes": self.changes, "a": a, "b": b, "values": measured}

    @property
    def both(self) -> tuple[Value | None, Value | None]:
        """As it is in the one, and in the other."""
        return self.a, self.b


@dataclass
class StateComparison:
    """What differs, the largest first; the values that are the ``same``; how many had to be ``read`` to say so."""

    differences: list[Difference] = field(default_factory=list)
    same: list[Value] = field(default_factory=list)
    read: int = 0


def compare_states(a: ReadableState, b: ReadableState, progress: Progress, *, measured: bool) -> StateComparison:
    """Compare two states.

    Args:
        a: The one.
        b: The other.
        progress: Told of the bytes of what the indexes do not tell.
        measured: Read also the tensors that differ in value or dtype, and say by how much.

    Raises:
        CheckpointError: Bytes are damaged, or cannot be read.
    """
    found, to_read = StateComparison(), _ToRead(a, b)
    for name in dict.fromkeys((*a.values, *b.values)):
        one, other = a.values.get(name), b.values.get(name)
        if one is None or other is None:
            found.differences.append(Difference(name, one, other, ["added" if one is None else "removed"]))
        elif changes := [each for each in ("dtype", "shape") if getattr(one, each) != getattr(other, each)]:
            found.differences.append(Difference(name, one, other, changes))
        elif (is_same := to_read.is_same(name)) is not None:
            _add(found, one, other, is_same)
    found.read = len(to_read.names)
    progress.expect(sum(a.values[name].nbytes for name in to_read.names))
    for name, is_same in to_read.compare(progress):
        _add(found, a.values[name], b.values[name], is_same)
    found.differences.sort(key=lambda each: (-each.nbytes, each.name))
    if measured:
        _measure(found, a, b, progress)
    return found


def _add(found: StateComparison, one: Value, other: Value, is_same: bool) -> None:
    if is_same:
        found.same.append(one)
    else:
        found.differences.append(Difference(one.name, one, other, ["value"]))


def _measure(found: StateComparison, a: ReadableState, b: ReadableState, progress: Progress) -> None:
    pairs = [(each, *each.both) for each in found.differences]
    some = [
        each for each, one, other in pairs if one and other and one.dtype and other.dtype and one.shape == other.shape
    ]
    if not some:
        return
    # Only here: all that is ours can be compared without torch.
    from asyncckpt.report.value_comparison import comparisons

    one, other = (side.state([each.name for each in some]) for side in (a, b))
    by_name = {each.name: each for each in some}
    progress.expect(sum(each.nbytes for each in some))
    with read_pool(a.path) as pool:
        for comparison in comparisons(one, other, by_name, pool):
            each = by_name[comparison.name]
            each.measured = comparison.difference()
            progress.update(each.nbytes)


class _Doubt(NamedTuple):
    """Bytes of the payloads of two items that may differ."""

    a: IndexedCheckpoint
    b: IndexedCheckpoint
    one: StoredItem
    other: StoredItem
    begin: int
    end: int

    def is_same(self) -> bool:
        """Whether they are equal after all. Raises ``DamagedCheckpointError``, ``StorageError``."""
        begin, nbytes = self.begin, _FIRST_BYTES
        while begin < self.end:
            stop = min(begin + nbytes, self.end)
            if self.a.read(self.one, begin, stop) != self.b.read(self.other, begin, stop):
                return False
            begin, nbytes = stop, _PIECE_BYTES
        return True


class _ToRead:
    """Values of two states of which it is not known whether they are the same: how each is to be compared."""

    def __init__(self, a: ReadableState, b: ReadableState) -> None:
        self._a, self._b = a, b
        self._doubts: dict[str, list[_Doubt]] = {}  # as bytes, piece by piece
        self._tensors: list[str] = []  # element by element, as they stand in other boxes, or other kinds of files
        self._objects: list[str] = []  # all bytes of one at once

    @property
    def _is_indexed(self) -> bool:
        return isinstance(self._a, IndexedCheckpoint) and isinstance(self._b, IndexedCheckpoint)

    @property
    def names(self) -> list[str]:
        """Of the values that are to be read."""
        return [*self._doubts, *self._tensors, *self._objects]

    def is_same(self, name: str) -> bool | None:
        """Whether the value ``name``, of one dtype and shape, is the same; None: it is to be read."""
        a, b = self._a, self._b
        if isinstance(a, IndexedCheckpoint) and isinstance(b, IndexedCheckpoint):
            if name in a.small and name in b.small:
                return a.small[name] == b.small[name]
            if name in a.items and name in b.items:
                return self._is_same_by_indexes(a, b, name)
        (self._tensors if a.values[name].dtype else self._objects).append(name)
        return None

    def _is_same_by_indexes(self, a: IndexedCheckpoint, b: IndexedCheckpoint, name: str) -> bool | None:
        ones, others = a.items[name], b.items[name]
        if [each.box for each in ones] != [each.box for each in others]:
            self._tensors.append(name)
            return None
        doubts = []
        for one, other in zip(ones, others, strict=True):
            if one.place == other.place is not None and _is_one_file(a.identity(one), b.identity(other)):
                continue
            has_one_size = one.item.payload_bytes == other.item.payload_bytes
            ranges = doubtful(one, other) if has_one_size else None
            if ranges != [] and (one.grows or other.grows):  # what is reserved behind it may differ
                self._objects.append(name)
                return None
            if ranges is None:
                return False
            doubts += [_Doubt(a, b, one, other, *each) for each in ranges]
        if not doubts:
            return True
        self._doubts[name] = doubts
        return None

    def compare(self, progress: Progress) -> Iterator[tuple[str, bool]]:
        """Read them. Yields the name of each, and whether it is the same. Raises ``CheckpointError``."""
        with read_pool(self._a.path) as pool:
            # What has to be unpickled is so on one thread: what torch takes for harmless is known to all threads alike.
            objects = (pool.map if self._is_indexed else map)(self._is_same_object, self._objects)
            for names, found in (
                (self._doubts, pool.map(self._is_same_as_bytes, self._doubts)),
                (self._objects, objects),
            ):
                for name, is_same in zip(names, found, strict=True):
                    progress.update(self._a.values[name].nbytes)
                    yield name, is_same
            if not self._tensors:
                return
            from asyncckpt.report.value_comparison import comparisons

            one, other = (side.state(self._tensors) for side in (self._a, self._b))
            for comparison in comparisons(one, other, self._tensors, pool):
                is_same = comparison.is_same()
                progress.update(self._a.values[comparison.name].nbytes)
                yield comparison.name, is_same

    def _is_same_object(self, name: str) -> bool:
        one, other = self._a.data(name), self._b.data(name)
        if is_archive(one) and is_archive(other):
            nbytes = max(len(one), len(other))
            one, other = stretched(one, nbytes), stretched(other, nbytes)
        if one.rstrip(b"\0") == other.rstrip(b"\0"):
            return True
        if self._is_indexed:
            return False
        # Others pickle in another form: what counts is what comes out.
        from asyncckpt.report.value_comparison import pickled_anew

        return pickled_anew(one, name, self._a.path) == pickled_anew(other, name, self._b.path)

    def _is_same_as_bytes(self, name: str) -> bool:
        return all(doubt.is_same() for doubt in self._doubts[name])


def _is_one_file(one: FileIdentity | None, other: FileIdentity | None) -> bool:
    return one is not None and other is not None and one[:2] == other[:2]
