"""Reading what one rank has published: its memory mapped here, and leases on its slots."""

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
from asyncckpt.link.endpoint_messages import PublishedSegment
from asyncckpt.link.takeover import ReaderClient
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.shm.memcpy import address_of, memcmp
from asyncckpt.shm.segment import PAGE, Descriptor, Segment, forget_written
from asyncckpt.shm.slots import LASTING, PublishedVersion, ReadableSlots, reopen
from asyncckpt.weights.layout import TensorEntry, header_of, read_entries, read_indexes

# Of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst): the page is the file's, and not a copy
# that a write has made; it is in memory, or swapped out.
_IS_OF_FILE, _IS_THERE = 1 << 61, 0b11 << 62
_ENTRY_BYTES = 8
# Looked at at once.
_MOST_PAGES = 1 << 20


class PrivateViews:
    """Those of one segment, which are used again: to map all its pages anew costs half as much as to copy them."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free: list[memoryview] | None = []

    def take(self) -> memoryview:
        """One that nobody has, and in which nothing was written."""
        try:
            return (self._free or []).pop()
        except IndexError:
            return self._segment.private_view()

    def give_back(self, view: memoryview) -> None:
        """Nobody uses ``view`` any more: what was written there goes. On any thread."""
        free = self._free
        if free is not None and _forget_written(view):
            free.append(view)  # which may have been closed meanwhile

    def close(self) -> None:
        """Unmap those that nobody has, and the others once they are given back."""
        self._free = None


def _forget_written(view: memoryview) -> bool:
    """Make ``view`` as the segment is. Returns whether that was possible."""
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
    """One slot, as it was published: it stays so until the last tensor of it is gone, and this is given back."""

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
            fd: Its descriptor, which this owns from here on.
            entries: The tensors of the slot, by name.
            segment: The memory, mapped for reading.
            span: The bytes of the slot in it.
            views: Where to take a mapping for this lease alone from, which can be written to; None: ``segment`` itself,
                and to write to a tensor is a segmentation fault.
        """
        self.entries = entries
        self.segment = segment
        self._begin = span.start
        self.is_file = len(span) == segment.nbytes
        self._shared = segment.view[:]  # which so stays mapped, also where the subscriber lets go of it
        view = segment.view if views is None else views.take()
        memory = readable_memory(view, span)
        self._lease = weakref.finalize(memory, _end, fd, view, views)
        # Torch takes no memory of no bytes: where there is nothing to read, there is nothing to keep.
        self._memory: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device="cpu")
        if span:
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._as: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor of ``entry``, in place."""
        memory = self._memory
        if memory is None:
            raise ValueError("this lease was given back")
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")  # whatever the default is
        like = self._as.get(entry.dtype)
        if like is None:
            size = entry.dtype.itemsize
            like = self._as[entry.dtype] = memory[: memory.numel() // size * size].view(entry.dtype)
        return like.as_strided(entry.shape, contiguous_strides(entry.shape), entry.begin // entry.dtype.itemsize)

    def has_same(self, entry: TensorEntry, other: Lease, theirs: TensorEntry) -> bool:
        """Whether ``entry`` was published with the bytes of ``theirs``, of another lease; whatever its reader did."""
        if not entry.nbytes:
            return True
        return bool(memcmp(self._address(entry), other._address(theirs), entry.nbytes) == 0)

    def _address(self, entry: TensorEntry) -> int:
        return int(np.frombuffer(self._shared, np.uint8).ctypes.data) + self._begin + entry.begin

    def give_back(self) -> bool:
        """Whether that ends the lease at once; if not, some tensor is still in use, and the last one ends it."""
        self._memory, self._shared = None, memoryview(b"")
        self._as.clear()
        return not self._lease.alive


def _end(fd: Descriptor, view: memoryview, views: PrivateViews | None) -> None:
    fd.close()
    if views is not None:
        views.give_back(view)


def readable_memory(view: memoryview, span: range) -> ctypes.Array[ctypes.c_uint8]:
    """These bytes of a mapping, for torch to take as a tensor, also where they are mapped for reading alone.

    Torch wants numpy's arrays, and the mapping itself, to be writable. The result keeps the mapping.
    """
    mapping = np.frombuffer(view, dtype=np.uint8)
    memory = (ctypes.c_uint8 * len(span)).from_address(mapping.ctypes.data + span.start)
    memory.mapping = mapping  # type: ignore[attr-defined]
    return memory


class _PinnedImage:
    """The memory of a slot, in ``segment``, pinned for a device, which copies from there at the speed of its link."""

    def __init__(self, image: Segment, device: torch.device) -> None:
        """Raises ``OSError``; what the driver refuses is copied more slowly, which is logged."""
        # Drivers want to be able to write where memory is pinned. Nobody here is: it is protected right after.
        self.segment = Segment.attach(Descriptor.of(reopen, image.fileno(), os.O_RDWR))
        self._device = device
        try:
            self._memory = PinnedMemory(self.segment, [], device)
            self.segment.protect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Once the device has done what it was given, it knows nothing more of this memory."""
        if hasattr(self, "_memory"):
            wait_for(self._device)
            self._memory.close()
        self.segment.close()


Access = Literal["private", "readonly"] | torch.device
"""How a reader maps a slot: for itself, to be written to; as it is; or as it is and pinned for that device."""

_Files = list[tuple[Mapping[str, TensorEntry], range]]
"""The files of a slot: the tensors of each, and its bytes."""


class _MappedSegment:
    """A published segment, mapped here. Its worker may be gone: the trainer may go on to publish in it."""

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
        """Of each folder of checkpoints that was asked for; the same in all slots."""
        self._headers: dict[int, tuple[bytes, Mapping[str, TensorEntry]]] = {}
        """Of each file of weights, by where it begins, as it was read last, and what that says."""

    def update(self, published: PublishedSegment) -> None:
        """It may have more slots than before."""
        self._layout = published.layout
        self._slots.count = len(published.layout.slots)

    def published(self) -> dict[PublishedVersion, int]:
        """What is published, and in which slot."""
        return self._slots.publications()

    def lease(self, version: PublishedVersion, how: Access) -> list[Lease] | None:
        """One for each file in its slot; None where it is not there any more.

        Raises ``EOFError`` or ``OSError`` where its slot was never mapped here, and the worker has left.
        """
        slot = self.published().get(version)
        if slot is None:
            return None
        leases: list[Lease] = []
        with ExitStack() as undo:
            image, files = self._image(slot, version.folder)
            views = None
            if isinstance(how, torch.device):
                # A driver would not notice that memory was given back, and taken again.
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
        """Let go of the memory; where tensors are left it stays until they are gone."""
        self._slots.close()
        for views in self._views.values():
            views.close()
        for pinned in self._pinned.values():
            pinned.close()
        for segment in (self._segment, *self._images.values()):
            segment.close()

    def _pinned_image(self, image: Segment, device: torch.device) -> Segment:
        """The memory of ``image``, mapped once more, and pinned for ``device``."""
        if (image, device.type) not in self._pinned:
            self._pinned[image, device.type] = _PinnedImage(image, device)
        return self._pinned[image, device.type].segment

    def _entries(self, image: Segment, span: range) -> Mapping[str, TensorEntry]:
        """The tensors of a file of weights, in a slot that is leased.

        A publisher has memory of its own for each header. But a mirror has what has the same size in the same memory,
        also where names, dtypes or shapes are others.
        """
        view = image.view[span.start : span.stop]
        header, entries = self._headers.get(span.start, (b"", {}))
        if not header or bytes(view[: len(header)]) != header:
            header, entries = header_of(view), read_entries(view)
            self._headers[span.start] = header, entries
        return entries

    def _image(self, slot: int, folder: int) -> tuple[Segment, _Files]:
        """A slot: its segment, and what is where in it."""
        layout, files = self._layout, self._files.get(folder)
        if isinstance(layout, WeightsLayout):
            if slot not in self._images:
                self._images[slot] = self.client.open_segment(layout.slots[slot])
            image = self._images[slot]
            regions = layout.files or (Region(0, image.nbytes),)
            return image, [({}, range(each.offset, each.offset + each.nbytes)) for each in regions]
        if files is None:
            entries = read_indexes(self._segment.view, layout.published_files(folder))
            files = self._files[folder] = [(entries, range(layout.data_bytes))]
        begin = layout.slots[slot]
        return self._segment, [(entries, range(begin, begin + len(span))) for entries, span in files]


class RankPublications:
    """All that one rank has published, as far as it can be read here.

    When its worker leaves, what is mapped stays readable, until another worker has that endpoint and something
    published. A fork talks to the worker by a connection of its own.
    """

    def __init__(self, connect: Callable[[], ReaderClient | None]) -> None:
        """``connect``: to its worker; None where there is none."""
        self._connect = connect
        self._client: ReaderClient | None = None
        self._owner = os.getpid()
        self._segments: list[_MappedSegment] = []
        self.trouble = ""
        """The reason why nothing newer comes from another host; "": none is known."""

    def refresh(self, timeout: float) -> None:
        """Ask the worker what there is. Raises ``SaveTimeoutError`` if it has no answer in ``timeout`` seconds."""
        if self._owner != os.getpid():
            self._leave()  # two processes that ask by one connection get each other's answers
            self._owner = os.getpid()
        for _ in range(2):  # it may have left, and another one have come
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
                self._leave()  # a late answer must not be taken for that to the next question
                raise
            except (EOFError, OSError):
                self._leave()

    @property
    def is_reached(self) -> bool:
        """Whether a worker answers, or one has before it left what is mapped here."""
        return self._client is not None or bool(self._segments)

    def versions(self) -> set[PublishedVersion]:
        """What is published now; new segments are those of the last ``refresh``."""
        return {version for segment in self._segments for version in segment.published()}

    def lease(self, version: PublishedVersion, how: Access) -> list[Lease] | None:
        """Of each file of it; None where it is not there any more."""
        try:
            found = (segment.lease(version, how) for segment in self._segments)
            return next((lease for lease in found if lease is not None), None)
        except (EOFError, OSError):
            self._leave()
            return None

    def close(self) -> None:
        """Let go of all."""
        self._leave()
        while self._segments:
            self._segments.pop().close()

    def _update(self, published: tuple[PublishedSegment, ...], client: ReaderClient) -> None:
        """Map what is new, and let go of what is not there any more."""
        if not published and all(each.client is not client for each in self._segments):
            return  # nothing yet: what is left of the worker before this one still serves
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
