"""Fetch an image from the workers that hold it, span by span.

An image belongs to a save or to a published version. Its bytes are divided into *spans*, and each span has a *digest*.
A span that is equal in the previous image is copied from there, unless a short run of such spans stands between other
spans. A span with few changes is copied as well, and then changed by a *patch* from the holder (``patches.py``). All
other spans are read from a holder. Each span is checked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any, NamedTuple

from asyncckpt.budgets import SILENCE_S
from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.format.manifest import DIGEST_BYTES, digest_of
from asyncckpt.shm.memcpy import address_of, memcpy
from asyncckpt.threads import settle
from asyncckpt.transfer.holder import RemoteImage
from asyncckpt.transfer.patches import apply_patch
from asyncckpt.transfer.sockets import CONNECTIONS

# Bytes that are fetched together, so that they are still in a core's cache for the check.
_CHUNK_BYTES = 2 << 20
# Between spans to read, a run with fewer equal bytes than this is also read, because each request takes some 0.1 ms.
_WORTH_BYTES = 256 << 10
# Maximum number of chunks under way. At this number, ask for no more digests.
_CHUNKS = 4 * CONNECTIONS
# Maximum time to wait for the next digest before asking again.
_SPAN_S = 1.0
# Maximum time without a new span. The holder may itself be looking for another source, after a silence of its own.
_STALL_S = 1.5 * SILENCE_S


class RateLimit:
    """Delays threads so that together they read at most ``rate`` bytes a second; None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more bytes may be read."""
        if self._rate is not None:
            with self._lock:
                at = max(self._free_at, time.monotonic())
                self._free_at = at + nbytes / self._rate
            time.sleep(max(0.0, at - time.monotonic()))


class ImagePart(NamedTuple):
    """A part of an image, and where to get it."""

    source: RemoteImage[Any]
    first: int
    """The number of the part's first span in the image."""
    shift: int
    """The difference between an offset in the holder's segment and the offset in the image here."""


class Previous(NamedTuple):
    """An image that was fetched before, with the same bounds. ``digests``: the concatenated digests of its spans."""

    memory: memoryview
    digests: bytes


class _Chunk(NamedTuple):
    """Spans without a gap between them, from number ``first`` on, with their ``digests`` and ``patches``."""

    first: int
    spans: list[tuple[int, int]]
    digests: bytes
    patches: Sequence[bytes]


@dataclass
class Fetch:
    """The fetching of one image into memory."""

    name: str
    """The name of the image, for messages."""
    where: Mapping[str, Any]
    """The path, the step and the rank of the image, as for ``CheckpointError``, if they are known."""
    memory: memoryview
    """The memory to fetch into."""
    spans: int
    """The number of spans."""
    bounds: Callable[[int], tuple[int, int]]
    """Returns the begin and the end of a span in the memory."""
    previous: Previous | None = None
    limit: RateLimit = RateLimit(None)
    with_patches: bool = False
    """Whether to ask the holder of a version for patches."""

    def run(self, parts: Sequence[ImagePart], pool: ThreadPoolExecutor, arrived: int = 0) -> Iterator[bytes]:
        """Fetch all spans in their order. Yield the digests of spans that have arrived, some spans at a time.

        After an exception, no thread writes to the memory.

        Args:
            parts: The parts of the image, in the order of their spans.
            pool: The threads that fetch.
            arrived: The number of spans that are here already.

        Raises:
            OSError: The image cannot be read from these holders.
            DamagedCheckpointError: A span was damaged on the way.
        """
        flying: deque[tuple[Future[None], bytes]] = deque()
        known, moved_at = arrived, time.monotonic()
        try:
            while arrived < self.spans:
                if known < self.spans and len(flying) < _CHUNKS:
                    part = next(part for part in reversed(parts) if part.first <= known)
                    digests = part.source.digests(known - part.first, 0.0 if flying else _SPAN_S)
                    end = known + len(digests) // DIGEST_BYTES
                    if len(digests) % DIGEST_BYTES or end > self.spans:
                        raise ConnectionAbortedError(f"the holder of {self.name} gave no digests of it")
                    for chunk in self._chunks(known, digests, self._patches(part, known, digests)):
                        flying.append((pool.submit(self._get, part, chunk), chunk.digests))
                    known = end
                if flying:
                    task, digests = flying[0]
                    task.result()
                    flying.popleft()
                    arrived += len(digests) // DIGEST_BYTES
                    moved_at = time.monotonic()
                    yield digests
                elif time.monotonic() - moved_at > _STALL_S:
                    raise TimeoutError("the holder sends no more data")
        finally:
            settle(task for task, _ in flying)

    def _patches(self, part: ImagePart, first: int, digests: bytes) -> Sequence[bytes]:
        """Ask for patches of the spans from number ``first`` on, unless all of them are here already."""
        count = len(digests) // DIGEST_BYTES
        bases = b"" if self.previous is None else _some(self.previous.digests, first, count)
        if not self.with_patches or bases in (b"", digests):
            return [b""] * count
        return part.source.patches(first - part.first, bases)

    def _chunks(self, first: int, digests: bytes, patches: Sequence[bytes]) -> Iterator[_Chunk]:
        """Divide spans, from number ``first`` on, into chunks."""
        spans = [self.bounds(first + number) for number in range(len(patches))]
        begin = 0
        for end in range(1, len(spans) + 1):
            if (
                end == len(spans)
                or spans[end][0] != spans[end - 1][1]
                or spans[end][1] - spans[begin][0] > _CHUNK_BYTES
            ):
                own = _some(digests, begin, end - begin)
                yield _Chunk(first + begin, spans[begin:end], own, patches[begin:end])
                begin = end

    def _get(self, part: ImagePart, chunk: _Chunk) -> None:
        """Copy, patch or read the spans of a chunk, and check them."""
        digests = [_some(chunk.digests, number) for number in range(len(chunk.spans))]
        kept = [
            bool(chunk.patches[number]) or self._is_kept(chunk.first + number, digest)
            for number, digest in enumerate(digests)
        ]
        if not all(kept):
            for run in _runs(kept):
                if kept[run.start] and chunk.spans[run.stop - 1][1] - chunk.spans[run.start][0] < _WORTH_BYTES:
                    kept[run.start : run.stop] = [False] * len(run)
        for run in _runs(kept):
            begin, end = chunk.spans[run.start][0], chunk.spans[run.stop - 1][1]
            if self.previous is not None and kept[run.start]:
                self._copy(self.previous, begin, end)
            else:
                self._read(part, begin, end)
        for number, (start, stop) in enumerate(chunk.spans):
            span = self.memory[start:stop]
            if kept[number] and chunk.patches[number]:
                apply_patch(chunk.patches[number], span)
            is_right = digest_of(span) == digests[number]
            if not is_right and kept[number]:  # the previous image or the patch was damaged
                self._read(part, start, stop)
                is_right = digest_of(span) == digests[number]
            if not is_right:
                raise DamagedCheckpointError(f"{self.name} did not arrive as it was sent", **self.where)

    def _is_kept(self, span: int, digest: bytes) -> bool:
        """Return whether the previous image has the same bytes in this span."""
        return self.previous is not None and _some(self.previous.digests, span) == digest

    def _copy(self, previous: Previous, begin: int, end: int) -> None:
        source, target = previous.memory[begin:end], self.memory[begin:end]
        memcpy(address_of(target), address_of(source), len(target))

    def _read(self, part: ImagePart, begin: int, end: int) -> None:
        target = self.memory[begin:end]
        self.limit.wait(len(target))
        part.source.read(begin + part.shift, target)


def _runs(values: Sequence[bool]) -> list[range]:
    """Return the runs of equal values, as ranges of their numbers."""
    ends = [number for number in range(1, len(values)) if values[number] != values[number - 1]]
    return list(starmap(range, pairwise([0, *ends, len(values)])))


def _some(digests: bytes, first: int, count: int = 1) -> bytes:
    """Return ``count`` digests, from number ``first`` on."""
    return digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
