"""Read data files from storage or memory: compare the checksum of each span, and copy bytes to their destinations."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.format.index import Index
from asyncckpt.shm.huge import huge_buffer, own_buffer
from asyncckpt.shm.memcpy import Destinations, address_of, memory_at
from asyncckpt.shm.segment import IMAGE_PAGE, round_up
from asyncckpt.storage import is_address, storage_for
from asyncckpt.storage.storage import FileIdentity, InputFile
from asyncckpt.threads import Pool, settle


def sharing(folder: str, name: str) -> list[str]:
    """Return the names of the other checkpoints beside ``folder`` that share the file ``name`` (hard links), sorted.

    The list only adds to another error, so it is empty if storage cannot be read.
    """
    above, its_own = os.path.split(folder)
    known = _identity(os.path.join(folder, name))
    if known is None or known.links < 2:
        return []
    found = []
    with contextlib.suppress(CheckpointError):
        for other in sorted(storage_for(folder).names_in(above)):
            if other == its_own or other.startswith("."):  # attempts, and checkpoints that are being removed
                continue
            its = _identity(os.path.join(above, other, name))
            if its is not None and its[:2] == known[:2]:
                found.append(other)
    return found


def _identity(path: str) -> FileIdentity | None:
    with contextlib.suppress(CheckpointError):
        return storage_for(path).identity(path)
    return None


def distrusted(folder: str, name: str) -> str:
    """Prevent later checkpoints from linking to the damaged file ``name`` of the checkpoint in ``folder``.

    Returns a text to append to the error: the other checkpoints that share the file; "" if none is found.
    """
    storage_for(folder).distrust(os.path.join(folder, name))
    others = sharing(folder, name)
    if not others:
        return ""
    they_are = "they are" if len(others) > 1 else "that is"
    return f"; this file is shared with {', '.join(others)}: {they_are} damaged, too; save again"


def explained(error: DamagedCheckpointError, path: str, name: str) -> DamagedCheckpointError:
    """Distrust the file at ``path``, see ``distrusted``. Return the error with the other checkpoints that share it.

    ``name`` is the file's name in the checkpoint.
    """
    more = distrusted(path.removesuffix(name).rstrip("/"), name)
    return DamagedCheckpointError(error.message + more, path=error.path, rank=error.rank, step=error.step)


class CheckedFile(NamedTuple):
    """The identity of a file, and the checksums of the indexes that it was checked against."""

    device: int
    inode: int
    indexes: tuple[str, ...]


CheckedFiles: TypeAlias = dict[CheckedFile, list[str]]
"""The error texts of damages in files with several hard links. With them, each file is read only once."""


# Bytes that are checked and copied together, while they are in the CPU cache. Also the size of one read, unless the
# storage sets a larger one.
RUN_BYTES = 2 << 20
# More threads than cores on a small machine: while some threads check and copy, others keep the disk busy. One thread
# checks and copies some 4 GB/s. This number keeps up with a link to a device; more would disturb other ranks.
READ_THREADS = min(16, max(4, len(os.sched_getaffinity(0))))
# Threads for an object store, where each request waits for the network.
_REQUESTS = 16
# Number of runs that are queued before the first of them is done, so that a slow run does not block the others.
_AHEAD = 4 * READ_THREADS

# Buffer of each thread, in bytes: one read, and the rest of the blocks at its ends.
_BUFFER_BYTES = RUN_BYTES + 2 * IMAGE_PAGE

# Maximum size of the buffer that a thread keeps for reading plain files.
_KEPT_BYTES = 2 << 20

_NOWHERE = Destinations([], [], [])


class ReadRun(NamedTuple):
    """Spans that were read: their number of bytes, and an error for each damaged span."""

    nbytes: int
    damages: list[DamagedCheckpointError]


class FilePart(NamedTuple):
    """``data`` at offset ``begin`` of a file. ``placed``: the data is already at its destination."""

    begin: int
    data: memoryview
    placed: bool = False


class FileReading:
    """Iterate over runs of a file, in the order of the file, while threads read them.

    The total size of the runs is ``nbytes_read(ranges)``. Some runs are read ahead of the caller. Threads may write to
    the destinations until ``close`` returns.
    """

    def __init__(
        self,
        file: ChecksummedFile,
        runs: Iterator[tuple[int, int]],
        pool: ThreadPoolExecutor,
        destinations: Destinations,
        at_once: int,
        *,
        verify: bool,
    ) -> None:
        """Start to read the first runs.

        Args: see ``ChecksummedFile.read``; ``runs`` has the first span of each run, and the span after its last.
        """
        self._file, self._runs, self._pool = file, runs, pool
        self._destinations, self._verify = destinations, verify
        self._tasks: deque[Future[ReadRun]] = deque()
        try:
            for _ in range(at_once):
                self._begin_next()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[ReadRun]:
        """Yield each run once it is read.

        Raises:
            DamagedCheckpointError: The file is shorter than its index says.
            StorageError: The file cannot be read.
        """
        while self._tasks:
            run = self._tasks[0].result()  # still in the tasks, so that ``close`` waits for it after an interrupt
            self._tasks.popleft()
            self._begin_next()
            self._file.nbytes_done += run.nbytes
            yield run

    def close(self) -> None:
        """Start no more runs, and wait for the runs under way."""
        settle(self._tasks)

    def __enter__(self) -> FileReading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_next(self) -> None:
        if (spans := next(self._runs, None)) is not None:
            self._tasks.append(self._pool.submit(self._file._read_run, *spans, self._destinations, self._verify))


class ChecksummedFile(ABC):
    """A data file, in storage or in memory. ``path`` is for errors."""

    def __init__(self, path: str, index: Index, run_bytes: int = RUN_BYTES) -> None:
        self.path = path
        self.index = index
        self._run_bytes = run_bytes
        self._bounds = index.bounds
        self.cuts: Sequence[int] = [len(self._bounds)]
        """The spans at which a run begins anew, in rising order, and an end."""
        self.shared: dict[tuple[int, int], partial[Iterator[FilePart]]] = {}
        """By first byte and end of a run that other ranks of this host read, too: a function that takes the parts in
        storage, and returns the parts from storage or from another rank. See ``host_reads.py``."""
        self.nbytes_done = 0
        """Number of bytes read so far."""

    def read(
        self,
        ranges: Iterable[tuple[int, int]],
        pool: ThreadPoolExecutor,
        destinations: Destinations = _NOWHERE,
        *,
        verify: bool = True,
        at_once: int | None = None,
    ) -> FileReading:
        """Read the spans that ``ranges`` touch, and copy the bytes to their destinations, even bytes of damaged spans.

        Args:
            ranges: First byte and end of each range to read; ranges may overlap.
            pool: The threads that read, check and copy. The first runs are under way when this returns.
            destinations: The destinations of the bytes; bytes without a destination are only checked.
            verify: Whether to compare the checksums, if the file has any.
            at_once: Maximum number of runs under way; None: enough for all threads.

        Raises:
            DamagedCheckpointError: The index names bytes beyond the file's end.
        """
        verify = verify and len(self.index.checksums) > 0
        return FileReading(self, self.runs(ranges), pool, destinations, at_once or _AHEAD, verify=verify)

    def nbytes_read(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Return the number of bytes that ``read`` reads for the byte ``ranges``: whole spans."""
        return sum(self._bounds[last] - self._bounds[first] for first, last in self.touched(ranges))

    def runs(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the spans that ``ranges`` touch, as runs (first, last + 1).

        A run is one read, unless a span is longer.
        """
        bounds, cuts = self._bounds, self.cuts
        for first, last in self.touched(ranges):
            while first < last:
                end = min(last, cuts[bisect_right(cuts, first)])
                stop = max(first + 1, bisect_right(bounds, bounds[first] + self._run_bytes, first, end + 1) - 1)
                yield first, stop
                first = stop

    def touched(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the spans that ``ranges`` touch: (first, last + 1) of each group of adjacent spans."""
        edges = np.fromiter(chain.from_iterable(ranges), np.int64).reshape(-1, 2)
        edges = edges[edges[:, 0] < edges[:, 1]]
        bounds = np.asarray(self._bounds, np.int64)
        if len(edges) and edges[:, 1].max() > bounds[-1]:
            raise DamagedCheckpointError("the index of this file names bytes beyond its end", path=self.path)
        # ``change`` counts, for each span, the ranges that begin in it, minus the ranges that end before it. Its
        # cumulative sum is the number of ranges that touch the span.
        change = np.zeros(len(bounds) + 1, np.int64)
        np.add.at(change, np.searchsorted(bounds, edges[:, 0], "right") - 1, 1)
        np.add.at(change, np.searchsorted(bounds, edges[:, 1], "left"), -1)
        touched = np.diff(np.cumsum(change[: len(bounds)]) > 0, prepend=False, append=False)
        switches = np.flatnonzero(touched).tolist()
        return zip(switches[::2], switches[1::2], strict=True)

    @abstractmethod
    def close(self) -> None:
        """Release the file or the memory."""

    def in_place(self, begin: int, end: int) -> memoryview | None:
        """Return the bytes from ``begin`` to ``end``, valid until the file is closed; None: they have to be read."""
        return None

    def explained(self, damage: DamagedCheckpointError) -> DamagedCheckpointError:
        """Return the error to raise for ``damage``, with the other checkpoints that share the file.

        This prevents later checkpoints from linking to the file. Call it only for an error that will be raised, because
        it may look at all checkpoints of a root.
        """
        return damage

    @abstractmethod
    def _fetch(self, begin: int, end: int, destinations: Destinations) -> Iterator[FilePart]:
        """Yield the bytes from ``begin`` to ``end``, or up to the file's end, in order.

        A part is valid until the next part. Some parts may be read straight to their destination. Without destinations,
        yield a run as one part.
        """

    def _read_run(self, first: int, last: int, destinations: Destinations, verify: bool) -> ReadRun:
        """Read, copy and check the spans from ``first`` up to ``last``, on one of the threads."""
        read = self._read_span if last == first + 1 else self._read_short_spans
        was_shared = (self._bounds[first], self._bounds[last]) in self.shared
        damaged = read(first, last, destinations, verify)
        if damaged and was_shared:  # perhaps only in memory that ranks share: read the bytes in storage
            damaged = read(first, last, destinations, verify)
        return ReadRun(self._bounds[last] - self._bounds[first], [self._damage(span) for span in damaged])

    def _read_span(self, span: int, last: int, destinations: Destinations, verify: bool) -> list[int]:
        """Read and check one span, piece by piece. Return the span if it is damaged."""
        begin, end = self._bounds[span], self._bounds[last]
        digest = xxh3_64()
        nbytes = 0
        for part in self._fetch(begin, end, destinations):
            nbytes += len(part.data)
            for at in range(0, len(part.data), RUN_BYTES):
                piece = part.data[at : at + RUN_BYTES]
                if verify:
                    digest.update(piece)
                if not part.placed:
                    destinations.fill(part.begin + at, piece)
        self._check_length(nbytes, end - begin)
        return [span] if verify and digest.intdigest() != self.index.checksums[span] else []

    def _read_short_spans(self, first: int, last: int, destinations: Destinations, verify: bool) -> list[int]:
        """Read and check several spans at once. Return the damaged spans."""
        bounds = self._bounds[first : last + 1]
        damaged: list[int] = []
        for part in self._fetch(bounds[0], bounds[-1], _NOWHERE):  # only one part, which is valid within the loop
            self._check_length(len(part.data), bounds[-1] - bounds[0])
            destinations.fill(part.begin, part.data)
            if not verify:
                continue
            # The loop runs in C: for 100,000 small spans, one microsecond a span adds up to a tenth of a second.
            edges = [bound - part.begin for bound in bounds]
            found = map(xxh3_64_intdigest, map(part.data.__getitem__, map(slice, edges, edges[1:])))
            expected = self.index.checksums
            damaged = [span for span, digest in enumerate(found, first) if digest != expected[span]]
        return damaged

    def _check_length(self, found: int, nbytes: int) -> None:
        if found < nbytes:
            raise DamagedCheckpointError("the file is damaged: it is shorter than it was written", path=self.path)

    def _damage(self, span: int) -> DamagedCheckpointError:
        return DamagedCheckpointError(self.index.damage(self._bounds[span], self._bounds[span + 1]), path=self.path)


class StoredFile(ChecksummedFile):
    """A data file in storage. It is read in whole blocks into aligned memory, or straight to its destination."""

    def __init__(self, file: InputFile, index: Index) -> None:
        """Read nothing yet. ``close`` closes ``file``, too."""
        super().__init__(file.path, index, file.run_bytes)
        self._file = file

    def close(self) -> None:
        self._file.close()

    def explained(self, damage: DamagedCheckpointError) -> DamagedCheckpointError:
        return explained(damage, self.path, self.index.data)

    def _fetch(self, begin: int, end: int, destinations: Destinations) -> Iterator[FilePart]:
        parts = self._stored_parts(begin, end, destinations)
        share = self.shared.pop((begin, end), None)  # a block is shared once: a second read would find another one
        return parts if share is None else share(parts)

    def _stored_parts(self, begin: int, end: int, destinations: Destinations) -> Iterator[FilePart]:
        to, block = destinations.only(begin, end), self._file.block_bytes
        if to is not None:
            # Read whole blocks of the file in place, if the memory has the alignment that the device needs.
            first, last = round_up(max(to.begin, begin), block), min(to.end, end) // block * block
            address, alignment = to.address + first - to.begin, self._file.alignment
            if last - first >= self._run_bytes and alignment and address % alignment == 0:
                parts = self._read_around(begin, first, last, end, address)
                if parts is not None:
                    yield from parts
                    return
        while begin < end:
            # Read up to the end of a block, so that the next block is not read twice.
            stop = min(end, (begin + self._run_bytes) // block * block) if end - begin > self._run_bytes else end
            yield FilePart(begin, self._read_to_buffer(begin, stop))
            begin = stop

    def _read_to_buffer(self, begin: int, end: int) -> memoryview:
        """Return the bytes from ``begin`` to ``end``, or up to the file's end; valid until this thread reads again."""
        block = self._file.block_bytes
        aligned = begin // block * block
        buffer = _buffer(round_up(end, block) - aligned)
        done = self._file.read([buffer], aligned)
        return buffer[:done][begin - aligned : end - aligned]

    def _read_around(self, begin: int, first: int, last: int, end: int, address: int) -> list[FilePart] | None:
        """Read from ``begin`` to ``end``, with the whole blocks from ``first`` to ``last`` straight to ``address``.

        Returns three parts; None if storage refuses to read in place.
        """
        block = self._file.block_bytes
        aligned = begin // block * block
        buffer = _buffer(first - aligned + round_up(end, block) - last)
        head, tail = buffer[: first - aligned], buffer[first - aligned :]
        middle = memory_at(address, last - first)
        done = self._file.read_in_place([head, middle, tail], aligned)
        if done is None:
            return None
        return [
            FilePart(begin, head[:done][begin - aligned :]),
            FilePart(first, middle[: max(0, done - len(head))], placed=True),
            FilePart(last, tail[: max(0, done - len(head) - len(middle))][: end - last]),
        ]


class MemoryFile(ChecksummedFile):
    """A data file that is still in memory."""

    def __init__(self, path: str, index: Index, data: memoryview) -> None:
        """Read nothing yet.

        Args:
            path: The path that the file would have in storage.
            index: The contents of the file, and the checksum of each span.
            data: The bytes, which must not change until this is closed.
        """
        super().__init__(path, index)
        self._data = data

    def close(self) -> None:
        pass

    def in_place(self, begin: int, end: int) -> memoryview:
        return self._data[begin:end]

    def _fetch(self, begin: int, end: int, destinations: Destinations) -> Iterator[FilePart]:
        yield FilePart(begin, self._data[begin:end])


def read_pool(path: str) -> ThreadPoolExecutor:
    """Return the pool of threads that read the checkpoint ``path``."""
    threads = _REQUESTS if is_address(path) else READ_THREADS
    return Pool(threads, thread_name_prefix="asyncckpt-read")


def read_plain(file: InputFile, begin: int, end: int) -> bytes:
    """Return the bytes from ``begin`` to ``end`` of a plain file, or up to its end. Raises ``StorageError``."""
    first = begin // file.block_bytes * file.block_bytes
    nbytes = round_up(end, file.block_bytes) - first
    buffer = own_buffer(_KEPT_BYTES)[:nbytes] if nbytes <= _KEPT_BYTES else huge_buffer(nbytes)
    done = file.read([buffer], first)
    return bytes(buffer[:done][begin - first : end - first])


def fill(into: memoryview, file: ChecksummedFile, begin: int = 0) -> None:
    """Fill ``into`` with the bytes of ``file`` from ``begin`` on, compare their checksums, and close the file.

    Raises ``DamagedCheckpointError``, ``StorageError``.
    """
    with contextlib.closing(file), read_pool(file.path) as pool:
        fetch({"": file}, [("", begin, begin + len(into), address_of(into))], pool)


def _buffer(nbytes: int) -> memoryview:
    return own_buffer(max(nbytes, _BUFFER_BYTES))[:nbytes]


def fetch(
    files: Mapping[str, ChecksummedFile], parts: Iterable[tuple[str, int, int, int]], pool: ThreadPoolExecutor
) -> None:
    """Read parts of files into memory, and compare their checksums if there are any.

    Args:
        files: The files, by name.
        parts: For each part: the file, the first byte, the end, and the destination address.
        pool: The threads that read.

    Raises:
        DamagedCheckpointError, StorageError: Bytes are damaged, or cannot be read. After an error, no thread writes to
            the memory.
    """
    by_file: dict[str, list[tuple[int, int, int]]] = {}
    for name, begin, end, address in parts:
        if begin < end:
            by_file.setdefault(name, []).append((begin, end, address))
    for name, some in by_file.items():
        file = files[name]
        some.sort()
        columns = [[part[column] for part in some] for column in range(3)]
        damages = []
        for run in file.read([part[:2] for part in some], pool, Destinations(*columns)):
            damages += run.damages
        if damages:
            raise file.explained(damages[0])
