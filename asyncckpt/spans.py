"""Reading a data file span by span, each checked on the way, from storage or from memory."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from xxhash import xxh3_64

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.shm.segment import PAGE, round_up
from asyncckpt.worker.manifest import Index
from asyncckpt.worker.storage import translated

# Read at once: enough to keep a disk busy with a few threads.
RUN_BYTES = 8 << 20
# Checked and consumed at once: little enough to stay in a core's own cache in between.
_PIECE_BYTES = 1 << 20
READ_THREADS = max(2, min(8, os.cpu_count() or 1))

Consume = Callable[[int, memoryview], None]
"""Called with an offset in the file and the bytes from there on, which are gone when it returns. On any thread."""

OnDamage = Callable[[DamagedCheckpointError], None]


def raise_damage(damage: DamagedCheckpointError) -> None:
    """The usual answer to a bad span."""
    raise damage


class SpanFile(ABC):
    """A data file, wherever its bytes are. ``path`` is for errors."""

    run_bytes = RUN_BYTES
    """How much is fetched at once, if no span is longer."""

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
    ) -> None:
        """Read the spans that the byte ``ranges`` (begin, end) touch, and ``consume`` them piece by piece.

        They are good if this returns: a bad span goes to ``on_damage``, once it is consumed, or in part, and that
        raises, or else reading goes on. None: nothing is checked. Raises ``DamagedCheckpointError``, ``StorageError``.
        """
        runs = deque(self._runs(self._wanted(ranges)))

        def read_some() -> None:
            try:
                while True:
                    try:
                        first, last = runs.popleft()
                    except IndexError:
                        return
                    self._read_run(first, last, consume, on_damage)
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
    def _fetch(self, begin: int, end: int) -> memoryview:
        """The bytes from ``begin`` to ``end``, or as many as there are; good until this thread's next call."""

    def _wanted(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        wanted: set[int] = set()
        for begin, end in ranges:
            span = bisect_right(self._bounds, begin) - 1
            while span < len(self._bounds) - 1 and self._bounds[span] < end:
                wanted.add(span)
                span += 1
        return sorted(wanted)

    def _runs(self, spans: Sequence[int]) -> list[tuple[int, int]]:
        """``spans`` as runs of neighbours, (first, last + 1), of up to ``run_bytes``, if no span is longer."""
        runs: list[tuple[int, int]] = []
        for span in spans:
            if runs and runs[-1][1] == span and self._bounds[span + 1] - self._bounds[runs[-1][0]] <= self.run_bytes:
                runs[-1] = (runs[-1][0], span + 1)
            else:
                runs.append((span, span + 1))
        return runs

    def _read_run(self, first: int, last: int, consume: Consume, on_damage: OnDamage | None) -> None:
        begin, end = self._bounds[first], self._bounds[last]
        data = self._fetch(begin, end)
        if len(data) < end - begin:
            raise DamagedCheckpointError("the file is damaged: it is shorter than it was written", path=self.path)
        consumed = begin
        for span in range(first, last):
            at, stop = self._bounds[span], self._bounds[span + 1]
            digest = xxh3_64()
            for piece in range(at, stop, _PIECE_BYTES):
                piece_end = min(piece + _PIECE_BYTES, stop)
                if on_damage is not None:
                    digest.update(data[piece - begin : piece_end - begin])
                # Small spans are consumed together.
                if piece_end - consumed >= _PIECE_BYTES or piece_end == end:
                    consume(consumed, data[consumed - begin : piece_end - begin])
                    consumed = piece_end
            if on_damage is not None and digest.intdigest() != self.index.checksums[span]:
                on_damage(self._damage(at, stop))

    def _damage(self, begin: int, end: int) -> DamagedCheckpointError:
        names = ", ".join(map(repr, self.index.names_at(begin, end)))
        what = names or "of no value, but of the space between them"
        return DamagedCheckpointError(f"the bytes {begin:,} to {end:,} are damaged: {what}", path=self.path)


class DataFile(SpanFile):
    """One on storage, opened for reading, past the page cache where the file system allows."""

    def __init__(self, path: str, index: Index) -> None:
        """Raises ``DamagedCheckpointError`` if it is missing, else ``StorageError``."""
        super().__init__(path, index, index.bounds())
        self._buffers = threading.local()
        with translated("opening", path):
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except FileNotFoundError as error:
                raise DamagedCheckpointError("a file of this checkpoint is missing", path=path) from error
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def _fetch(self, begin: int, end: int) -> memoryview:
        aligned = begin // PAGE * PAGE
        return self._fill(aligned, round_up(end - aligned))[begin - aligned : end - aligned]

    def _fill(self, offset: int, nbytes: int) -> memoryview:
        """Read into this thread's own buffer, which the next call overwrites."""
        buffer: mmap.mmap | None = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers.buffer = mmap.mmap(-1, max(nbytes, RUN_BYTES + 2 * PAGE))
        view = memoryview(buffer)[:nbytes]
        done = 0
        with translated("reading", self.path):
            while done < nbytes:
                count = os.preadv(self._fd, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return view[:done]


class MemoryFile(SpanFile):
    """One that is still in memory."""

    run_bytes = _PIECE_BYTES

    def __init__(self, path: str, index: Index, data: memoryview, bounds: Sequence[int]) -> None:
        super().__init__(path, index, bounds)
        self._data = data

    def close(self) -> None:
        pass

    def in_place(self, begin: int, end: int) -> memoryview:
        return self._data[begin:end]

    def _fetch(self, begin: int, end: int) -> memoryview:
        return self._data[begin:end]


def read_pool() -> ThreadPoolExecutor:
    """The threads that read."""
    return ThreadPoolExecutor(READ_THREADS, thread_name_prefix="asyncckpt-read")
