"""Copy an image from the worker that holds it. Spans equal to the previous copy's are taken from that copy."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import NamedTuple

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.format.manifest import DIGEST_BYTES, checksums_in, digest_of
from asyncckpt.shm.memcpy import address_of, memcpy
from asyncckpt.threads import settle
from asyncckpt.transfer.copies import Incoming
from asyncckpt.transfer.holder import RemoteImage

# Bytes that one thread fetches at once.
_CHUNK_BYTES = 16 << 20


class RateLimit:
    """Delays threads so that together they fetch at most ``rate`` bytes a second; None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more bytes may be fetched."""
        if self._rate is not None:
            with self._lock:
                at = max(self._free_at, time.monotonic())
                self._free_at = at + nbytes / self._rate
            time.sleep(max(0.0, at - time.monotonic()))


class _Chunk(NamedTuple):
    """Spans that are fetched at once.

    ``begin``: offset of their file in the holder's segment. ``bounds``: of the spans, in the file. ``first``: the
    number of the first span.
    """

    begin: int
    bounds: list[int]
    first: int


class ImageCopy:
    """The copying of one image."""

    def __init__(self, image: RemoteImage, incoming: Incoming, limit: RateLimit) -> None:
        """Copy nothing yet. ``image`` is copied into ``incoming``, at the rate that ``limit`` allows."""
        self._image, self._limit = image, limit
        self._has_constants = incoming.has_constants()
        self._memory = incoming.memory
        self._offset = incoming.layout.slots[incoming.slot] - image.held.layout.slots[image.held.request.slot]
        last, self._known = incoming.last
        self._back = incoming.layout.slots[incoming.slot] - incoming.layout.slots[last]

    def run(self, pool: ThreadPoolExecutor) -> tuple[bytes, array[int]]:
        """Copy the whole image and check each span. Return the digests and the checksums of the spans.

        Raises ``OSError``, ``DamagedCheckpointError``.
        """
        for region in () if self._has_constants else self._image.held.layout.constants():
            self._image.read(region.offset, self._memory[region.offset : region.offset + region.nbytes])
        digests, checksums = bytearray(), array("Q")
        fetches = [pool.submit(self._fetch, chunk) for chunk in self._chunks()]
        try:
            for fetch in fetches:
                of_chunk, found = fetch.result()
                digests += of_chunk
                checksums.extend(found)
        finally:
            # After a failure no thread may write here any more, because the next image uses the same memory.
            settle(fetches)
        return bytes(digests), checksums

    def _fetch(self, chunk: _Chunk) -> tuple[bytes, array[int]]:
        begin, bounds, first = chunk
        at = begin + self._offset
        spans = list(pairwise(bounds))
        digests = self._image.digests(first, first + len(spans))
        numbers = range(len(spans))
        known = [_digest(self._known, first + number) == _digest(digests, number) for number in numbers]
        for is_known, run in groupby(numbers, key=known.__getitem__):
            start, stop = bounds[(of_run := list(run))[0]], bounds[of_run[-1] + 1]
            into = self._memory[at + start : at + stop]
            if is_known:
                to = address_of(into)
                memcpy(to, to - self._back, len(into))
            else:
                self._read(begin + start, into)
        for number, (start, stop) in enumerate(spans):
            span, digest = self._memory[at + start : at + stop], _digest(digests, number)
            if known[number] and digest_of(span) != digest:  # damaged in the previous copy, after it had arrived
                self._read(begin + start, span)
                known[number] = False
            if not known[number] and digest_of(span) != digest:
                path = self._image.held.request.path
                raise DamagedCheckpointError("an image did not arrive as it was sent", path=path)
        its = self._memory[at + bounds[0] : at + bounds[-1]]
        return digests, checksums_in(digests, [bound - bounds[0] for bound in bounds], its)

    def _read(self, offset: int, into: memoryview) -> None:
        self._limit.wait(len(into))
        self._image.read(offset, into)

    def _chunks(self) -> Iterator[_Chunk]:
        held, before = self._image.held, 0
        for file in held.layout.data_files:
            words = self._memory[file.spans.offset : file.spans.offset + file.spans.nbytes].cast("Q")
            begin, bounds = held.layout.data(held.request.slot, file).offset, words.tolist()
            first = 0
            while first < file.checksums:
                last = first + 1
                while last < file.checksums and bounds[last + 1] - bounds[first] <= _CHUNK_BYTES:
                    last += 1
                yield _Chunk(begin, bounds[first : last + 1], before + first)
                first = last
            before += file.checksums


def _digest(digests: bytes, number: int) -> bytes:
    """Return the digest with that number."""
    return digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
