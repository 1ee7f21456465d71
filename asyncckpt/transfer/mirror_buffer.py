"""The memory of a mirror: slots for versions of one size, in which it publishes as a trainer does in its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.format.segment_layout import WeightsLayout
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.published_slots import LASTING, PublishedSlots
from asyncckpt.shm.slots import HEADER_BYTES, PublishedVersion
from asyncckpt.transfer.versions import ServedVersions, VersionImage, lay_out

logger = logging.getLogger(__name__)

# A third one where readers keep an older version.
_MOST = LASTING + 1


class _Slots:
    """Those for versions of files of the same ``sizes``."""

    def __init__(self, store: SegmentStore, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._store = store
        self._images: dict[int, VersionImage] = {}  # the last one in each slot
        self._numbers: list[int] = []
        self._is_full = False
        self.number, self.control = store.allocate(HEADER_BYTES)
        self.published = PublishedSlots(self.control, 0)

    def claim(self) -> int | None:
        """A slot that nobody reads; None: all are being read. That of the newest version stays where it is."""
        published = list(self.published.publications().values())
        slot = self._claim_first(slot for slot in range(len(self._numbers)) if slot not in published)
        slot = self._grow(LASTING) if slot is None else slot
        slot = self._claim_first(published[:-1] or published) if slot is None else slot
        return self._grow(_MOST) if slot is None else slot

    def _claim_first(self, slots: Iterable[int]) -> int | None:
        # Of one that was given up there may still be readers, who have no lease on it.
        unread = (slot for slot in slots if slot not in self._images or not self._images[slot].is_read)
        return next(filter(self.published.claim, unread), None)

    def begin(self, slot: int, version: PublishedVersion) -> VersionImage:
        memory = self._store.hosted(self._numbers[slot])
        image = self._images[slot] = VersionImage(version, memory, self.sizes, whole=False)
        return image

    def release(self) -> None:
        """Readers find nothing here any more, and keep what they have leased."""
        self.published.withdraw_all()
        self.published.close()
        for number in (*self._numbers, self.number):
            self._store.release(number)

    def _grow(self, most: int) -> int | None:
        slot = len(self._numbers)
        if slot >= most:
            return None
        files = lay_out(self.sizes)
        try:
            number, _ = self._store.allocate(files[-1].offset + files[-1].nbytes)
        except OutOfMemoryError as error:
            if not slot:
                raise
            if not self._is_full:
                logger.warning("memory for %d versions of another host: %s", slot, error)
            self._is_full = True
            return None
        self._numbers.append(number)
        self.published.count += 1
        self.published.claim(slot)
        self._store.hosted(self.number).describe(WeightsLayout(tuple(self._numbers), files if len(files) > 1 else ()))
        return slot


class MirrorBuffer:
    """For one mirror, which calls from one thread."""

    def __init__(self, segment_store: SegmentStore, versions: ServedVersions) -> None:
        """``versions``: is told what comes in."""
        self._store, self._versions = segment_store, versions
        self._all: list[_Slots] = []  # the last one is used; those before it until that has a version
        self._slot = -1
        self._image: VersionImage | None = None

    def begin(self, version: PublishedVersion, sizes: Sequence[int]) -> VersionImage | None:
        """The image to fetch a version into; None where readers have all slots. Raises ``OutOfMemoryError``."""
        # Those of another size stay until there is a version in these: one that is given up must not take more of them.
        slots = next((each for each in self._all if each.sizes == tuple(sizes)), None)
        if slots is None:
            slots = _Slots(self._store, tuple(sizes))
        else:
            self._all.remove(slots)
        self._all.append(slots)
        slot = self._all[-1].claim()
        if slot is None:
            return None
        self._slot, self._image = slot, self._all[-1].begin(slot, version)
        self._versions.begin(self._image)
        return self._image

    def publish(self) -> None:
        """What was begun is whole: readers may see it."""
        slots = self._all[-1]
        if self._image is not None:
            slots.published.publish(self._slot, self._image.version)
            # Of a trainer before this one, whose host had another clock.
            slots.published.withdraw_newer(self._image.version)
            self._versions.end(slots.number, self._slot)
        while self._all[0] is not slots:
            self._all.pop(0).release()

    def give_up(self) -> None:
        """What was begun will not be whole."""
        self._versions.give_up()

    def close(self) -> None:
        """Nothing is published any more; what is stays."""
        for slots in self._all:
            slots.published.close()
