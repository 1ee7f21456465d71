"""Read the files of an image that a worker holds: map the image on this host, or fetch it from another host."""

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
    """The files of an image, as if they were in storage. The caller has to close this object."""

    def __init__(self, held: HeldImage) -> None:
        self.held = held
        # Each index is parsed once, and kept while a file uses it.
        self._indexes: WeakValueDictionary[int, Index] = WeakValueDictionary()
        self.is_damaged = self.is_gone = False
        """Set by reads: the bytes differ from the staged bytes; the worker does not answer any more."""

    def metadata(self) -> bytes:
        """Return DCP's ``.metadata`` of the checkpoint. Only the image of the first rank has it.

        Raises ``DamagedCheckpointError``, ``CheckpointNotFoundError``.
        """
        return self._constant(dict(self.held.layout.metadata)[""])

    def has(self, name: str) -> bool:
        """Return whether one of the data files has that name."""
        return any(each.name(self.held.request.rank) == name for each in self.held.layout.data_files())

    def file(self, number: int) -> ChecksummedFile:
        """Return the data file of that ``number``. Raises as ``metadata``."""
        held, layout = self.held, self.held.layout
        each = layout.data_files()[number]
        path = os.path.join(held.request.path, each.name(held.request.rank))
        if (index := self._indexes.get(number)) is None:
            files = layout.spanned_files()
            first = sum(file.checksums for file in files[: files.index(each)])
            checksums = array("Q", held.checksums)[first : first + each.checksums]
            self._constant(each.spans)
            index = Index.parse(self._constant(each.index_head) + Index.tail(each.length, checksums), path)
            self._indexes[number] = index
        return self._data_file(path, index, layout.data(held.request.slot, each))

    def large_file(self, name: str, index: Index) -> ChecksummedFile | None:
        """Return a large file of a set of files; None: the image has no such file. ``index``: the committed index."""
        request, layout = self.held.request, self.held.layout
        for each in layout.files:
            if each.name(request.rank) == name:
                return self._data_file(os.path.join(request.path, name), index, layout.data(request.slot, each))
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the image."""

    @abstractmethod
    def _bytes(self, region: Region) -> bytes:
        """Return bytes of the segment of the image."""

    @abstractmethod
    def _data_file(self, path: str, index: Index, data: Region) -> ChecksummedFile: ...

    def _constant(self, region: Region) -> bytes:
        """Return bytes that are the same in all images of the segment, after comparing their checksum.

        The trainer could write to these bytes until it died, and a stray write may have been the cause of its death.
        """
        held = self.held
        found = self._bytes(region)
        if checksum(memoryview(found)) != held.constants[held.layout.constants().index(region)]:
            self.is_damaged = True
            raise DamagedCheckpointError(
                "the image in memory is damaged", path=held.request.path, step=held.request.step
            )
        return found


class MappedImage(ImageFiles):
    """An image in a segment that is mapped in this process. The image must not change until this is closed."""

    def __init__(self, held: HeldImage, segment: Segment, lease: Descriptor, *, owns: bool = True) -> None:
        """Map the image. ``lease`` prevents reuse of the slot.

        ``close`` closes ``lease``, and also ``segment`` if ``owns``.
        """
        super().__init__(held)
        self._segment, self._closing = segment, ExitStack()
        if owns:
            self._closing.callback(segment.close)
        self._closing.enter_context(lease)
        # The array keeps the mapping alive if another owner closes the segment. It also gives the address, which a
        # read-only view does not.
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
    """A data file of a mapped image."""

    def __init__(self, path: str, index: Index, image: MappedImage, data: memoryview) -> None:
        super().__init__(path, index, data)
        self._image = image

    def _damage(self, span: int) -> DamagedCheckpointError:
        self._image.is_damaged = True
        return super()._damage(span)


class FetchedImage(ImageFiles):
    """An image that is fetched from the worker that holds it."""

    def __init__(self, image: RemoteImage[HeldImage]) -> None:
        super().__init__(image.described)
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
                f"the worker with this image is not reachable any more: {error}", path=self.held.request.path
            ) from error

    def _bytes(self, region: Region) -> bytes:
        found = bytearray(region.nbytes)
        self.fetch(region.offset, memoryview(found))
        return bytes(found)

    def _data_file(self, path: str, index: Index, data: Region) -> ChecksummedFile:
        return _FetchedFile(path, index, self, data.offset)


class _FetchedFile(ChecksummedFile):
    """A data file of a fetched image. Bytes go straight to their destination, except at the edges of a destination."""

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
    """The ``images`` that the worker of this rank's previous trainer holds, in ``segments`` that are mapped here.

    This object does not close the segments.
    """

    segments: Mapping[int, Segment]
    images: Sequence[HeldImage]

    def is_closed(self) -> bool:
        """Return whether any of the segments is closed."""
        return any(segment.closed for segment in self.segments.values())

    def without(self, keys: Collection[ImageKey]) -> HeldImages:
        """Return all images except the images with these ``keys``."""
        kept = [each for each in self.images if ImageKey(each.request.attempt, each.request.rank) not in keys]
        return HeldImages(self.segments, kept)

    def files(self, held: HeldImage) -> MappedImage | None:
        """Return the files of an image, which the caller has to close. The image does not change until then.

        Returns None if another trainer has taken the slot, or if another thread is closing the memory.
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
