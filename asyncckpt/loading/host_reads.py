"""Read the bytes that several ranks of a host need from storage once.

Each rank marks the spans that it needs in a memory file of its own, and tells the other ranks where this file is. From
the marks of all ranks of the host, each rank finds the same *blocks*. A block is one run of spans that at least two
ranks need. The first rank that comes to a block reads it from storage into its tensors, and copies it to a slot
in the memory file of the first rank. The other ranks copy it from the slot.

- **The kernel locks a slot.** A rank holds the lock while it reads the block from storage, and for a moment when it
  looks at the slot. If the rank dies, the lock ends, and another rank reads the block.
- **A slot keeps its block until all ranks that need the block have copied it.** Each rank marks in its own memory file
  that it is done with a block.
- **Every wait has a limit.** After a wait in vain a rank reads all further blocks alone. So a stopped rank costs each
  other rank this limit once in a load. A rank without memory for a slot, or without locks, reads alone, too.
- **Each rank compares the checksums of the bytes that it copies.** If they differ, the rank reads the block from
  storage, and only these bytes can show a damaged file. A stray write to a slot costs one more read. A load that
  compares no checksums shares nothing.
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

from asyncckpt.budgets import NOTICE_S
from asyncckpt.errors import CheckpointError
from asyncckpt.format.index import SPAN_BYTES
from asyncckpt.link.root_lock import pid_scope
from asyncckpt.loading.data_file import ChecksummedFile, FilePart
from asyncckpt.loading.read_requests import ReadRequests
from asyncckpt.shm import budget
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

# The slot has the block; this rank has locked the slot, to read the block; None: another rank has locked the slot, or
# the slot keeps another block.
_Turn = Literal["ready", "own"] | None


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

    def close(self) -> None:
        """Unmap the memory, and drop its views first, because a view would keep the mapping."""
        self.blocks.release()
        del self.needs, self.done
        self.segment.close()


class HostReads:
    """The blocks of a load on one rank. Each rank sets ``members`` to the ``member`` of each rank, joins, and reads."""

    def __init__(self, requests: Mapping[ChecksummedFile, ReadRequests], attempt: str) -> None:
        """Mark the spans that this rank needs. Raises ``OutOfMemoryError``.

        Args:
            requests: All data files of the checkpoint, in the same order on all ranks, with the requests of this rank.
            attempt: The attempt that wrote the checkpoint.
        """
        self._files = list(requests)
        self._firsts = np.cumsum([0, *(len(file.index.checksums) for file in self._files)]).tolist()
        self._spans = self._firsts[-1]
        slots_at, slots_bytes = round_up(PAGE + 2 * self._spans, PAGE), _SLOTS * SPAN_BYTES
        budget.require(slots_at + slots_bytes, "sharing what ranks read", "this rank reads alone")
        with ExitStack() as made:
            segment = made.enter_context(Segment.create("asyncckpt-load", slots_at + slots_bytes))
            segment.touch(slots_at)
            self._own = self._pool = made.enter_context(closing(_Marks(segment, self._spans)))
            for begin, (file, its) in zip(self._firsts, requests.items(), strict=False):
                for ranges in its.ranges():
                    for first, last in file.touched(ranges):
                        self._own.needs[begin + first : begin + last] |= _NEEDED
                        self._own.needs[begin + first] |= _BEGINS
            self._closing = made.pop_all()
        self._marks = [self._own]  # of all ranks of this host
        scope = f"{pid_scope() or os.urandom(16).hex()}/{os.geteuid()}/{attempt}/{self._spans}"
        facts = os.fstat(segment.fileno())
        self.member = HostMember(xxh3_128_hexdigest(scope.encode()), os.getpid(), segment.fileno(), facts.st_ino)
        self._guards = [Lock() for _ in range(_SLOTS)]  # a lock of the kernel does not keep out threads of this process
        self.members: Sequence[HostMember | None] = ()
        self._is_sharing = True

    def join(self) -> None:
        """Find the blocks to share with the other ranks of this host.

        Share nothing if the memory of one of them cannot be opened, because all ranks must find the same blocks.
        """
        here = [member for member in self.members if member is not None and member.scope == self.member.scope]
        if len(here) < 2:
            return
        try:
            self._marks = [self._own if member == self.member else self._opened(member) for member in here]
            self._claims = self._closing.enter_context(closing(Claims(self._marks[0].segment)))
        except (CheckpointError, OSError) as error:
            logger.info("this rank reads alone, because the memory of another rank cannot be opened: %s", error)
            self._own.done[:] = 1
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
            raise OSError(f"process {member.pid} has closed its memory file")
        return self._closing.enter_context(closing(_Marks(Segment.attach(file), self._spans)))

    def _parts(self, number: int, begin: int, end: int, stored: Iterator[FilePart]) -> Iterator[FilePart]:
        """Yield the block ``number``: from its slot, or ``stored``, the parts read from storage."""
        slot = number % _SLOTS
        at = self._pool.slots_at + slot * SPAN_BYTES
        block = self._pool.segment.view[at : at + end - begin]
        turn: _Turn = None
        try:
            turn = self._wait(number, slot, at, at + end - begin)
            if turn == "ready":
                yield FilePart(begin, block)
                return
            copied = 0
            for part in stored:
                if turn == "own" and part.data:
                    memcpy(address_of(block) + part.begin - begin, address_of(part.data), len(part.data))
                    copied += len(part.data)
                yield part
            if copied == len(block):
                self._pool.blocks[slot] = number + 1
        finally:
            block.release()  # the traceback of an error may keep this frame
            if turn == "own":
                self._claims.offer(slot, Readers.OF_IMAGE)
                self._guards[slot].release()
            self._own.done[number] = 1

    def _wait(self, number: int, slot: int, begin: int, end: int) -> _Turn:
        """Wait until the block is in its slot, or until this rank may read the block.

        After ``NOTICE_S`` without either, or without memory or a lock, this rank reads all further blocks alone.
        """
        deadline = time.monotonic() + NOTICE_S
        try:
            while self._is_sharing:
                if (turn := self._look(number, slot, begin, end)) is not None:
                    return turn
                if time.monotonic() > deadline:
                    raise CheckpointError("another rank is slow or stopped")
                time.sleep(_POLL_S)
        except CheckpointError as error:
            logger.info("this rank reads alone from now on: %s", error)
            self.finish()
        return None

    def _look(self, number: int, slot: int, begin: int, end: int) -> _Turn:
        if not self._guards[slot].acquire(blocking=False):
            return None
        with ExitStack() as at_end:
            at_end.callback(self._guards[slot].release)
            if not self._claims.claim(slot, Readers.OF_IMAGE):
                return None
            at_end.callback(self._claims.offer, slot, Readers.OF_IMAGE)
            found = self._pool.blocks[slot]
            if found == number + 1:
                return "ready"
            if found and not all(marks.done[found - 1] for marks in self._marks):
                return None
            self._pool.segment.touch(end, begin)  # otherwise a write to the slot could kill this process
            self._pool.blocks[slot] = 0
            at_end.pop_all()
        return "own"

    def finish(self) -> None:
        """Share no more blocks, also after an error, so that no rank waits for this one.

        A thread that copies a block marks this block itself, because the slot must not change before.
        """
        self._is_sharing = False
        for file in self._files:
            with suppress(KeyError):  # all are popped, by this thread or others
                while True:
                    self._own.done[file.shared.popitem()[1].args[0]] = 1

    def close(self) -> None:
        """Release the memory of this process. Other ranks keep their mappings, and may still read after an error."""
        self._closing.close()
