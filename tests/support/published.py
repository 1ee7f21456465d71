"""Publications in a worker's memory without a trainer, and their mirrors, all in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from asyncckpt.format.segment_layout import WeightsLayout
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import HEADER_BYTES, OwnedSlots, PublishedVersion, ReadableSlots
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.locator import Locator
from asyncckpt.transfer.mirror import Mirror
from asyncckpt.transfer.server import TransferServer
from asyncckpt.transfer.versions import SPAN_BYTES

KEY = b"the key of the job" * 2
LIMIT_S = 60.0


class Publishing:
    """A worker that serves published versions, all of one size. The test closes it."""

    def __init__(self, nbytes: int, ranks: int = 1, slots: int = 3) -> None:
        self.store = SegmentStore()
        self.ranks = ranks
        self.number, control = self.store.allocate(HEADER_BYTES)
        numbers = tuple(self.store.allocate(nbytes)[0] for _ in range(slots))
        self.store.hosted(self.number).describe(WeightsLayout(numbers))
        self._images = [self.store.hosted(number).segment for number in numbers]
        self._slots = OwnedSlots(control, slots)
        self.server = TransferServer(self.store, (KEY,), "127.0.0.1")
        self.address = TransferAddress("127.0.0.1", self.server.port)

    def publish(self, version: int, data: bytes, epoch: int = 1) -> None:
        published = list(self._slots.publications().values())
        free = [slot for slot in range(len(self._images)) if slot not in published]
        slot = next(filter(self._slots.claim, free + published[:-1]))
        self._images[slot].view[:] = data
        self._slots.publish(slot, PublishedVersion(epoch, version, rolled_back=False, ranks=self.ranks))

    def is_read(self) -> bool:
        """Return whether a reader has a version."""
        taken = [slot for slot in range(len(self._images)) if self._slots.claim(slot)]
        return len(taken) < len(self._images)

    def close(self) -> None:
        self.server.close()
        self._slots.close()
        self.store.close()


class MirrorHere:
    """A mirror as on another host: a store, a server, and the mirror. The test closes it."""

    def __init__(self, *publishers: Publishing, locator: str | None = None) -> None:
        self.store = SegmentStore()
        self.server = TransferServer(self.store, (KEY,), "127.0.0.1")
        addresses = tuple(each.address for each in publishers)
        self.mirror = Mirror(self.store, self.server, locator or str(Locator(KEY, addresses, "sockets")))

    def versions(self) -> dict[PublishedVersion, bytes]:
        """Return the versions that readers of the mirror's host find, with their bytes."""
        found = {}
        for each in self.store.published():
            assert isinstance(each.layout, WeightsLayout)
            hosted = self.store.hosted(each.segment)
            with hosted.used():  # the mirror frees the segment when another structure is published
                slots = ReadableSlots(hosted.segment, len(each.layout.slots))
                for version, slot in slots.publications().items():
                    with ExitStack() as leased:
                        if (fd := slots.lease(slot, version)) is not None:
                            leased.callback(fd.close)
                            image = self.store.hosted(each.layout.slots[slot]).segment.view
                            files = each.layout.files
                            parts = [image[at.offset : at.offset + at.nbytes] for at in files] or [image]
                            found[version] = b"".join(parts)
                slots.close()
        return found

    def wait(self, version: int, epoch: int = 1) -> bytes:
        """Wait until a version is here. Return its bytes."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for found, data in self.versions().items():
                if (found.epoch, found.version) == (epoch, version):
                    return data
            time.sleep(0.005)
        raise TimeoutError(f"version {version} is not here: {list(self.versions())}")

    def arrived(self) -> int:
        """Return the number of bytes that have arrived of the version under way."""
        coming = self.mirror._coming
        return 0 if coming is None else coming.arrived * SPAN_BYTES

    def die(self) -> None:
        """Break all connections at once, as if the host were lost."""
        self.mirror._closed.set()
        with self.server._lock:
            for peer in self.server._known:
                peer.close()
        for holder in list(self.mirror._holders.values()):
            holder.close()

    def close(self) -> None:
        self.mirror.close()
        self.server.close()
        self.store.close()


class Gate:
    """Blocks threads until the gate is opened. ``reached``: a thread waits, or has waited."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT_S)


Reads = list[tuple[TransferAddress, int, int]]
"""For each read: the holder's address, the offset, and the number of bytes."""


def spied_read(
    original: Callable[..., None], reads: Reads, before: Callable[[TransferAddress, int, memoryview], object]
) -> Callable[..., None]:
    """Return a ``RemoteImage.read`` that calls ``before``, then reads, and records the read."""

    def read(self: object, offset: int, into: memoryview) -> None:
        address = self._holder.address  # type: ignore[attr-defined]
        before(address, offset, into)
        original(self, offset, into)
        reads.append((address, offset, len(into)))

    return read
