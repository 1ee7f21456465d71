"""Published versions of weights, as a worker lets other hosts read them: whole ones, and one that is still coming in.

The image of a version is one file, or those of several ranks, each from a multiple of ``SPAN_BYTES`` on. Every span has
a *digest*: by that a reader checks what has arrived, and sees what has not changed since the version that it has. Who
passes a version on gives it with the digests that it was given itself, so a bad byte goes no further.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from asyncckpt.format.manifest import DIGEST_BYTES, digest_of
from asyncckpt.format.segment_layout import Region, WeightsLayout
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.hosted_segment import HostedSegment
from asyncckpt.shm.segment import Descriptor, Segment, round_up
from asyncckpt.shm.slots import PublishedVersion, lease

SPAN_BYTES = 256 << 10
# Digests that are told at once, of some 64 MiB: those of whole images are made when they are first asked for.
_AT_ONCE = 256
# How often it is looked what the trainer has published: it tells its readers, and nobody else.
_LOOK_S = 0.01


def lay_out(sizes: Sequence[int]) -> tuple[Region, ...]:
    """Where files of these ``sizes``, in bytes, stand in an image."""
    files: list[Region] = []
    for nbytes in sizes:
        files.append(Region(round_up(files[-1].offset + files[-1].nbytes, SPAN_BYTES) if files else 0, nbytes))
    return tuple(files)


class VersionImage:
    """The image of one version in a slot, as far as it is here: the first ``arrived`` of its ``spans``.

    Any thread may call.
    """

    def __init__(self, version: PublishedVersion, memory: HostedSegment, sizes: Sequence[int], *, whole: bool) -> None:
        """Nothing is copied.

        Args:
            version: Which.
            memory: The slot, in use as long as somebody has a lease on this.
            sizes: Of its files, in bytes.
            whole: Whether all of it is here. Else ``arrive`` says what has come.
        """
        self.version = version
        self.memory = memory
        self.files = lay_out(sizes)
        self.sizes = tuple(sizes)
        self.spans = -(-(self.files[-1].offset + self.files[-1].nbytes) // SPAN_BYTES)
        self._ends = {(each.offset + each.nbytes) // SPAN_BYTES: each.offset + each.nbytes for each in self.files}
        self._whole, self._digests = whole, bytearray()
        self._changed = threading.Condition()
        self._is_given_up = False
        self._readers = 0
        self._lease: Descriptor | None = None

    @property
    def arrived(self) -> int:
        """How many spans are here, and have their digests."""
        return len(self._digests) // DIGEST_BYTES

    def bounds(self, span: int) -> tuple[int, int]:
        """Where a span begins and ends in the slot."""
        begin = span * SPAN_BYTES
        return begin, min(begin + SPAN_BYTES, self._ends.get(span, begin + SPAN_BYTES))

    def digest(self, span: int) -> bytes:
        """That of a span that has arrived."""
        return bytes(self._digests[span * DIGEST_BYTES : (span + 1) * DIGEST_BYTES])

    def digests(self, first: int, seconds: float) -> bytes | None:
        """Those of some spans from ``first`` on, of one at least, for which is waited; none after ``seconds``.

        None where what is here is all that will ever be.
        """
        with self._changed:
            if self._whole:
                for span in range(self.arrived, min(first + _AT_ONCE, self.spans)):
                    begin, end = self.bounds(span)
                    self._digests += digest_of(self.memory.segment.view[begin:end])
            else:
                self._changed.wait_for(lambda: self.arrived > first or self._is_given_up, seconds)
            found = bytes(self._digests[first * DIGEST_BYTES : (first + _AT_ONCE) * DIGEST_BYTES])
            return None if self._is_given_up and not found else found

    def arrive(self, digests: bytes) -> None:
        """The next spans are here, and have these ``digests``."""
        with self._changed:
            self._digests += digests
            self._changed.notify_all()

    def give_up(self) -> None:
        """No more will come."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def publish(self, control: Segment, slot: int) -> None:
        """It is whole, and published in ``slot``: who reads it on another host keeps it there, as any reader does."""
        with self._changed:
            if self._readers:
                self._lease = lease(control.fileno(), slot)

    @property
    def is_read(self) -> bool:
        """Whether somebody on another host reads it who began before it was published."""
        return self._readers > 0

    def use(self) -> None:
        """One more reads it, until it calls ``end_use``."""
        with self._changed:
            self._readers += 1
        self.memory.use()

    def end_use(self) -> None:
        """Whoever has called ``use`` reads it no more."""
        with self._changed:
            self._readers -= 1
            if not self._readers and self._lease is not None:
                self._lease.close()
                self._lease = None
        self.memory.close()


class LeasedVersion:
    """A version that somebody on another host reads: nobody writes in its slot until this is closed."""

    def __init__(self, image: VersionImage, kept: contextlib.ExitStack) -> None:
        """``image``: which; ``kept``: what ends with the lease."""
        self.image = image
        self.segment = image.memory.segment
        self.used = image.memory.used
        """Keeps the memory, whatever becomes of the lease."""
        self._kept = kept

    def close(self) -> None:
        """End the lease. To be called once."""
        self._kept.close()


class ServedVersions:
    """What the worker of ``segment_store`` has of published versions. Any thread may call."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._store = segment_store
        self._lock = threading.Lock()
        self._images: dict[tuple[int, int, PublishedVersion], VersionImage] = {}  # by segment and slot
        self._coming: VersionImage | None = None
        self._looked = 0.0
        self._newest: PublishedVersion | None = None
        self._is_ending = False

    def wait_newer(self, after: PublishedVersion | None, seconds: float) -> PublishedVersion | None:
        """The newest version, if it is not ``after``; wait for that ``seconds`` at most."""
        deadline = time.monotonic() + seconds
        while True:
            newest = self._look()
            if newest is not None and (after is None or _key(newest) != _key(after)):
                return newest
            if time.monotonic() > deadline or self._is_ending:
                return None
            time.sleep(_LOOK_S)

    def end_waits(self) -> None:
        """Nobody waits any more for what is published: this worker ends."""
        self._is_ending = True

    def lease(self, epoch: int, version: int) -> LeasedVersion | None:
        """Let somebody read a version; None where it is not here."""
        with contextlib.ExitStack() as kept:
            with self._lock:
                coming = self._coming
                if coming is not None and _key(coming.version) == (epoch, version):
                    coming.use()
                    kept.callback(coming.end_use)
                    return LeasedVersion(coming, kept.pop_all())
            for number, control, layout, slot, published in self._published():
                if _key(published) != (epoch, version):
                    continue
                control.use()
                kept.callback(control.close)
                fd = lease(control.segment.fileno(), slot)
                if fd is None or control.slots.published(slot) != published:
                    if fd is not None:
                        fd.close()
                    return None
                kept.callback(fd.close)
                image = self._image(number, slot, published, layout)
                image.use()
                kept.callback(image.end_use)
                return LeasedVersion(image, kept.pop_all())
        return None

    def begin(self, image: VersionImage) -> None:
        """A version is coming in; others may read what there is of it."""
        with self._lock:
            self._coming = image

    def end(self, number: int, slot: int) -> None:
        """What was coming in is whole, and published in ``slot`` of the segment of that ``number``."""
        with self._lock:
            image, self._coming = self._coming, None
            if image is not None:
                self._images[number, slot, image.version] = image
                image.publish(self._store.hosted(number).segment, slot)

    def give_up(self) -> None:
        """What was coming in will not be whole."""
        with self._lock:
            image, self._coming = self._coming, None
        if image is not None:
            image.give_up()

    def _look(self) -> PublishedVersion | None:
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S / 2:  # for all who wait
                self._newest = max((published for *_, published in self._published()), default=None)
                self._looked = time.monotonic()
            return self._newest

    def _published(self) -> Iterator[tuple[int, HostedSegment, WeightsLayout, int, PublishedVersion]]:
        for each in self._store.published():
            if isinstance(each.layout, WeightsLayout):
                with contextlib.suppress(KeyError):  # it was released just now
                    control = self._store.hosted(each.segment)
                    for published, slot in control.slots.publications(len(each.layout.slots)).items():
                        yield each.segment, control, each.layout, slot, published

    def _image(self, number: int, slot: int, published: PublishedVersion, layout: WeightsLayout) -> VersionImage:
        """The image of a version that is leased: it keeps its digests for as long as it is there."""
        with self._lock:
            there = {(number, slot, published) for number, _, _, slot, published in self._published()}
            self._images = {place: image for place, image in self._images.items() if place in there}
            if (image := self._images.get((number, slot, published))) is None:
                memory = self._store.hosted(layout.slots[slot])
                sizes = [file.nbytes for file in layout.files] or [memory.segment.nbytes]
                image = self._images[number, slot, published] = VersionImage(published, memory, sizes, whole=True)
            return image


def _key(version: PublishedVersion) -> tuple[int, int]:
    """By which hosts know it: how many ranks it comes from differs."""
    return version.epoch, version.version
