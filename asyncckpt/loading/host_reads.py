"""Read the bytes that several ranks of a host need from storage once.

Each rank marks the spans that it needs in a memory file of its own, and tells the other ranks where this file is. From
the marks of all ranks of the host, each rank finds the same *blocks*. A block is one run of spans that at least two
ranks need. The first rank that comes to a block reads it from storage into its tensors, and copies it to a slot
in the memory file of the first rank. The other ranks copy it from the slot.

- **The kernel locks a slot.** A rank holds the lock while it reads the block from storage, and for a moment when it
  looks at the slot. If the rank dies, the lock ends, and another rank reads the block.
- **A slot keeps its block until all ranks that need the block have copied it.** Each rank marks in its own memory file
  that it is done with a block.
- **Every wait has a limit.** After the limit a rank reads the block alone. So a rank that is slow, stopped or dead
  holds up no other rank.
- **Each rank compares the checksums of the bytes that it copies.** So each rank finds a damaged file, and also a stray
  write to the slots.
- **Only processes of this user can open the memory.** The kernel checks this in ``/proc/PID/fd``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from xxhash import xxh3_128_hexdigest

from asyncckpt.budgets import CHECK_S, NOTICE_S
from asyncckpt.errors import CheckpointError, OutOfMemoryError
from asyncckpt.format.index import SPAN_BYTES
from asyncckpt.link.root_lock import pid_scope
from asyncckpt.loading.data_file import ChecksummedFile, FilePart
from asyncckpt.loading.read_requests import ReadRequests
from asyncckpt.shm.memcpy import address_of, memcpy
from asyncckpt.shm.segment import PAGE, Descriptor, Segment, round_up
from asyncckpt.shm.slots import Claims, Readers

logger = logging.getLogger(__name__)

# Each slot has ``SPAN_BYTES``. A block is one span, or one read of shorter spans, which is not longer.
_SLOTS = 32
# The pause between two looks at a slot. A disk reads a block in a few milliseconds.
_POLL_S = 0.001

# The marks of a span.
_NEEDED, _BEGINS = 1, 2

# A slot has the block; this rank has locked the slot, to read the block; another rank has locked the slot; the slot
# keeps another block.
_Turn = Literal["ready", "own", "busy", "full"]


class HostMember(NamedTuple):
    """The memory file of a rank: descriptor ``fd`` of process ``pid``, for ranks with the same ``scope``."""

    scope: str
    pid: int
    fd: int
    inode: int


class _Marks:
    """The memory file of one rank. Its slots are used if this is the first rank of the host."""

    def __init__(self, segment: Segment, spans: int) -> None:
        self.segment = segment
        self.slots_at = segment.nbytes - _SLOTS * SPAN_BYTES
        self.blocks = segment.view[:PAGE].cast("Q")  # by slot: the number of its block, plus 1; 0: no block
        self.needs: np.ndarray[Any, Any] = np.frombuffer(segment.view, np.uint8, spans, PAGE)  # by span
        self.done: np.ndarray[Any, Any] = np.frombuffer(segment.view, np.uint8, spans, PAGE + spans)  # by block


class HostReads:
    """The blocks of a load on one rank. Each rank calls ``join`` with the ``member`` of each rank, then reads."""

    def __init__(self, requests: Mapping[ChecksummedFile, ReadRequests], attempt: str) -> None:
        """Mark the spans that this rank needs. Raises ``OutOfMemoryError``.

        Args:
            requests: All data files of the checkpoint, in the same order on all ranks, with the requests of this rank.
            attempt: The attempt that wrote the checkpoint.
        """
        self._files = list(requests)
        self._firsts = np.cumsum([0, *(len(file.index.checksums) for file in self._files)]).tolist()
        self._spans = self._firsts[-1]
        segment = Segment.create("asyncckpt-load", round_up(PAGE + 2 * self._spans, PAGE) + _SLOTS * SPAN_BYTES)
        self._closing = ExitStack()
        self._closing.enter_context(segment)
        self._own = self._pool = _Marks(segment, self._spans)
        self._marks = [self._own]  # of all ranks of this host
        for begin, (file, its) in zip(self._firsts, requests.items(), strict=False):
            for ranges in its.ranges():
                for first, last in file.touched(ranges):
                    self._own.needs[begin + first : begin + last] |= _NEEDED
                    self._own.needs[begin + first] |= _BEGINS
        scope = f"{pid_scope() or os.urandom(16).hex()}/{os.geteuid()}/{attempt}/{self._spans}"
        facts = os.fstat(segment.fileno())
        self.member = HostMember(xxh3_128_hexdigest(scope.encode()), os.getpid(), segment.fileno(), facts.st_ino)
        self._guards = [Lock() for _ in range(_SLOTS)]  # a lock of the kernel does not keep out threads of this process
        self._room_s = CHECK_S

    def join(self, members: Sequence[HostMember | None]) -> None:
        """Find the blocks to share with the other ranks of this host.

        Share nothing if the memory of one of them cannot be opened, because all ranks must find the same blocks.
        """
        here = [member for member in members if member is not None and member.scope == self.member.scope]
        if len(here) < 2:
            return
        try:
            self._marks = [self._own if member == self.member else self._opened(member) for member in here]
            self._claims = self._closing.enter_context(closing(Claims(self._marks[0].segment)))
        except (CheckpointError, OSError) as error:
            logger.info("this rank reads alone, because the memory of another rank cannot be opened: %s", error)
            self.finish()
            return
        self._pool = self._marks[0]
        needs = np.stack([marks.needs for marks in self._marks])
        number, own = 0, here.index(self.member)
        for file, first, last in zip(self._files, self._firsts, self._firsts[1:], strict=False):
            number = self._share(file, needs[:, first:last], own, number)

    def _share(self, file: ChecksummedFile, needs: np.ndarray[Any, Any], own: int, number: int) -> int:
        """Find the blocks of ``file``, from block ``number`` on. Return the number of the next block."""
        is_needed = needs & _NEEDED
        is_shared = is_needed.sum(0) > 1
        if not is_shared.any():
            return number
        is_cut = (np.diff(is_needed, axis=1) != 0).any(0) | (needs[:, 1:] & _BEGINS).any(0)
        file.cuts = [*(np.flatnonzero(is_cut) + 1).tolist(), len(is_shared)]
        bounds, edges = file.index.bounds, np.flatnonzero(np.diff(is_shared, prepend=False, append=False)).tolist()
        for first, last in file.runs((bounds[a], bounds[b]) for a, b in zip(edges[::2], edges[1::2], strict=True)):
            if is_needed[own, first]:
                file.shared[bounds[first], bounds[last]] = partial(self._parts, number, bounds[first], bounds[last])
            else:
                self._own.done[number] = 1
            number += 1
        return number

    def _opened(self, member: HostMember) -> _Marks:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        file = Descriptor.of(os.open, f"/proc/{member.pid}/fd/{member.fd}", flags)
        if os.fstat(file.fileno()).st_ino != member.inode:
            file.close()
            raise OSError(f"process {member.pid} has closed it")
        return _Marks(self._closing.enter_context(Segment.attach(file)), self._spans)

    def _parts(self, number: int, begin: int, end: int, stored: Iterator[FilePart]) -> Iterator[FilePart]:
        """Yield the block ``number``: from its slot, or ``stored``, the parts read from storage."""
        pool, slot = self._pool, number % _SLOTS
        at = pool.slots_at + slot * SPAN_BYTES
        turn = self._wait(number, slot)
        try:
            if turn == "ready":
                yield FilePart(begin, pool.segment.view[at : at + end - begin])
                return
            is_kept = False
            if turn == "own":
                pool.blocks[slot] = 0
                with suppress(OutOfMemoryError):  # otherwise a write to the slot could kill this process
                    pool.segment.touch(at + SPAN_BYTES, at)
                    is_kept = True
            for part in stored:
                if is_kept and part.data:
                    memcpy(pool.segment.address + at + part.begin - begin, address_of(part.data), len(part.data))
                yield part
            if is_kept:
                pool.blocks[slot] = number + 1
        finally:
            if turn == "own":
                self._claims.offer(slot, Readers.OF_IMAGE)
                self._guards[slot].release()
            self._own.done[number] = 1

    def _wait(self, number: int, slot: int) -> _Turn:
        """Wait until the block is in its slot, or until this rank may read it.

        Another rank has ``NOTICE_S`` to read a block. Ranks that are behind have ``CHECK_S`` to copy the blocks of
        before. Once they fail, there is no wait for them until the next block finds room.
        """
        begun = time.monotonic()
        while True:
            turn = self._look(number, slot)
            limit = {"busy": NOTICE_S, "full": self._room_s}.get(turn, 0.0)
            if time.monotonic() - begun >= limit:
                self._room_s = 0.0 if turn == "full" else CHECK_S
                return turn
            time.sleep(_POLL_S)

    def _look(self, number: int, slot: int) -> _Turn:
        if not self._guards[slot].acquire(blocking=False):
            return "busy"
        turn: _Turn = "busy"
        if self._claims.claim(slot, Readers.OF_IMAGE):
            found = self._pool.blocks[slot]
            turn = "ready" if found == number + 1 else "full"
            if not found or (turn == "full" and all(marks.done[found - 1] for marks in self._marks)):
                return "own"
            self._claims.offer(slot, Readers.OF_IMAGE)
        self._guards[slot].release()
        return turn

    def finish(self) -> None:
        """Need no more blocks, also after an error, so that no rank waits for this one."""
        self._own.done[:] = 1

    def close(self) -> None:
        """Release the memory. By now all ranks have finished."""
        self._closing.close()
