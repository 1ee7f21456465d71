"""The mirror: a worker that copies the versions published on another host to its own host, for all readers there.

The mirror asks the publisher's worker for the newest version, and for the host to read from (``distribution.py``).
Spans that did not change since the previous version are copied from that version. If a span has few changes, only the
changes are fetched. All other spans are fetched whole. All spans are checked. While a version arrives, other hosts may
already read it from here. A complete version is published on this host in the same way as by a trainer.

No trainer waits for a mirror. If a holder is lost, another holder replaces it, and the spans that have arrived are
kept. If a version has disappeared at its publisher, the mirror gives it up for the newest version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from asyncckpt.budgets import SILENCE_S
from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.format.segment_layout import WeightsLayout
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import HEADER_BYTES, LASTING, OwnedSlots, PublishedVersion
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.fetch import Fetch, ImagePart, Previous
from asyncckpt.transfer.holder import NEXT_S, Holder, RemoteImage
from asyncckpt.transfer.locator import Locator
from asyncckpt.transfer.sealed_connection import KeyRefusedError
from asyncckpt.transfer.server import TransferServer
from asyncckpt.transfer.sockets import CONNECTIONS
from asyncckpt.transfer.versions import SPAN_BYTES, ServedVersions, VersionImage, lay_out

logger = logging.getLogger(__name__)

# A third slot is allocated if readers keep an older version.
_MOST = LASTING + 1


class _Slots:
    """Slots for versions with files of these ``sizes``, in bytes."""

    def __init__(self, store: SegmentStore, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._store = store
        self._images: dict[int, VersionImage] = {}  # the last image in each slot
        self._numbers: list[int] = []
        self.number, control = store.allocate(HEADER_BYTES)
        self.owned = OwnedSlots(control, 0, tries_again=True)

    def claim(self) -> int | None:
        """Claim a slot that nobody reads; None if all are being read. See ``OwnedSlots.claim_next``."""
        return self.owned.claim_next(range(len(self._numbers)), self._take, _MOST, self._is_free)

    def begin(self, slot: int, version: PublishedVersion) -> VersionImage:
        memory = self._store.hosted(self._numbers[slot])
        image = self._images[slot] = VersionImage(version, memory, self.sizes, whole=False)
        return image

    def release(self) -> None:
        """Withdraw all versions and release the memory. Readers keep the versions they have leased."""
        self.owned.withdraw_all()
        self.owned.close()
        for number in (*self._numbers, self.number):
            self._store.release(number)

    def _take(self, slot: int) -> None:
        """Take memory for a new slot. Raises ``OutOfMemoryError``."""
        files = lay_out(self.sizes)
        number, _ = self._store.allocate(files[-1].offset + files[-1].nbytes)
        self._numbers.append(number)
        self._store.hosted(self.number).describe(WeightsLayout(tuple(self._numbers), files if len(files) > 1 else ()))

    def _is_free(self, slot: int) -> bool:
        # A version that was given up may still have readers on other hosts, without a lease on its slot.
        return slot not in self._images or not self._images[slot].is_read


class MirrorBuffer:
    """The memory of one mirror. Only one thread may call."""

    def __init__(self, segment_store: SegmentStore, versions: ServedVersions) -> None:
        """Allocate no memory yet. ``versions`` is notified of each version that arrives."""
        self._store, self._versions = segment_store, versions
        self._all: list[_Slots] = []  # the last is in use; the others stay until it has a version
        self._slot = -1
        self._image: VersionImage | None = None

    def begin(self, version: PublishedVersion, sizes: Sequence[int]) -> VersionImage | None:
        """Return the image to fetch a version into; None if readers hold all slots. Raises ``OutOfMemoryError``."""
        # Slots of other sizes stay until these slots have a version. So if the mirror gives up a version, it need not
        # allocate the other slots again.
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
        """Publish the version that was begun. It must be complete."""
        slots = self._all[-1]
        if self._image is not None:
            slots.owned.publish(self._slot, self._image.version)
            # An earlier trainer on a host with another clock may have left a version that looks newer.
            slots.owned.withdraw_newer(self._image.version)
            self._versions.end(slots.number, self._slot)
        while self._all[0] is not slots:
            self._all.pop(0).release()

    def give_up(self) -> None:
        """Abandon the version that was begun."""
        self._versions.give_up()

    def close(self) -> None:
        """Stop publishing. Published versions stay."""
        for slots in self._all:
            slots.owned.close()


# The pause after a failure.
_PAUSE_S = 0.2


class Mirror:
    """The mirror of one worker. It runs until ``close``."""

    def __init__(self, segment_store: SegmentStore, server: TransferServer, locator: str) -> None:
        """Start the thread.

        Args:
            segment_store: The memory for the versions.
            server: Serves the versions to other hosts that have the same locator.
            locator: The locator of the publication, see ``locator.py``.
        """
        self.locator = locator
        """May be replaced by another locator. The mirror looks at it before each version."""
        self._server = server
        self._buffer = MirrorBuffer(segment_store, server.versions)
        self._own = TransferAddress("", server.port)
        self._last: VersionImage | None = None
        self._coming: VersionImage | None = None
        self._holders: dict[TransferAddress, Holder] = {}
        self._closed = threading.Event()
        self._said = ""
        self.trouble = ""
        """The reason why no newer version arrives; "": unknown."""
        self._thread = threading.Thread(target=self._run, name="asyncckpt-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop fetching. The versions that are here stay."""
        self._closed.set()
        for holder in list(self._holders.values()):
            holder.close()
        self._thread.join(SILENCE_S)  # the thread may be connecting
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
                    logger.exception("weights of another host cannot be fetched: please report this")
                finally:
                    self._leave(*self._holders)
                self._closed.wait(_PAUSE_S)
            self._give_up()

    def _follow(self, locator: Locator, pool: ThreadPoolExecutor) -> None:
        """Fetch version after version, until the locator changes.

        Raises ``OSError`` when the publisher's worker is gone.
        """
        publisher = self._holder(locator.addresses[0], locator)
        refused: tuple[TransferAddress, ...] = ()
        while not self._closed.is_set() and self._is_current(locator):
            after = None if self._last is None else self._last.version
            found = publisher.next_version(after, NEXT_S, self._own, refused)
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
                elif isinstance(error, FileNotFoundError):  # a newer version will come soon
                    self._closed.wait(_PAUSE_S / 10)
                else:
                    raise
            except CheckpointError as error:
                self._say(str(error))
                self._closed.wait(_PAUSE_S)

    def _is_current(self, locator: Locator) -> bool:
        """Return whether the locator is unchanged. A restarted trainer may publish other ranks with the same worker."""
        try:
            return Locator.read(self.locator) == locator
        except (OSError, ValueError):
            return True

    def _get(
        self, version: PublishedVersion, holder: TransferAddress | None, locator: Locator, pool: ThreadPoolExecutor
    ) -> None:
        """Fetch a version, or the rest of a version that has partly arrived, and publish it."""
        # Allocate memory before asking a holder, because the holder may be allocating its own memory. So all hosts
        # allocate in parallel.
        known = self._last if self._coming is None or self._coming.version.key != version.key else self._coming
        sizes = known.sizes if known is not None else self._sizes(version, locator)
        image = self._begin(version, sizes)
        with self._opened(version, locator.addresses if holder is None else (holder,), locator) as parts:
            found = tuple(nbytes for part in parts for nbytes in part.described)
            if found != sizes:
                image = self._begin(version, found)
            if image is not None:
                self._fetch(image, parts, pool)
                self._buffer.publish()
                self._last, self._coming = image, None

    def _sizes(self, version: PublishedVersion, locator: Locator) -> tuple[int, ...]:
        """Ask the publishers for the sizes of a version's files, in bytes."""
        with self._opened(version, locator.addresses, locator) as parts:
            return tuple(nbytes for part in parts for nbytes in part.described)

    @contextmanager
    def _opened(
        self, version: PublishedVersion, addresses: Sequence[TransferAddress], locator: Locator
    ) -> Iterator[list[RemoteImage[tuple[int, ...]]]]:
        """Open a version at each of these workers. Wait for workers that publish or begin to receive it a little later.

        Raises ``FileNotFoundError`` if a worker does not have the version in time.
        """
        deadline = time.monotonic() + SILENCE_S
        with ExitStack() as stack:
            parts: list[RemoteImage[tuple[int, ...]]] = []
            while len(parts) < len(addresses):
                try:
                    holder = self._holder(addresses[len(parts)], locator)
                    parts.append(holder.open(version.key))
                    stack.callback(parts[-1].close)
                except FileNotFoundError:
                    at_first = addresses[len(parts)] == locator.addresses[0]
                    if at_first or time.monotonic() > deadline or self._closed.wait(_PAUSE_S / 10):
                        raise
            yield parts

    def _begin(self, version: PublishedVersion, sizes: Sequence[int]) -> VersionImage | None:
        """Return the image to fetch; None if readers hold all slots. Reuses an image that has partly arrived."""
        here = version._replace(ranks=1)  # the image here holds the parts of all ranks
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

    def _fetch(
        self, image: VersionImage, sources: Sequence[RemoteImage[tuple[int, ...]]], pool: ThreadPoolExecutor
    ) -> None:
        """Fetch all spans of ``image`` that have not arrived.

        Raises ``OSError`` or ``DamagedCheckpointError`` if the version cannot be fetched from these workers.
        """
        parts, first = [], 0
        for source in sources:
            parts.append(ImagePart(source, first, -first * SPAN_BYTES))
            first += sum(-(-nbytes // SPAN_BYTES) for nbytes in source.described)
        previous = None
        if self._last is not None and self._last.sizes == image.sizes:
            previous = Previous(self._last.memory.segment.view, self._last.all_digests())
        name, memory = f"version {image.version.version}", image.memory.segment.view
        fetch = Fetch(name, {}, memory, image.spans, image.bounds, previous, with_patches=True)
        for digests in fetch.run(parts, pool, image.arrived):
            image.arrive(digests)

    def _holder(self, address: TransferAddress, locator: Locator) -> Holder:
        """Return the connection to another worker. The connection stays open for later calls."""
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
        """Log the problem, once, and keep it for readers."""
        self.trouble = words
        if words != self._said:
            self._said = words
            logger.warning("weights of another host: %s", words)
