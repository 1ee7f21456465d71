"""Joint files: those that several ranks write together, each its part. A part is what stands in the file at *extents*.

In an image a part stands in one piece, in the order of its file. The way back is the same: a reader sees a part in one
piece, whose index is like that of any file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.shm.huge import own_buffer
from asyncckpt.shm.memcpy import address_of, memcpy
from asyncckpt.shm.segment import PAGE, round_up
from asyncckpt.worker.extent import Extent, Extents
from asyncckpt.worker.storage.storage import InputFile, OutputFile

# Written past the page cache from that size on; the rest is too little, or not whole pages.
_DIRECT_BYTES = 64 << 10
_BUFFER_BYTES = 4 << 20
# Of a file, what is read at once to pick runs from.
_WINDOW_BYTES = 1 << 20


class JointOutput(OutputFile):
    """A part, to be written as if it stood alone; what is between its extents goes nowhere.

    Whole pages go past the page cache. The rest of each run goes through it, and last: for each of these few bytes the
    kernel would have all other writes to the file wait, those of other ranks, too (measured: half as long again).
    """

    direct = False

    def __init__(self, create: Callable[[bool], OutputFile], extents: Sequence[Extent]) -> None:
        """Open the file, twice.

        Args:
            create: Opens it; whether past the page cache, as far as that is possible.
            extents: Where the part stands, in its order.
        """
        self._extents = Extents(extents)
        self._edges: list[tuple[int, memoryview]] = []
        # Of many small writes each would wait for the interpreter that the other thread has.
        self._one_thread = threading.Lock()
        self._cached = create(False)
        try:
            self._direct = create(True)
        except BaseException:
            self._cached.close()
            raise
        self.path = self._cached.path

    def write(self, data: memoryview, offset: int) -> None:
        for extent in self._extents.between(offset, offset + len(data)):
            its = data[extent.at - offset :][: extent.nbytes]
            if extent.run_bytes >= _DIRECT_BYTES and self._direct.direct:
                for number, at in enumerate(range(0, extent.nbytes, extent.run_bytes)):
                    self._write_run(its[at : at + extent.run_bytes], extent.begin + number * extent.stride)
            elif extent.runs == 1 and extent.nbytes < _DIRECT_BYTES:
                self._edges.append((extent.begin, its))
            else:
                with self._one_thread:
                    self._cached.write_runs(its, extent.begin, extent.run_bytes, extent.stride)

    def _write_run(self, data: memoryview, begin: int) -> None:
        """Write the whole pages of it, which no other rank writes, too."""
        first, last = round_up(begin), (begin + len(data)) // PAGE * PAGE
        buffer = own_buffer(_BUFFER_BYTES)
        for at in range(first, last, _BUFFER_BYTES):
            nbytes = min(_BUFFER_BYTES, last - at)
            memcpy(address_of(buffer), address_of(data[at - begin :]), nbytes)
            self._direct.write(buffer[:nbytes], at)
        edges = (begin, data[: first - begin]), (last, data[last - begin :])
        self._edges += [each for each in edges if each[1]]

    def truncate(self, nbytes: int) -> None:
        """A joint file has its size from the start."""

    def sync(self) -> None:
        for begin, data in sorted(self._edges, key=itemgetter(0)):
            self._cached.write(data, begin)
        self._cached.sync()  # for both: it is one file

    def close(self) -> None:
        try:
            self._direct.close()
        finally:
            self._cached.close()


class JointInput:
    """A part, to be read as if it stood alone; what is between its extents reads as zeros."""

    def __init__(self, file: InputFile, extents: Sequence[Extent]) -> None:
        """``file``: the whole file. ``extents``: where the part stands, in its order."""
        self.file = file
        self._extents = Extents(extents)

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes from ``begin`` to ``end`` of the part; good until this thread reads again.

        Raises ``DamagedCheckpointError`` where the file is too short, ``StorageError``.
        """
        buffer = own_buffer(round_up(end - begin) + _WINDOW_BYTES + 2 * PAGE)
        out, window = buffer[: end - begin], buffer[round_up(end - begin) :]
        done = begin
        for extent in self._extents.between(begin, end):
            out[done - begin : extent.at - begin] = bytes(extent.at - done)
            self._gather(extent, out[extent.at - begin :], window)
            done = extent.at + extent.nbytes
        out[done - begin :] = bytes(end - done)
        return out

    def _gather(self, extent: Extent, out: memoryview, window: memoryview) -> None:
        """Fill ``out`` with the runs of ``extent``, of which ``window`` takes as many at once as it has space for."""
        run, stride = extent.run_bytes, extent.stride
        at_once = 1 if run > _WINDOW_BYTES else max(1, (_WINDOW_BYTES - run) // stride + 1)
        for number in range(0, extent.runs, at_once):
            count = min(at_once, extent.runs - number)
            begin, to = extent.begin + number * stride, number * run
            if count == 1:
                for at in range(0, run, _WINDOW_BYTES):
                    nbytes = min(_WINDOW_BYTES, run - at)
                    out[to + at : to + at + nbytes] = self._read(begin + at, nbytes, window)
                continue
            found = self._read(begin, (count - 1) * stride + run, window)
            for at in range(0, count * stride, stride):
                out[to : to + run] = found[at : at + run]
                to += run

    def _read(self, begin: int, nbytes: int, window: memoryview) -> memoryview:
        aligned = begin // PAGE * PAGE
        view = window[: round_up(begin + nbytes) - aligned]
        found = view[: self.file.read([view], aligned)][begin - aligned : begin - aligned + nbytes]
        if len(found) < nbytes:
            raise DamagedCheckpointError("the file is damaged: it is shorter than it was written", path=self.file.path)
        return found
