"""The mirror: a worker has on its host what is published on another one, version after version, for all readers there.

It asks the worker of the publisher for the newest version, and from whom to get it (``distribution.py``). What has not
changed since the version before it takes from there; all else it fetches, and checks. While that is coming in, others
may read it from here. When it is whole, it is published on this host as a trainer publishes.

Nobody waits for a mirror. A holder that is lost is replaced by another one, and what has come from it stays. A version
that is not there any more is given up for the newest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, OutOfMemoryError
from asyncckpt.format.manifest import DIGEST_BYTES, digest_of
from asyncckpt.format.segment_layout import WeightsLayout
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import HEADER_BYTES, LASTING, PublishedSlots, PublishedVersion
from asyncckpt.transfer.holder import Holder, RemoteVersion
from asyncckpt.transfer.locator import Locator
from asyncckpt.transfer.requests import TransferAddress
from asyncckpt.transfer.sealed_connection import KeyRefusedError
from asyncckpt.transfer.server import TransferServer
from asyncckpt.transfer.sockets import CONNECTIONS
from asyncckpt.transfer.versions import SPAN_BYTES, ServedVersions, VersionImage, lay_out

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


# How long to wait for the next version, and for the next span, before asking again.
_NEXT_S, _SPAN_S = 3.0, 1.0
# How long nothing may come from a holder: it may just be looking for another one itself.
_STALL_S = 30.0
# How long it may take others to publish, or to begin to get, what the first rank has published.
_COMES_S = 20.0
_PAUSE_S = 0.2
# Spans that are fetched at once, 2 MiB: they stay in a core's cache while they are checked; and how often at a time.
_CHUNK_SPANS = (2 << 20) // SPAN_BYTES
_CHUNKS = 4 * CONNECTIONS


class Mirror:
    """That of one worker. It runs until ``close``."""

    def __init__(self, segment_store: SegmentStore, server: TransferServer, locator: str) -> None:
        """Begin.

        Args:
            segment_store: Where the versions are held.
            server: Serves them to others, who have the same locator.
            locator: Where they come from, see ``locator.py``.
        """
        self.locator = locator
        """May be set to another one, which is used when the holder before is gone."""
        self._server = server
        self._buffer = MirrorBuffer(segment_store, server.versions)
        self._own = TransferAddress("", server.port)
        self._last: VersionImage | None = None
        self._coming: VersionImage | None = None
        self._holders: dict[TransferAddress, Holder] = {}
        self._closed = threading.Event()
        self._said = ""
        self.trouble = ""
        """The reason why nothing newer comes; "": none is known."""
        self._thread = threading.Thread(target=self._run, name="asyncckpt-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Fetch no more. What is here stays."""
        self._closed.set()
        for holder in list(self._holders.values()):
            holder.close()
        self._thread.join(_STALL_S)  # it may be just connecting
        self._buffer.close()

    def _run(self) -> None:
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="asyncckpt-mirror-io") as pool:
            while not self._closed.is_set():
                try:
                    locator = Locator.read(self.locator)
                    self._server.keys = (locator.key,)
                    self._follow(locator, pool)
                except KeyRefusedError as error:
                    self._say(f"{error}: the locator is that of another publication, or of one before; take the newest")
                except (OSError, CheckpointError, ValueError) as error:
                    self._say(str(error))
                except Exception:
                    logger.exception("what is published elsewhere cannot be had: please report this")
                finally:
                    self._leave(*self._holders)
                self._closed.wait(_PAUSE_S)
            self._give_up()

    def _follow(self, locator: Locator, pool: ThreadPoolExecutor) -> None:
        """Get version after version. Raises ``OSError`` where the publisher's worker is gone."""
        publisher = self._holder(locator.addresses[0], locator)
        refused: tuple[TransferAddress, ...] = ()
        while not self._closed.is_set():
            after = None if self._last is None else self._last.version
            found = publisher.next_version(after, _NEXT_S, self._own, refused)
            self.trouble = ""
            if (version := found.version) is None:
                continue
            try:
                self._get(version, found.holder, locator, pool)
                refused, self._said = (), ""
            except (OSError, DamagedCheckpointError) as error:
                if found.holder is not None:
                    self._say(f"version {version.version} cannot be had from {found.holder.host}: {error}")
                    refused = (*refused, found.holder)
                    self._leave(found.holder)
                elif isinstance(error, FileNotFoundError):  # there will be a newer one in a moment
                    self._closed.wait(_PAUSE_S / 10)
                else:
                    raise
            except CheckpointError as error:
                self._say(str(error))
                self._closed.wait(_PAUSE_S)

    def _get(
        self, version: PublishedVersion, holder: TransferAddress | None, locator: Locator, pool: ThreadPoolExecutor
    ) -> None:
        """Fetch a version, or what of it is not here yet, and publish it."""
        # Memory is taken before a holder is asked, which may be just taking its own: all hosts do that side by side.
        known = self._last if self._coming is None or self._coming.version[:2] != version[:2] else self._coming
        sizes = known.sizes if known is not None else self._sizes(version, locator)
        image = self._begin(version, sizes)
        with self._opened(version, locator.addresses if holder is None else (holder,), locator) as parts:
            found = tuple(nbytes for part in parts for nbytes in part.sizes)
            if found != sizes:
                image = self._begin(version, found)
            if image is not None:
                self._fetch(image, parts, pool)
                self._buffer.publish()
                self._last, self._coming = image, None

    def _sizes(self, version: PublishedVersion, locator: Locator) -> tuple[int, ...]:
        """Those of the files of a version, as its publishers have it."""
        with self._opened(version, locator.addresses, locator) as parts:
            return tuple(nbytes for part in parts for nbytes in part.sizes)

    @contextmanager
    def _opened(
        self, version: PublishedVersion, addresses: Sequence[TransferAddress], locator: Locator
    ) -> Iterator[list[RemoteVersion]]:
        """A version at all of these workers, who may get, or publish, it a moment after this one has heard of it.

        Raises ``FileNotFoundError``: they do not.
        """
        deadline = time.monotonic() + _COMES_S
        with ExitStack() as stack:
            parts: list[RemoteVersion] = []
            while len(parts) < len(addresses):
                try:
                    holder = self._holder(addresses[len(parts)], locator)
                    parts.append(holder.open_version(version.epoch, version.version))
                    stack.callback(parts[-1].close)
                except FileNotFoundError:
                    at_first = addresses[len(parts)] == locator.addresses[0]
                    if at_first or time.monotonic() > deadline or self._closed.wait(_PAUSE_S / 10):
                        raise
            yield parts

    def _begin(self, version: PublishedVersion, sizes: Sequence[int]) -> VersionImage | None:
        """The image to fetch; None where readers have all slots. What has come of one before it is used again."""
        here = version._replace(ranks=1)  # all of it is here
        coming = self._coming
        if coming is None or coming.version != here or coming.sizes != tuple(sizes):
            self._give_up()
            coming = self._coming = self._buffer.begin(here, sizes)
            if coming is None:
                self._closed.wait(_PAUSE_S)
        return coming

    def _give_up(self) -> None:
        if self._coming is not None:
            self._coming = None
            self._buffer.give_up()

    def _fetch(self, image: VersionImage, parts: Sequence[RemoteVersion], pool: ThreadPoolExecutor) -> None:
        """All of ``image`` that is not here, in order, each span checked.

        Raises ``OSError``, ``DamagedCheckpointError``: it cannot be had from these.
        """
        begins = [0]
        for part in parts:
            begins.append(begins[-1] + sum(-(-nbytes // SPAN_BYTES) for nbytes in part.sizes))
        flying: deque[tuple[Future[None], bytes]] = deque()
        known, moved_at = image.arrived, time.monotonic()
        try:
            while image.arrived < image.spans:
                if known < image.spans and len(flying) < _CHUNKS:
                    at = next(number for number, begin in enumerate(begins[1:]) if known < begin)
                    digests = parts[at].digests(known - begins[at], 0.0 if flying else _SPAN_S)
                    for first, some in self._chunks(image, known, digests):
                        begin = begins[at] * SPAN_BYTES
                        flying.append((pool.submit(self._fetch_chunk, image, parts[at], begin, first, some), some))
                    known += len(digests) // DIGEST_BYTES
                if flying:
                    fetched, some = flying.popleft()
                    fetched.result()
                    image.arrive(some)
                    moved_at = time.monotonic()
                elif time.monotonic() - moved_at > _STALL_S or self._closed.is_set():
                    raise TimeoutError("nothing has come any more")
        finally:
            for fetched, _ in flying:
                fetched.cancel()
            for fetched, _ in flying:  # nobody writes there any more when this ends
                fetched.cancelled() or fetched.exception()

    def _chunks(self, image: VersionImage, first: int, digests: bytes) -> Iterator[tuple[int, bytes]]:
        """Spans with these ``digests`` from ``first`` on, in pieces that are all to be fetched, or none of them."""
        kept: list[bool] = []
        for number in range(len(digests) // DIGEST_BYTES):
            digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            kept.append(self._is_kept(image, first + number, digest))
        begin = 0
        for end in range(1, len(kept) + 1):
            if end == len(kept) or kept[end] != kept[begin] or end - begin == _CHUNK_SPANS:
                yield first + begin, digests[begin * DIGEST_BYTES : end * DIGEST_BYTES]
                begin = end

    def _is_kept(self, image: VersionImage, span: int, digest: bytes) -> bool:
        """Whether the version that is here has the same bytes there."""
        last = self._last
        return last is not None and last.sizes == image.sizes and last.digest(span) == digest

    def _fetch_chunk(
        self, image: VersionImage, part: RemoteVersion, part_begin: int, first: int, digests: bytes
    ) -> None:
        """Bring some spans to their places, and check them."""
        count = len(digests) // DIGEST_BYTES
        view = image.memory.segment.view
        begin, end = image.bounds(first)[0], image.bounds(first + count - 1)[1]

        def is_right() -> bool:
            bounds = (image.bounds(first + number) for number in range(count))
            return b"".join(digest_of(view[start:stop]) for start, stop in bounds) == digests

        last = self._last
        if last is not None and self._is_kept(image, first, digests[:DIGEST_BYTES]):
            view[begin:end] = last.memory.segment.view[begin:end]
            if is_right():
                return
        part.read(begin - part_begin, view[begin:end])
        if not is_right():
            raise DamagedCheckpointError(f"version {image.version.version} did not arrive as it was sent")

    def _holder(self, address: TransferAddress, locator: Locator) -> Holder:
        """A connection to another worker, which is kept."""
        if (holder := self._holders.get(address)) is None:
            holder = self._holders[address] = Holder(address, locator.key, locator.transport)
            if self._closed.is_set():
                holder.close()
        return holder

    def _leave(self, *addresses: TransferAddress) -> None:
        for address in addresses:
            if (holder := self._holders.pop(address, None)) is not None:
                holder.close()

    def _say(self, words: str) -> None:
        """Log what is in the way, once, and keep it for readers."""
        self.trouble = words
        if words != self._said:
            self._said = words
            logger.warning("weights of another host: %s", words)
