"""Read the publications of one rank: map the rank's memory, and lease its slots."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Literal

import numpy as np
import torch

from asyncckpt.devices.kinds import wait_for
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.errors import SaveTimeoutError
from asyncckpt.format.segment_layout import Region, WeightsLayout
from asyncckpt.link.api import PublishedSegment
from asyncckpt.link.socket_connection import OtherVersionError
from asyncckpt.link.takeover import ReaderClient
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.shm.memcpy import address_of, memcmp
from asyncckpt.shm.segment import PAGE, Descriptor, Segment, forget_written
from asyncckpt.shm.slots import LASTING, PublishedVersion, ReadableSlots, reopen
from asyncckpt.weights.layout import TensorEntry, header_of, read_entries, read_indexes

# Bits of an entry in /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst). First: the page belongs to the file
# and is not a private copy made by a write. Second: the page is in memory or swapped out.
_IS_OF_FILE, _IS_THERE = 1 << 61, 0b11 << 62
_ENTRY_BYTES = 8
# Number of pages that are examined at once.
_MOST_PAGES = 1 << 20


class PrivateViews:
    """Private mappings of one segment, for reuse. Mapping all pages again takes half as long as copying them."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free: list[memoryview] | None = []

    def take(self) -> memoryview:
        """Take an unused mapping without any private changes."""
        try:
            return (self._free or []).pop()
        except IndexError:
            return self._segment.private_view()

    def give_back(self, view: memoryview) -> None:
        """Return ``view`` for reuse, and discard all writes to it. Any thread may call."""
        free = self._free
        if free is not None and _forget_written(view):
            free.append(view)  # harmless if this object was closed meanwhile

    def close(self) -> None:
        """Unmap the unused mappings now, and each other mapping when it is given back."""
        self._free = None


def _forget_written(view: memoryview) -> bool:
    """Discard the private copies of written pages of ``view``. Return whether this was possible."""
    first, count = address_of(view) // PAGE, -(-len(view) // PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for at in range(0, count, _MOST_PAGES):
                pages.seek((first + at) * _ENTRY_BYTES)
                found = np.frombuffer(pages.read(min(_MOST_PAGES, count - at) * _ENTRY_BYTES), np.uint64)
                written = np.flatnonzero((found & np.uint64(_IS_OF_FILE) == 0) & (found & np.uint64(_IS_THERE) != 0))
                if len(written):
                    begin, end = at + int(written[0]), at + int(written[-1]) + 1
                    forget_written(view, begin * PAGE, end * PAGE)
    except OSError:
        return False
    return True


class Lease:
    """A lease on one slot. The slot does not change until the lease is given back and its last tensor is gone."""

    def __init__(
        self,
        fd: Descriptor,
        entries: Mapping[str, TensorEntry],
        segment: Segment,
        span: range,
        views: PrivateViews | None,
    ) -> None:
        """Take over a lease.

        Args:
            fd: The descriptor of the lease, which this object owns from now on.
            entries: The tensors of the slot, by name.
            segment: The memory, mapped read-only.
            span: The bytes of the slot in the segment.
            views: The source of a writable private mapping for this lease. If None, use ``segment`` itself;
                writing to a tensor is then a segmentation fault.
        """
        self.entries = entries
        self.segment = segment
        self._begin = span.start
        self.is_file = len(span) == segment.nbytes
        self._shared = segment.view[:]  # keeps the mapping even if the subscriber closes it
        view = segment.view if views is None else views.take()
        memory = readable_memory(view, span)
        self._lease = weakref.finalize(memory, _end, fd, view, views)
        # Torch accepts no empty memory. An empty slot needs no memory.
        self._memory: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device="cpu")
        if span:
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._as: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of ``entry``, in place."""
        memory = self._memory
        if memory is None:
            raise ValueError("this lease was given back")
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")  # ignore torch's default device
        like = self._as.get(entry.dtype)
        if like is None:
            size = entry.dtype.itemsize
            like = self._as[entry.dtype] = memory[: memory.numel() // size * size].view(entry.dtype)
        return like.as_strided(entry.shape, contiguous_strides(entry.shape), entry.begin // entry.dtype.itemsize)

    def has_same(self, entry: TensorEntry, other: Lease, theirs: TensorEntry) -> bool:
        """Return whether ``entry`` was published with the bytes of ``theirs`` in ``other``. Ignore local writes."""
        if not entry.nbytes:
            return True
        return bool(memcmp(self._address(entry), other._address(theirs), entry.nbytes) == 0)

    def _address(self, entry: TensorEntry) -> int:
        return int(np.frombuffer(self._shared, np.uint8).ctypes.data) + self._begin + entry.begin

    def give_back(self) -> bool:
        """Give back the lease. Return True if it ends at once, False if the last tensor in use will end it."""
        self._memory, self._shared = None, memoryview(b"")
        self._as.clear()
        return not self._lease.alive


def _end(fd: Descriptor, view: memoryview, views: PrivateViews | None) -> None:
    fd.close()
    if views is not None:
        views.give_back(view)


def readable_memory(view: memoryview, span: range) -> ctypes.Array[ctypes.c_uint8]:
    """Return bytes of a mapping as a ctypes array. Torch can view this array even if the mapping is read-only.

    Torch requires other arrays and mappings to be writable. The result keeps the mapping alive.
    """
    mapping = np.frombuffer(view, dtype=np.uint8)
    memory = (ctypes.c_uint8 * len(span)).from_address(mapping.ctypes.data + span.start)
    memory.mapping = mapping  # type: ignore[attr-defined]
    return memory


class _PinnedImage:
    """The memory of a slot, in ``segment``, pinned for a device so that copies run at the speed of the link."""

    def __init__(self, image: Segment, device: torch.device) -> None:
        """Map and pin. Raises ``OSError``. If the driver refuses to pin, copies are slower, and a warning is logged."""
        # Drivers can pin only a writable mapping. Make the mapping read-only again after pinning.
        self.segment = Segment.attach(Descriptor.of(reopen, image.fileno(), os.O_RDWR))
        self._device = device
        try:
            self._memory = PinnedMemory(self.segment, [], device)
            self.segment.protect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for the device's copies, and unpin the memory."""
        if hasattr(self, "_memory"):
            wait_for(self._device)
            self._memory.close()
        self.segment.close()


Access = Literal["private", "readonly"] | torch.device
"""The mapping of a slot: private and writable, read-only, or read-only and pinned for a device."""

_Files = list[tuple[Mapping[str, TensorEntry], range]]
"""The files of a slot: the tensors and the bytes of each file."""


class _MappedSegment:
    """A published segment, mapped here. The trainer may go on publishing there after the death of the worker."""

    def __init__(self, published: PublishedSegment, client: ReaderClient) -> None:
        self.number = published.segment
        self.client = client
        self._segment = client.open_segment(published.segment)
        self._layout = published.layout
        self._slots = ReadableSlots(self._segment, len(published.layout.slots))
        self._images: dict[int, Segment] = {}
        self._views: dict[Segment, PrivateViews] = {}
        self._pinned: dict[tuple[Segment, str], _PinnedImage] = {}
        self._files: dict[int, _Files] = {}
        """The files of each checkpoint folder that was requested. All slots have the same files."""
        self._headers: dict[int, tuple[bytes, Mapping[str, TensorEntry]]] = {}
        """The last header of each file of weights, as bytes and parsed, by the begin of the file."""

    def update(self, published: PublishedSegment) -> None:
        """Take over the current number of slots, which may have grown."""
        self._layout = published.layout
        self._slots.count = len(published.layout.slots)

    def published(self) -> dict[PublishedVersion, int]:
        """Return the published versions and their slots."""
        return self._slots.publications()

    def lease(self, version: PublishedVersion, how: Access) -> list[Lease] | None:
        """Take a lease for each file of a version; None if the version is gone.

        Raises ``EOFError`` or ``OSError`` if the slot was never mapped here and the worker has left.
        """
        slot = self.published().get(version)
        if slot is None:
            return None
        leases: list[Lease] = []
        with ExitStack() as undo:
            image, files = self._image(slot, version.folder)
            views = None
            if isinstance(how, torch.device):
                # Do not pin extra slots. The driver would not notice that their memory was given back and reallocated.
                if slot < LASTING or not isinstance(self._layout, WeightsLayout):
                    image = self._pinned_image(image, how)
            elif how == "private":
                views = self._views.setdefault(image, PrivateViews(image))
            for entries, span in files:
                if (fd := self._slots.lease(slot, version)) is None:
                    return None
                with ExitStack() as not_leased:
                    not_leased.callback(fd.close)
                    if isinstance(self._layout, WeightsLayout):
                        entries = self._entries(image, span)
                    leases.append(Lease(fd, entries, image, span, views))
                    not_leased.pop_all()
                undo.callback(leases[-1].give_back)
            undo.pop_all()
        return leases

    def close(self) -> None:
        """Unmap the memory. Tensors in use keep their mappings."""
        self._slots.close()
        for views in self._views.values():
            views.close()
        for pinned in self._pinned.values():
            pinned.close()
        for segment in (self._segment, *self._images.values()):
            segment.close()

    def _pinned_image(self, image: Segment, device: torch.device) -> Segment:
        """Return a second mapping of ``image``, pinned for ``device``."""
        if (image, device.type) not in self._pinned:
            self._pinned[image, device.type] = _PinnedImage(image, device)
        return self._pinned[image, device.type].segment

    def _entries(self, image: Segment, span: range) -> Mapping[str, TensorEntry]:
        """Return the tensors of a file of weights, in a slot that is leased.

        A publisher allocates separate memory for each header. A mirror reuses memory for files of the same size, even
        if names, dtypes or shapes differ, so the header is checked again.
        """
        view = image.view[span.start : span.stop]
        header, entries = self._headers.get(span.start, (b"", {}))
        if not header or bytes(view[: len(header)]) != header:
            header, entries = header_of(view), read_entries(view)
            self._headers[span.start] = header, entries
        return entries

    def _image(self, slot: int, folder: int) -> tuple[Segment, _Files]:
        """Return the segment of a slot, and its files."""
        layout, files = self._layout, self._files.get(folder)
        if isinstance(layout, WeightsLayout):
            if slot not in self._images:
                self._images[slot] = self.client.open_segment(layout.slots[slot])
            image = self._images[slot]
            regions = layout.files or (Region(0, image.nbytes),)
            return image, [({}, range(each.offset, each.offset + each.nbytes)) for each in regions]
        if files is None:
            entries = read_indexes(self._segment.view, layout.data_files(layout.metadata[folder][0]))
            files = self._files[folder] = [(entries, range(layout.data_bytes))]
        begin = layout.slots[slot]
        return self._segment, [(entries, range(begin, begin + len(span))) for entries, span in files]


class RankPublications:
    """All publications of one rank that can be read here.

    When the rank's worker leaves, the mapped memory stays readable until another worker publishes at the same endpoint.
    A forked process makes its own connection to the worker.
    """

    def __init__(self, connect: Callable[[], ReaderClient | None]) -> None:
        """Connect later. ``connect`` connects to the rank's worker, or returns None if there is no worker."""
        self._connect = connect
        self._client: ReaderClient | None = None
        self._owner = os.getpid()
        self._segments: list[_MappedSegment] = []
        self.trouble = ""
        """The reason why no newer version arrives from another host; "": unknown."""

    def refresh(self, timeout: float) -> None:
        """Ask the worker for its publications. Raises ``SaveTimeoutError`` if no answer comes within ``timeout`` s."""
        if self._owner != os.getpid():
            self._leave()  # two processes on one connection would mix up answers
            self._owner = os.getpid()
        for _ in range(2):  # a new worker may have replaced the old one
            if self._client is None:
                self._client = self._connect()
            if self._client is None:
                return
            self._client.timeout = timeout
            try:
                answer = self._client.published()
                self.trouble = answer.trouble
                self._update(answer.published, self._client)
                return
            except SaveTimeoutError:
                self._leave()  # a late answer must not be taken as the next answer
                raise
            except (EOFError, OSError) as error:
                self._leave()
                if isinstance(error, OtherVersionError):
                    self.trouble = "the publisher runs another version of asyncckpt"

    @property
    def is_reached(self) -> bool:
        """Whether a worker answers, or memory of a worker that has left is still mapped."""
        return self._client is not None or bool(self._segments)

    def versions(self) -> set[PublishedVersion]:
        """Return the versions published now, in the segments known since the last ``refresh``."""
        return {version for segment in self._segments for version in segment.published()}

    def lease(self, version: PublishedVersion, how: Access) -> list[Lease] | None:
        """Take a lease for each file of a version; None if the version is gone."""
        try:
            found = (segment.lease(version, how) for segment in self._segments)
            return next((lease for lease in found if lease is not None), None)
        except (EOFError, OSError):
            self._leave()
            return None

    def close(self) -> None:
        """Close the connection and unmap all segments."""
        self._leave()
        while self._segments:
            self._segments.pop().close()

    def _update(self, published: tuple[PublishedSegment, ...], client: ReaderClient) -> None:
        """Map new segments, and unmap segments that are no longer published."""
        if not published and all(each.client is not client for each in self._segments):
            return  # keep the memory of the earlier worker until the new worker publishes
        known = {each.number: each for each in self._segments if each.client is client}
        for each in published:
            if each.segment in known:
                known[each.segment].update(each)
            else:
                known[each.segment] = _MappedSegment(each, client)
                self._segments.append(known[each.segment])
        kept = [known[each.segment] for each in published]
        gone = [segment for segment in self._segments if segment not in kept]
        self._segments = kept
        for segment in gone:
            segment.close()

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
