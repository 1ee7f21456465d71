"""Test which slots are published, and who may write to them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator

import pytest
from support.checkpoints import PAGE

from asyncckpt.errors import CheckpointError, OutOfMemoryError
from asyncckpt.shm import slots as slot_locks
from asyncckpt.shm.segment import Descriptor, Segment
from asyncckpt.shm.slots import HEADER_BYTES, OwnedSlots, PublishedVersion, ReadableSlots, Readers, SlotTable


def test_what_is_half_told_is_not_told() -> None:
    """A process may die during a publication, whether or not the slot was published before."""

    class Killed(Exception):
        pass

    class Words:
        def __init__(self, words: memoryview, left: int) -> None:
            self.words, self.left = words, left

        def __setitem__(self, number: int, value: int) -> None:
            if not self.left:
                raise Killed
            self.left -= 1
            self.words[number] = value

    one, other = PublishedVersion(1, 7, False, 1), PublishedVersion(2, 3, True, 2, folder=1)
    for stores in range(7):
        table = SlotTable(memoryview(bytearray(PAGE)))
        table.publish(0, one)
        words = table._words
        table._words = Words(words, stores)  # type: ignore[assignment]
        with contextlib.suppress(Killed):
            table.publish(0, other)
        table._words = words
        assert table.published(0) in (None, one, other)


def test_without_a_descriptor_there_is_an_error_of_ours() -> None:
    """The process has reached its limit of open files."""
    with Segment.create("asyncckpt-test", PAGE) as segment:
        os.close(free := os.dup(segment.fileno()))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="Too many open files"):
                OwnedSlots(segment, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_claim_and_leases_exclude_each_other() -> None:
    with Segment.create("asyncckpt-test", PAGE) as segment:
        claims, other = slot_locks.Claims(segment), slot_locks.Claims(segment)
        assert claims.claim(3) and claims.claim(3)
        assert not other.claim(3) and other.claim(2)
        assert slot_locks.lease(segment.fileno(), 3) is None
        claims.offer(3, Readers.OF_PUBLISHED)
        one, two = (slot_locks.lease(segment.fileno(), 3) for _ in range(2))
        assert one is not None and two is not None
        assert not claims.claim(3)
        one.close()
        assert not claims.claim(3)
        two.close()
        assert claims.claim(3)
        # A child inherits no claims, and so cannot keep them.
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        try:
            claims.close()
            deadline = time.monotonic() + 30
            while not other.claim(3):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        other.close()
        # A reader cannot get write access.
        fd = slot_locks.reopen(segment.fileno(), os.O_RDONLY)
        with pytest.raises(PermissionError):
            Segment.attach(Descriptor(fd))


def test_a_slot_is_claimed_and_published_and_read() -> None:
    versions = [PublishedVersion(1, number, False, 1) for number in range(4)]
    with Segment.create("asyncckpt-test", PAGE) as segment:
        slots, readers = OwnedSlots(segment, 3), ReadableSlots(segment, 3)
        for slot in range(3):
            slots.publish(slot, versions[slot])
        assert list(slots.publications().values()) == [0, 1, 2]
        oldest, newest = readers.lease(0, versions[0]), readers.lease(2, versions[2])
        assert oldest is not None and newest is not None and readers.lease(1, versions[0]) is None
        assert not slots.claim(0) and slots.claim(1)
        assert readers.publications().keys() == {versions[0], versions[2]}
        assert slots.publish_unless_last(1, versions[3]) is False  # readers hold all other slots
        oldest.close()
        assert slots.publish_unless_last(1, versions[3]) and readers.publications().keys() == set(versions[2:])
        newest.close()
        slots.withdraw_all()
        assert not readers.publications()
        slots.close()
        readers.close()


def test_what_is_published_can_be_leased_where_it_was_to_be_another_version() -> None:
    """The other version was refused, because readers hold all other slots."""
    old, new, newest = (PublishedVersion(1, version, rolled_back=False, ranks=1) for version in (1, 2, 3))
    with (
        Segment.create("asyncckpt-test", HEADER_BYTES) as segment,
        contextlib.closing(OwnedSlots(segment, 2)) as slots,
        contextlib.closing(ReadableSlots(segment, 2)) as reader,
    ):
        slots.publish(0, old)
        slots.publish(1, new)
        kept = reader.lease(0, old)
        assert kept is not None and not slots.publish_unless_last(1, newest)
        with kept:
            found = reader.lease(1, new)
        assert found is not None
        found.close()


class Versions:
    """Publishes one version after another, in slots that take memory when needed."""

    def __init__(self, segment: Segment, *, tries_again: bool = False) -> None:
        self.slots, self.readers = OwnedSlots(segment, 0, tries_again=tries_again), ReadableSlots(segment, 4)
        self.taken: list[int] = []
        self.refusals = 0
        self.interrupts = False
        self._newest = 0

    def publish(self, most: int = 3) -> int | None:
        """Publish the next version. Return its slot, or None if readers hold all slots."""
        slot = self.slots.claim_next(self.taken, self._take, most)
        if slot is not None:
            self._newest += 1
            self.slots.publish(slot, PublishedVersion(1, self._newest, rolled_back=False, ranks=1))
        return slot

    def lease(self, slot: int) -> Descriptor:
        by_slot = {slot: version for version, slot in self.readers.publications().items()}
        found = self.readers.lease(slot, by_slot[slot])
        assert found is not None
        return found

    def _take(self, slot: int) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OutOfMemoryError("there is too little (as the test wants)")
        self.taken.append(slot)
        if self.interrupts:
            raise KeyboardInterrupt

    def close(self) -> None:
        self.slots.close()
        self.readers.close()


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create("asyncckpt-test", HEADER_BYTES) as segment:
        yield segment


def test_the_oldest_version_makes_room_and_a_third_slot_comes_only_for_readers(segment: Segment) -> None:
    with contextlib.closing(Versions(segment)) as versions:
        assert [versions.publish() for _ in range(5)] == [0, 1, 0, 1, 0]
        with versions.lease(1):
            assert [versions.publish() for _ in range(4)] == [2, 0, 2, 0]
        assert versions.publish() == 1


def test_the_newest_version_makes_no_room_while_there_is_another(segment: Segment) -> None:
    with contextlib.closing(Versions(segment)) as versions:
        versions.publish()
        versions.publish()
        with versions.lease(0):
            assert versions.publish(most=2) is None
        assert versions.publish(most=2) == 0


@pytest.mark.parametrize("tries_again", [False, True])
def test_memory_that_is_refused(segment: Segment, tries_again: bool, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(Versions(segment, tries_again=tries_again)) as versions:
        versions.refusals = 1
        with pytest.raises(OutOfMemoryError):
            versions.publish()
        assert versions.publish() == 0
        versions.refusals = 2
        assert versions.publish() == 0
        assert versions.refusals == 1
        assert versions.publish() == 0
        assert versions.refusals == (0 if tries_again else 1)
        assert caplog.text.count("memory for 1 versions") == 1
        versions.refusals = 0
        assert versions.publish() == (1 if tries_again else 0)


def test_an_interrupt_just_after_the_memory_was_taken(segment: Segment) -> None:
    with contextlib.closing(Versions(segment)) as versions:
        versions.publish()
        versions.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            versions.publish()
        versions.interrupts = False
        assert versions.taken == [0, 1]
        assert [versions.publish() for _ in range(4)] == [1, 0, 1, 0]
        assert len(versions.slots.publications()) == 2
