"""The files of one image that a worker holds, read where they are: mapped from this host, or fetched from another."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.format.index import Index
from asyncckpt.format.manifest import checksum
from asyncckpt.format.segment_layout import Region
from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.loading.data_file import RUN_BYTES, ChecksummedFile, FilePart, MemoryFile
from asyncckpt.shm.huge import own_buffer
from asyncckpt.shm.memcpy import Destinations, memory_at
from asyncckpt.shm.segment import Descriptor, Segment
from asyncckpt.shm.slots import Readers, SlotTable, State, lease

if TYPE_CHECKING:
    from asyncckpt.transfer.holder import RemoteImage


class ImageFiles(ABC):
    """The files of an image, as if they were in storage. To be closed."""

    def __init__(self, held: HeldImage) -> None:
        self.held = held
        self._indexes: WeakValueDictionary[int, Index] = WeakValueDictionary()  # parsed once, while somebody has them
        self.is_damaged = self.is_gone = False
        """What was found while it was read: bytes that are not those that were staged; that nobody answers any more."""

    def metadata(self) -> bytes:
        """DCP's ``.metadata`` of the checkpoint that it is a part of; only the first rank's image has it.

        Raises ``DamagedCheckpointError``, ``CheckpointNotFoundError``.
        """
        return self._constant(self.held.layout.metadata)

    def has(self, name: str) -> bool:
        """Whether one of its data files has that name."""
        return any(each.name(self.held.request.rank) == name for each in self.held.layout.data_files)

    def file(self, number: int) -> ChecksummedFile:
        """The data file of that ``number``. Raises as ``metadata``."""
        held, layout = self.held, self.held.layout
        each = layout.data_files[number]
        path = os.path.join(held.request.path, each.name(held.request.rank))
        if (index := self._indexes.get(number)) is None:
            first = sum(file.checksums for file in layout.data_files[:number])
            checksums = array("Q", held.checksums)[first : first + each.checksums]
            self._constant(each.spans)
            index = Index.parse(self._constant(each.index_head) + Index.tail(each.length, checksums), path)
            self._indexes[number] = index
        return self._data_file(path, index, layout.data(held.request.slot, each))

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    @abstractmethod
    def _bytes(self, region: Region) -> bytes:
        """Some bytes of the segment that it is in."""

    @abstractmethod
    def _data_file(self, path: str, index: Index, data: Region) -> ChecksummedFile: ...

    def _constant(self, region: Region) -> bytes:
        """What is the same in all images there, checked: the trainer could write there until it died, and may have died
        of writing where it should not.
        """
        held = self.held
        found = self._bytes(region)
        if checksum(memoryview(found)) != held.constants[held.layout.constants().index(region)]:
            self.is_damaged = True
            raise DamagedCheckpointError(
                "its image in memory is damaged", path=held.request.path, step=held.request.step
            )
        return found


class MappedImage(ImageFiles):
    """An image in a segment that is mapped here. It must not change until this is closed."""

    def __init__(self, held: HeldImage, segment: Segment, lease: Descriptor, *, owns: bool = True) -> None:
        """``lease``: what keeps it, closed with this; ``owns``: and so is ``segment``."""
        super().__init__(held)
        self._segment, self._closing = segment, ExitStack()
        if owns:
            self._closing.callback(segment.close)
        self._closing.enter_context(lease)
        # Kept, so that it stays mapped where another closes the segment. What is mapped to be read alone has a view
        # that nobody tells the address of.
        self._mapping: np.ndarray[Any, Any] | None = np.frombuffer(segment.view, np.uint8)
        self._address = self._mapping.ctypes.data

    def close(self) -> None:
        self._mapping = None
        self._closing.close()

    def _bytes(self, region: Region) -> bytes:
        return bytes(self._view(region))

    def _data_file(self, path: str, index: Index, data: Region) -> ChecksummedFile:
        return _MappedFile(path, index, self, self._view(data))

    def _view(self, region: Region) -> memoryview:
        return memory_at(self._address + region.offset, region.nbytes)


class _MappedFile(MemoryFile):
    """A data file of such an image."""

    def __init__(self, path: str, index: Index, image: MappedImage, data: memoryview) -> None:
        super().__init__(path, index, data)
        self._image = image

    def _damage(self, span: int) -> DamagedCheckpointError:
        self._image.is_damaged = True
        return super()._damage(span)


class FetchedImage(ImageFiles):
    """An image that is fetched from the worker that holds it."""

    def __init__(self, image: RemoteImage) -> None:
        super().__init__(image.held)
        self._image = image

    def close(self) -> None:
        self._image.close()

    def fetch(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on. Raises ``CheckpointNotFoundError``."""
        try:
            self._image.read(offset, into)
        except OSError as error:
            self.is_gone = True
            raise CheckpointNotFoundError(
                f"the worker that holds this can be read no more: {error}", path=self.held.request.path
            ) from error

    def _bytes(self, region: Region) -> bytes:
        found = bytearray(region.nbytes)
        self.fetch(region.offset, memoryview(found))
        return bytes(found)

    def _data_file(self, path: str, index: Index, data: Region) -> ChecksummedFile:
        return _FetchedFile(path, index, self, data.offset)


class _FetchedFile(ChecksummedFile):
    """A data file of such an image: it goes straight to where its bytes belong, but for the edges of what is there."""

    def __init__(self, path: str, index: Index, image: FetchedImage, offset: int) -> None:
        super().__init__(path, index)
        self._image, self._offset = image, offset

    def close(self) -> None:
        pass

    def _fetch(self, begin: int, end: int, destinations: Destinations) -> Iterator[FilePart]:
        to = destinations.only(begin, end)
        for at in range(begin, end, RUN_BYTES):
            stop = min(at + RUN_BYTES, end)
            is_inside = to is not None and to.begin <= at and stop <= to.end
            if to is not None and is_inside:
                into = memory_at(to.address + at - to.begin, stop - at)
            else:
                into = own_buffer(RUN_BYTES)[: stop - at]
            self._image.fetch(self._offset + at, into)
            yield FilePart(at, into, placed=is_inside)

    def _damage(self, span: int) -> DamagedCheckpointError:
        self._image.is_damaged = True
        return super()._damage(span)


@dataclass(frozen=True)
class HeldImages:
    """The ``images`` that the worker of the trainer before this one holds, in ``segments`` that are mapped here (and
    are not closed here).
    """

    segments: Mapping[int, Segment]
    images: Sequence[HeldImage]

    def is_closed(self) -> bool:
        """Whether some of it was given back meanwhile."""
        return any(segment.closed for segment in self.segments.values())

    def without(self, keys: Collection[ImageKey]) -> HeldImages:
        """All but these."""
        kept = [each for each in self.images if ImageKey(each.request.attempt, each.request.rank) not in keys]
        return HeldImages(self.segments, kept)

    def files(self, held: HeldImage) -> MappedImage | None:
        """The files of one of the images, to be closed, until when nobody writes there.

        None where another trainer has taken its slot, or a thread of this one is just closing the memory.
        """
        request, segment = held.request, self.segments[held.request.segment]
        with contextlib.suppress(OSError, ValueError), ExitStack() as undo:
            if (fd := lease(segment.fileno(), request.slot, Readers.OF_IMAGE)) is None:
                return None
            undo.enter_context(fd)
            with contextlib.closing(SlotTable(segment.view)) as slots:
                is_taken = slots.save_id(request.slot) != request.save_id or slots.state(request.slot) is State.STAGING
            if is_taken:
                return None
            files = MappedImage(held, segment, fd, owns=False)
            undo.pop_all()
            return files
        return None
