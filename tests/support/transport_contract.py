"""The contract of every transport. ``test_sockets.py`` and ``test_nixl.py`` run it for their kinds."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import Claims
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.holder import Holder, RemoteImage
from asyncckpt.transfer.server import TransferServer
from support.image_holder import IMAGE, KEY, checksums_of, hold, image_bytes, image_holder

NBYTES = 24 << 20
# Large enough that a test can stop the holder during a read.
MUCH = 512 << 20


class TransportContract:
    """Base class. Subclasses define the kind of transport."""

    kind: str

    def test_bytes_arrive_wherever_they_are_asked_for(self) -> None:
        expected = image_bytes(NBYTES)
        with image_holder(NBYTES) as holder, Holder(holder.address, KEY, self.kind) as peer:
            image = peer.open(IMAGE, with_checksums=True)
            assert array("Q", image.described.checksums).tolist() == checksums_of(NBYTES)
            begin = image.described.layout.slots[0]
            chance = random.Random(5)
            ranges = [(0, 1), (NBYTES - 1, NBYTES), (0, NBYTES)]
            ranges += [tuple(sorted(chance.sample(range(NBYTES), 2))) for _ in range(40)]  # type: ignore[misc]
            into = [memoryview(bytearray(end - first)) for first, end in ranges]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda each: image.read(begin + each[0][0], each[1]), zip(ranges, into, strict=True)))
            for (first, end), found in zip(ranges, into, strict=True):
                assert found == expected[first:end]
            image.close()

    def test_what_is_not_held_is_refused_by_name(self) -> None:
        with image_holder(NBYTES) as holder, Holder(holder.address, KEY, self.kind) as peer:
            for key in (ImageKey("attempt", 1), ImageKey("another", 0)):
                with pytest.raises(FileNotFoundError, match=f"rank {key.rank}"):
                    peer.open(key)
            peer.open(IMAGE).close()

    def test_nobody_writes_where_somebody_reads(self) -> None:
        store = SegmentStore()
        number = hold(store, NBYTES)
        server = TransferServer(store, (KEY,), "127.0.0.1")
        claims = Claims(store.hosted(number).segment)
        with Holder(TransferAddress("127.0.0.1", server.port), KEY, self.kind) as peer:
            one, other = peer.open(IMAGE), peer.open(IMAGE)
            one.close()
            peer.ping()  # the holder has handled the close
            assert not claims.claim(0)
            other.close()
            peer.ping()
            assert claims.claim(0)
            with pytest.raises(FileNotFoundError):  # the slot is being overwritten
                peer.open(IMAGE)
        claims.close()
        server.close()
        store.close()

    def test_a_lease_ends_with_whoever_has_it(self) -> None:
        store = SegmentStore()
        number = hold(store, NBYTES)
        server = TransferServer(store, (KEY,), "127.0.0.1")
        claims = Claims(store.hosted(number).segment)
        peer = Holder(TransferAddress("127.0.0.1", server.port), KEY, self.kind)
        peer.open(IMAGE)
        peer._connection.close()  # as if the reader had died
        wait_for(lambda: claims.claim(0))
        peer.close()
        claims.close()
        server.close()
        store.close()

    def test_the_holder_is_killed_in_the_middle(self) -> None:
        with image_holder(MUCH) as holder, Holder(holder.address, KEY, self.kind) as peer:
            image = peer.open(IMAGE)
            reader = Reader(image, MUCH)
            wait_for(lambda: reader.nbytes > 0)
            holder.process.kill()
            assert isinstance(reader.failure(), OSError)
            with pytest.raises(OSError):
                peer.ping()

    def test_the_holder_is_stopped_before_it_has_opened_an_image(self) -> None:
        """Opening an image may take minutes, for its checksums. But a holder that sends nothing times out."""
        with image_holder(NBYTES) as holder, Holder(holder.address, KEY, self.kind, answer_s=1.0) as peer:
            os.kill(holder.process.pid, signal.SIGSTOP)
            begun = time.monotonic()
            with pytest.raises(OSError):
                peer.open(IMAGE)
            assert time.monotonic() - begun < 10

    def test_the_holder_is_stopped_in_the_middle(self) -> None:
        """A read from a stopped holder times out, and uses no CPU time afterwards."""
        with image_holder(MUCH) as holder, Holder(holder.address, KEY, self.kind, answer_s=1.0) as peer:
            reader = Reader(peer.open(IMAGE), MUCH)
            wait_for(lambda: reader.nbytes > 0)
            os.kill(holder.process.pid, signal.SIGSTOP)
            assert isinstance(reader.failure(), OSError)
            before = time.process_time()
            time.sleep(0.5)
            assert time.process_time() - before < 0.4

    def test_reading_is_ended_from_another_thread(self) -> None:
        """After ``close`` returns, no thread writes to the memory."""
        with image_holder(MUCH) as holder, Holder(holder.address, KEY, self.kind) as peer:
            image = peer.open(IMAGE)
            reader = Reader(image, MUCH)
            wait_for(lambda: reader.nbytes > 0)
            image.close()
            before = bytes(reader.into)
            assert isinstance(reader.failure(), OSError)
            assert before == reader.into
            with pytest.raises(OSError):
                image.read(0, memoryview(bytearray(1)))


class Reader:
    """Reads an image of ``nbytes`` repeatedly, with two threads, until a read fails."""

    def __init__(self, image: RemoteImage[HeldImage], nbytes: int) -> None:
        self.nbytes = 0
        self.into = memoryview(bytearray(16 << 20))
        self._image, self._all = image, nbytes
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._read, args=[number]) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def failure(self) -> BaseException:
        """Wait until the reads fail. Return the first error."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return self._failures[0]

    def _read(self, number: int) -> None:
        half = len(self.into) // 2
        into, begin = self.into[number * half :][:half], self._image.described.layout.slots[0]
        try:
            while True:
                self._image.read(begin + random.randrange(self._all - half), into)
                self.nbytes += half
        except BaseException as error:
            self._failures.append(error)


def wait_for(condition: Callable[[], object], within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
