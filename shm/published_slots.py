"""Published slots: which slots of a segment readers may look at, and which of them the trainer may write to again.

What is published stands in the header page (``slots.py``), who reads it in leases (``slot_locks.py``).

The trainer *claims* a slot, which fails while it is being read, and only then takes back what is published there; it
*offers* the slot again when it has published something else. A reader looks what is published, takes its lease, and
looks again. So what a reader sees under its lease stays as it is.
"""

from __future__ import annotations

from asyncckpt.shm.descriptor import Descriptor
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slot_locks import Claims, Readers, lease
from asyncckpt.shm.slots import PublishedVersion, SlotTable

LASTING = 2
"""The first slots of weights keep their memory: one has the newest version, one is to publish in. Others are there for
as long as readers keep older versions, and may be given back."""


class PublishedSlots:
    """The trainer's part, for checkpoints and for weights. ``count`` slots are used; the owner may change that."""

    def __init__(self, segment: Segment, count: int) -> None:
        """``segment`` has the header page; the images may be in others."""
        self.count = count
        self._table = SlotTable(segment.view)
        self._claims = Claims(segment)

    def publications(self) -> dict[PublishedVersion, int]:
        """What is published, and in which slot, the oldest first."""
        return dict(sorted(self._table.publications(self.count).items()))

    def claim(self, slot: int) -> bool:
        """Whether nobody reads ``slot``. If so, nobody can until it is offered again: nothing is published any more."""
        if not self._claims.claim(slot):
            return False
        self._table.withdraw(slot)
        return True

    def publish(self, slot: int, version: PublishedVersion) -> None:
        """Let readers see ``version`` in a ``slot`` that was claimed."""
        self._table.publish(slot, version)
        self.offer(slot)

    def publish_unless_last(self, slot: int, version: PublishedVersion) -> bool:
        """As ``publish``, if one of the other slots can be claimed then.

        Returns False, and publishes nothing, where readers have all others, so that none would be left that they cannot
        keep; or where they have this one already, as another version.
        """
        others = [other for other in self.publications().values() if other != slot]
        if not self._is_unread(slot):
            return False
        if len(others) == self.count - 1 and not any(map(self._withdraw, others)):
            self.offer(slot)
            return False
        self.publish(slot, version)
        return True

    def offer(self, slot: int) -> None:
        """End the claim on ``slot``, for those who read what is published."""
        self._claims.offer(slot, Readers.OF_PUBLISHED)

    def offer_image(self, slot: int) -> None:
        """End the claim on ``slot``, for those who read the image of a save, which is whole."""
        self._claims.offer(slot, Readers.OF_IMAGE)

    def withdraw_newer(self, version: PublishedVersion) -> None:
        """Whatever is newer than ``version`` shall not be found any more. Its slots are not claimed."""
        for other, slot in self.publications().items():
            if other > version:
                self._table.withdraw(slot)

    def withdraw_all(self) -> None:
        """Nobody shall find anything here any more. The slots are not claimed: nothing may be written there."""
        for slot in range(self.count):
            self._table.withdraw(slot)

    def close(self) -> None:
        """Let go of the header page, and give all claims back."""
        self._table.close()
        self._claims.close()

    def _is_unread(self, slot: int) -> bool:
        """Whether nobody reads what is published in ``slot``, and nobody can from now on."""
        return self._claims.claim(slot, Readers.OF_PUBLISHED)

    def _withdraw(self, slot: int) -> bool:
        """Take back what is published in ``slot``, unless somebody reads it."""
        if not self._is_unread(slot):
            return False
        self._table.withdraw(slot)
        return True


class ReadableSlots:
    """A reader's part, for ``count`` slots of a segment that is mapped for reading; the owner may change ``count``."""

    def __init__(self, segment: Segment, count: int) -> None:
        self.count = count
        self._segment = segment
        self._table = SlotTable(segment.view)

    def publications(self) -> dict[PublishedVersion, int]:
        """What is published, and in which slot."""
        return self._table.publications(self.count)

    def lease(self, slot: int, version: PublishedVersion) -> Descriptor | None:
        """A descriptor that keeps ``version`` in ``slot`` until it is closed; None where it is not there any more."""
        fd = lease(self._segment.fileno(), slot)
        if fd is not None and self._table.published(slot) != version:
            fd.close()
            return None
        return fd

    def close(self) -> None:
        """Let go of the header page. Leases last."""
        self._table.close()
