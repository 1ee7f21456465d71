"""Reading a data file span by span, each checked on the way, from storage or from memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from asyncckpt.direct_file import DirectFile
from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.shm.segment import PAGE
from asyncckpt.worker.manifest import Index

# Read at once: so much that a disk is as fast as with more.
RUN_BYTES = 2 << 20
# More than cores, on a small machine: while some check and copy, others must keep the disk busy.
READ_THREADS = 4

Consume = Callable[[int, memoryview], None]
"""Called with an offset in the file and the bytes from there on, which are gone when it returns. On any thread."""

OnDamage = Callable[[DamagedCheckpointError], None]

Tell = Callable[[int], object]
"""Called with the bytes read since the last call. On any thread."""


class Destination(NamedTuple):
    """Where the bytes from ``begin`` to ``end`` of a file belong: in the memory at ``address``."""

    begin: int
    end: int
    address: int


FindDestination = Callable[[int, int], Destination | None]
"""Called with the beginning and the end of a part of a file: the one destination of any of it; None: there is none, or
several."""


class Part(NamedTuple):
    """``data`` that stands at ``begin`` in a file; ``placed``: it is already where it belongs."""

    begin: int
    data: memoryview
    placed: bool = False


def raise_damage(damage: DamagedCheckpointError) -> None:
    """The usual answer to a bad span."""
    raise damage


class SpanFile(ABC):
    """A data file, wherever its bytes are. ``path`` is for errors."""

    def __init__(self, path: str, index: Index, bounds: Sequence[int]) -> None:
        self.path = path
        self.index = index
        self._bounds = bounds

    def read(
        self,
        ranges: Iterable[tuple[int, int]],
        consume: Consume,
        pool: ThreadPoolExecutor,
        on_damage: OnDamage | None = raise_damage,
        find: FindDestination | None = None,
        tell: Tell | None = None,
    ) -> None:
        """Read the spans that the byte ``ranges`` (begin, end) touch, and ``consume`` them piece by piece.

        They are good if this returns: a bad span goes to ``on_damage``, once it is consumed, or in part, and that
        raises, or else reading goes on. None: nothing is checked. Where ``find`` has a destination for many bytes, they
        may be read straight to it, and are then not given to ``consume``. ``tell`` hears of all, in the end of as many
        as ``nbytes_read`` says.

        Raises ``DamagedCheckpointError``, ``StorageError``.
        """
        runs = deque(self._runs(ranges))

        def read_some() -> None:
            try:
                while True:
                    try:
                        first, last = runs.popleft()
                    except IndexError:
                        return
                    self._read_run(first, last, consume, on_damage, find)
                    if tell is not None:
                        tell(self._bounds[last] - self._bounds[first])
            except BaseException:
                runs.clear()  # so that the other threads end
                raise

        tasks = [pool.submit(read_some) for _ in range(min(READ_THREADS, len(runs)))]
        try:
            wait(tasks)
        finally:
            runs.clear()
        for task in tasks:
            task.result()

    def nbytes_read(self, ranges: Iterable[tuple[int, int]]) -> int:
        """How many bytes ``read`` has to read for the byte ``ranges``: whole spans."""
        return sum(self._bounds[last] - self._bounds[first] for first, last in self._touched(ranges))

    @property
    def nbytes(self) -> int:
        """The size the file was written with."""
        return self.index.nbytes

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    def in_place(self, begin: int, end: int) -> memoryview | None:
        """The bytes from ``begin`` to ``end``, good until this is closed; None where they have to be read."""
        return None

    @abstractmethod
    def _fetch(self, begin: int, end: int, find: FindDestination | None) -> Iterator[Part]:
        """The bytes from ``begin`` to ``end``, or as many as there are, in order; each part good until the next one.

        With ``find`` some of them may be where they belong; without it, up to ``RUN_BYTES`` are one part.
        """

    def _runs(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The spans that ``ranges`` touch, as runs of neighbours, (first, last + 1).

        Each of up to ``RUN_BYTES``, if no span is longer.
        """
        runs: list[tuple[int, int]] = []
        for first, last in self._touched(ranges):
            while first < last:
                stop = self._stop(first, last, RUN_BYTES)
                runs.append((first, stop))
                first = stop
        return runs

    def _touched(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The spans that ``ranges`` touch, (first, last + 1) of all that stand side by side."""
        edges = np.fromiter(chain.from_iterable(ranges), np.int64).reshape(-1, 2)
        edges = edges[edges[:, 0] < edges[:, 1]]
        bounds = np.asarray(self._bounds, np.int64)
        if len(edges) and edges[:, 1].max() > bounds[-1]:
            raise DamagedCheckpointError("the index of this file names bytes beyond its end", path=self.path)
        # How many ranges begin with a span, less those that end before it; their sum is how many touch it.
        change = np.zeros(len(bounds) + 1, np.int64)
        np.add.at(change, np.searchsorted(bounds, edges[:, 0], "right") - 1, 1)
        np.add.at(change, np.searchsorted(bounds, edges[:, 1], "left"), -1)
        touched = np.diff(np.cumsum(change[: len(bounds)]) > 0, prepend=False, append=False)
        turns = np.flatnonzero(touched).tolist()
        return zip(turns[::2], turns[1::2], strict=True)

    def _stop(self, first: int, last: int, nbytes: int) -> int:
        """Where to end what begins with span ``first``, so that it has up to ``nbytes``, or is that span alone."""
        return max(first + 1, bisect_right(self._bounds, self._bounds[first] + nbytes, first, last + 1) - 1)

    def _read_run(
        self, first: int, last: int, consume: Consume, on_damage: OnDamage | None, find: FindDestination | None
    ) -> None:
        begin, end = self._bounds[first], self._bounds[last]
        if last == first + 1:
            self._read_span(first, self._fetch(begin, end, find), consume, on_damage)
            return
        for part in self._fetch(begin, end, None):
            self._check_length(len(part.data), end - begin)
            self._read_short(first, last, part.data, consume, on_damage)

    def _check_length(self, found: int, nbytes: int) -> None:
        if found < nbytes:
            raise DamagedCheckpointError("the file is damaged: it is shorter than it was written", path=self.path)

    def _read_span(self, span: int, parts: Iterable[Part], consume: Consume, on_damage: OnDamage | None) -> None:
        """Check and consume one span piece by piece."""
        digest = xxh3_64()
        read = 0
        for part in parts:
            read += len(part.data)
            for at in range(0, len(part.data), RUN_BYTES):
                piece = part.data[at : at + RUN_BYTES]
                if on_damage is not None:
                    digest.update(piece)
                if not part.placed:
                    consume(part.begin + at, piece)
        self._check_length(read, self._bounds[span + 1] - self._bounds[span])
        if on_damage is not None and digest.intdigest() != self.index.checksums[span]:
            on_damage(self._damage(span))

    def _read_short(
        self, first: int, last: int, data: memoryview, consume: Consume, on_damage: OnDamage | None
    ) -> None:
        """Check and consume several spans, whose bytes are ``data``, at once."""
        begin = self._bounds[first]
        consume(begin, data)
        if on_damage is None:
            return
        # All in C: of 100,000 small spans each microsecond would be a tenth of a second.
        edges = [bound - begin for bound in self._bounds[first : last + 1]]
        spans = map(data.__getitem__, map(slice, edges, edges[1:]))
        for span, found in enumerate(map(xxh3_64_intdigest, spans), first):
            if found != self.index.checksums[span]:
                on_damage(self._damage(span))

    def _damage(self, span: int) -> DamagedCheckpointError:
        begin, end = self._bounds[span], self._bounds[span + 1]
        names = ", ".join(map(repr, self.index.names_at(begin, end)))
        what = names or "of no value, but of the space between them"
        return DamagedCheckpointError(f"the bytes {begin:,} to {end:,} are damaged: {what}", path=self.path)


class DataFile(SpanFile):
    """One on storage, opened for reading, past the page cache where the file system allows."""

    def __init__(self, path: str, index: Index) -> None:
        """Raises ``DamagedCheckpointError`` if it is missing, else ``StorageError``."""
        super().__init__(path, index, index.bounds)
        self._file = DirectFile(path)

    def close(self) -> None:
        self._file.close()

    def _fetch(self, begin: int, end: int, find: FindDestination | None) -> Iterator[Part]:
        to = find(begin, end) if find is not None else None
        if to is not None:
            # Of it, what is whole blocks of the file, and as the device wants its memory aligned.
            first, last = self._file.blocks(max(to.begin, begin), min(to.end, end))
            address = to.address + first - to.begin
            if last - first >= RUN_BYTES and self._file.may_read_to(address):
                read = self._file.read_around(begin, first, last, end, address)
                if read is not None:
                    yield Part(begin, read[0])
                    yield Part(first, read[1], placed=True)
                    yield Part(last, read[2])
                    return
        while begin < end:
            # Up to the end of a block, so that the next one is not read twice.
            stop = min(end, (begin + RUN_BYTES) // PAGE * PAGE) if end - begin > RUN_BYTES else end
            yield Part(begin, self._file.read(begin, stop))
            begin = stop


class MemoryFile(SpanFile):
    """One that is still in memory."""

    def __init__(self, path: str, index: Index, data: memoryview, bounds: Sequence[int]) -> None:
        super().__init__(path, index, bounds)
        self._data = data

    def close(self) -> None:
        pass

    def in_place(self, begin: int, end: int) -> memoryview:
        return self._data[begin:end]

    def _fetch(self, begin: int, end: int, find: FindDestination | None) -> Iterator[Part]:
        yield Part(begin, self._data[begin:end])


def read_pool() -> ThreadPoolExecutor:
    """The threads that read."""
    return ThreadPoolExecutor(READ_THREADS, thread_name_prefix="asyncckpt-read")
