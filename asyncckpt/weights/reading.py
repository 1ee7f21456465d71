"""A reader's view of what one rank has published: its shelves, mapped here, and leases on their slots."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from asyncckpt.errors import SaveTimeoutError
from asyncckpt.shm.leases import lease
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import Published, SlotTable
from asyncckpt.weights.image import Entry, read_entries, read_index
from asyncckpt.worker.browser import Browser
from asyncckpt.worker.messages import Layout, Shelf

logger = logging.getLogger(__name__)


class Leased:
    """One slot, as it was published: it stays so until the last tensor of it is gone, and this is given back."""

    def __init__(self, fd: int, entries: Mapping[str, Entry], segment: Segment, begin: int, nbytes: int) -> None:
        """``fd``: the lease, which is closed in the end. The slot is the ``nbytes`` at ``begin`` of ``segment``."""
        self.entries = entries
        self.segment = segment
        self.is_file = nbytes == segment.nbytes
        # Of ctypes, because torch wants of numpy, or of the mapping itself, that they be writable. Each tensor holds on
        # to this, and this to the mapping.
        mapping = np.frombuffer(segment.view, dtype=np.uint8)
        memory = (ctypes.c_uint8 * nbytes).from_address(mapping.ctypes.data + begin)
        memory.mapping = mapping  # type: ignore[attr-defined]
        self._lease = weakref.finalize(memory, os.close, fd)
        self._memory: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._as: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, entry: Entry) -> torch.Tensor:
        """That of ``entry``, in place. To write to it is a segmentation fault."""
        memory = self._memory
        if memory is None:
            raise ValueError("this lease was given back")
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")  # whatever the default is
        like = self._as.get(entry.dtype)
        if like is None:
            size = entry.dtype.itemsize
            like = self._as[entry.dtype] = memory[: memory.numel() // size * size].view(entry.dtype)
        strides = [1]
        for length in entry.shape[:0:-1]:
            strides.insert(0, strides[0] * length)
        return like.as_strided(entry.shape, strides[: len(entry.shape)], entry.begin // entry.dtype.itemsize)

    def give_back(self) -> bool:
        """Whether that ends the lease at once; if not, some tensor is still in use, and the last one ends it."""
        self._memory = None
        self._as.clear()
        return not self._lease.alive


class _OpenShelf:
    """A shelf, mapped here. Its worker may be gone: the memory is there, and the trainer may go on to publish in it."""

    def __init__(self, shelf: Shelf, browser: Browser) -> None:
        self.shelf = shelf
        self.browser = browser
        self._segment = browser.read(shelf.segment)
        self.slots = SlotTable(self._segment.view)
        self._images: dict[int, Segment] = {}
        self._entries: dict[str, Entry] | None = None
        """The same in all slots."""

    def published(self) -> dict[Published, int]:
        """What is published, and in which slot."""
        return self.slots.publications(len(self.shelf.layout.slots))

    def lease(self, slot: int, published: Published) -> Leased | None:
        """None where the slot has something else by now.

        Raises ``EOFError`` or ``OSError`` where it was never mapped here, and the worker has left.
        """
        fd = lease(self._segment.fileno(), slot)
        if fd is None:
            return None
        try:
            if self.slots.published(slot) == published:
                return self._leased(fd, slot)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def close(self) -> None:
        """Let go of the memory; where tensors are left it stays until they are gone."""
        self.slots.close()
        for segment in (self._segment, *self._images.values()):
            segment.close()

    def _leased(self, fd: int, slot: int) -> Leased:
        layout = self.shelf.layout
        if isinstance(layout, Layout):
            if self._entries is None:
                head = self._segment.view[layout.index_head.offset :][: layout.index_head.nbytes]
                self._entries = {entry.name: entry for entry in read_index(head)}
            return Leased(fd, self._entries, self._segment, layout.slots[slot], layout.data_bytes)
        if slot not in self._images:
            self._images[slot] = self.browser.read(layout.slots[slot])
        image = self._images[slot]
        if self._entries is None:
            self._entries = {entry.name: entry for entry in read_entries(image.view)}
        return Leased(fd, self._entries, image, 0, image.nbytes)


class Found(NamedTuple):
    """Where something is published."""

    shelf: _OpenShelf
    slot: int


class Publications:
    """All that one rank has published, as far as it can be read here.

    When its worker leaves, what is mapped stays readable, until another worker has that door and something published.
    A fork talks to the worker by a connection of its own.
    """

    def __init__(self, door: str) -> None:
        self._door = door
        self._browser: Browser | None = None
        self._owner = os.getpid()
        self._shelves: list[_OpenShelf] = []

    def refresh(self, timeout: float) -> None:
        """Ask the worker what there is. Raises ``SaveTimeoutError`` if it has no answer in ``timeout`` seconds."""
        if self._owner != os.getpid():
            self._leave()  # two who ask by one connection get each other's answers
            self._owner = os.getpid()
        for _ in range(2):  # it may have left, and another one have come
            if self._browser is None:
                self._browser = Browser.enter(self._door)
            if self._browser is None:
                return
            self._browser.timeout = timeout
            try:
                self._take_over(self._browser.shelves(), self._browser)
                return
            except SaveTimeoutError:
                self._leave()  # a late answer must not be taken for that to the next question
                raise
            except (EOFError, OSError):
                self._leave()

    @property
    def is_reached(self) -> bool:
        """Whether a worker answers, or one has before it left what is mapped here."""
        return self._browser is not None or bool(self._shelves)

    def all(self) -> dict[Published, Found]:
        """What is published now, and where; as of the last ``refresh`` for new shelves."""
        return {
            published: Found(shelf, slot) for shelf in self._shelves for published, slot in shelf.published().items()
        }

    def lease(self, published: Published, there: Found) -> Leased | None:
        """None where it is not there any more."""
        try:
            return there.shelf.lease(there.slot, published)
        except (EOFError, OSError):
            self._leave()
            return None

    def close(self) -> None:
        """Let go of all."""
        self._leave()
        while self._shelves:
            self._shelves.pop().close()

    def _take_over(self, shelves: tuple[Shelf, ...], browser: Browser) -> None:
        """Map what is new, and let go of what is not there any more."""
        if not shelves and all(each.browser is not browser for each in self._shelves):
            return  # nothing yet: what is left of the worker before this one still serves
        known = {each.shelf.segment: each for each in self._shelves if each.browser is browser}
        for shelf in shelves:
            if shelf.segment in known:
                known[shelf.segment].shelf = shelf
            else:
                known[shelf.segment] = _OpenShelf(shelf, browser)
                self._shelves.append(known[shelf.segment])
        kept = [known[shelf.segment] for shelf in shelves]
        gone = [each for each in self._shelves if each not in kept]
        self._shelves = kept
        for each in gone:
            each.close()

    def _leave(self) -> None:
        if self._browser is not None:
            self._browser.close()
            self._browser = None
