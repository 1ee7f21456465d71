"""Published versions of weights that a worker serves to other hosts: complete versions, and one arriving version.

The image of a version is one file, or one file of each rank, each aligned to ``SPAN_BYTES``. Every span has a *digest*.
Readers verify each span by its digest, and do not fetch spans that are equal in their previous version. A host that
passes on a version sends the digests that it received, so that damaged bytes are not passed on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from asyncckpt.format.manifest import DIGEST_BYTES, digest_of
from asyncckpt.format.segment_layout import Region, WeightsLayout
from asyncckpt.link.segment_store import DIGESTED_BYTES, Leased, SegmentStore
from asyncckpt.shm.hosted_segment import HostedSegment
from asyncckpt.shm.segment import Descriptor, Segment, round_up
from asyncckpt.shm.slots import PublishedVersion, VersionKey, lease
from asyncckpt.transfer.patches import patch_of

SPAN_BYTES = 256 << 10
# Maximum number of digests in one answer. The digests of a complete image are computed on the first request.
_AT_ONCE = DIGESTED_BYTES // SPAN_BYTES
# Polling interval for new publications. The trainer does not notify the worker.
_LOOK_S = 0.01


def lay_out(sizes: Sequence[int]) -> tuple[Region, ...]:
    """Return the places in an image of files with these ``sizes``, in bytes."""
    files: list[Region] = []
    for nbytes in sizes:
        files.append(Region(round_up(files[-1].offset + files[-1].nbytes, SPAN_BYTES) if files else 0, nbytes))
    return tuple(files)


class VersionImage:
    """The image of one version in a slot. The first ``arrived`` of its ``spans`` are here.

    Any thread may call.
    """

    def __init__(self, version: PublishedVersion, memory: HostedSegment, sizes: Sequence[int], *, whole: bool) -> None:
        """Describe the image. Copy nothing.

        Args:
            version: The version.
            memory: The slot. It stays in use while a reader has a lease on this image.
            sizes: The sizes of the files, in bytes.
            whole: True if the whole image is here. Otherwise ``arrive`` adds spans.
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
        """The number of spans that are here with their digests."""
        return len(self._digests) // DIGEST_BYTES

    def bounds(self, span: int) -> tuple[int, int]:
        """Return the begin and the end of a span in the slot."""
        begin = span * SPAN_BYTES
        return begin, min(begin + SPAN_BYTES, self._ends.get(span, begin + SPAN_BYTES))

    def all_digests(self) -> bytes:
        """Return the concatenated digests of all spans that have arrived."""
        return bytes(self._digests)

    def digests(self, first: int, seconds: float) -> bytes | None:
        """Wait at most ``seconds`` for span ``first``, and return digests from there on; none after a timeout.

        Return None if no more spans will arrive.
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

    def has(self, span: int, digest: bytes) -> bool:
        """Return whether a span is here and known to have this digest."""
        return self._digests[span * DIGEST_BYTES : (span + 1) * DIGEST_BYTES] == digest

    def patch(self, span: int, base: bytes, others: Iterable[VersionImage]) -> bytes:
        """Return a patch of a span against the span with the digest ``base`` in one of ``others``.

        Return b"" if there is no such span, or if most of it has changed.
        """
        old = next((other for other in others if other.has(span, base)), None)
        if old is None or span >= self.arrived or self.has(span, base):
            return b""
        begin, end = self.bounds(span)
        return patch_of(old.memory.segment.view[begin:end], self.memory.segment.view[begin:end])

    def arrive(self, digests: bytes) -> None:
        """Note that the next spans are here, with these ``digests``."""
        with self._changed:
            self._digests += digests
            self._changed.notify_all()

    def give_up(self) -> None:
        """Note that no more spans will arrive."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def publish(self, control: Segment, slot: int) -> None:
        """Take a lease on ``slot``, where this image is now published, if another host reads the image."""
        with self._changed:
            if self._readers:
                self._lease = lease(control.fileno(), slot)

    @property
    def is_read(self) -> bool:
        """Whether another host has been reading the image since before its publication."""
        return self._readers > 0

    def use(self) -> None:
        """Add a reader. The reader must call ``end_use`` in the end."""
        with self._changed:
            self._readers += 1
        self.memory.use()

    def end_use(self) -> None:
        """Remove a reader that called ``use``."""
        with self._changed:
            self._readers -= 1
            if not self._readers and self._lease is not None:
                self._lease.close()
                self._lease = None
        self.memory.close()


class ServedVersions:
    """The published versions of a worker, in its ``segment_store``. Any thread may call."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._store = segment_store
        self._lock = threading.Lock()
        self._images: dict[tuple[int, int, PublishedVersion], VersionImage] = {}  # by segment and slot
        self._coming: VersionImage | None = None
        self._looked = 0.0
        self._newest: PublishedVersion | None = None
        self._is_ending = False

    def wait_newer(self, after: PublishedVersion | None, seconds: float) -> PublishedVersion | None:
        """Wait at most ``seconds`` until the newest version is not ``after``. Return it; None after a timeout."""
        deadline = time.monotonic() + seconds
        while True:
            newest = self._look()
            if newest is not None and (after is None or newest.key != after.key):
                return newest
            if time.monotonic() > deadline or self._is_ending:
                return None
            time.sleep(_LOOK_S)

    def end_waits(self) -> None:
        """End all calls of ``wait_newer``, because this worker is shutting down."""
        self._is_ending = True

    def lease(self, key: VersionKey) -> Leased[tuple[int, ...]] | None:
        """Lease a version to a reader, with the sizes of its files in bytes. Return None if it is not here."""
        with contextlib.ExitStack() as kept:
            if (image := self._use(key, kept)) is not None:
                return Leased(image.sizes, image.memory, image.digests, kept.pop_all())
        return None

    def patches(self, key: object, first: int, bases: bytes) -> list[bytes]:
        """Return patches of a version's spans from ``first`` on, see ``ImageApi.patches``."""
        with contextlib.ExitStack() as kept:
            image = self._use(key, kept)
            keys = {published.key for *_, published in self._published()} - {key}
            others = [other for each in keys if (other := self._use(each, kept)) is not None]
            digests = [bases[at : at + DIGEST_BYTES] for at in range(0, len(bases), DIGEST_BYTES)]
            if image is None:
                return [b""] * len(digests)
            return [image.patch(span, digest, others) for span, digest in enumerate(digests, first)]

    def _use(self, key: object, kept: contextlib.ExitStack) -> VersionImage | None:
        """Return the image of a version, unchanged until ``kept`` is closed; None if it is not here."""
        with self._lock:
            coming = self._coming
            if coming is not None and coming.version.key == key:
                coming.use()
                kept.callback(coming.end_use)
                return coming
        with contextlib.ExitStack() as own:
            for number, control, layout, slot, published in self._published():
                if published.key != key:
                    continue
                control.use()
                own.callback(control.close)
                fd = lease(control.segment.fileno(), slot)
                if fd is None or control.slots.published(slot) != published:
                    if fd is not None:
                        fd.close()
                    return None
                own.callback(fd.close)
                image = self._image(number, slot, published, layout)
                image.use()
                own.callback(image.end_use)
                kept.push(own.pop_all())
                return image
        return None

    def begin(self, image: VersionImage) -> None:
        """Let other hosts read a version while it arrives."""
        with self._lock:
            self._coming = image

    def end(self, number: int, slot: int) -> None:
        """Note that the arriving version is complete, and published in ``slot`` of segment ``number``."""
        with self._lock:
            image, self._coming = self._coming, None
            if image is not None:
                self._images[number, slot, image.version] = image
                image.publish(self._store.hosted(number).segment, slot)

    def give_up(self) -> None:
        """Note that the arriving version will never be complete."""
        with self._lock:
            image, self._coming = self._coming, None
        if image is not None:
            image.give_up()

    def _look(self) -> PublishedVersion | None:
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S / 2:  # one look serves all waiting threads
                self._newest = max((published for *_, published in self._published()), default=None)
                self._looked = time.monotonic()
            return self._newest

    def _published(self) -> Iterator[tuple[int, HostedSegment, WeightsLayout, int, PublishedVersion]]:
        for each in self._store.published():
            if isinstance(each.layout, WeightsLayout):
                with contextlib.suppress(KeyError):  # the segment was released meanwhile
                    control = self._store.hosted(each.segment)
                    for published, slot in control.slots.publications(len(each.layout.slots)).items():
                        yield each.segment, control, each.layout, slot, published

    def _image(self, number: int, slot: int, published: PublishedVersion, layout: WeightsLayout) -> VersionImage:
        """Return the image of a leased version. The image keeps its digests while the version is published."""
        with self._lock:
            there = {(number, slot, published) for number, _, _, slot, published in self._published()}
            self._images = {place: image for place, image in self._images.items() if place in there}
            if (image := self._images.get((number, slot, published))) is None:
                memory = self._store.hosted(layout.slots[slot])
                sizes = [file.nbytes for file in layout.files] or [memory.segment.nbytes]
                image = self._images[number, slot, published] = VersionImage(published, memory, sizes, whole=True)
            return image
