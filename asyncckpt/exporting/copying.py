"""Write a planned output file batch by batch, on a few threads, with limited memory.

One thread carries out a batch. The thread *fills* the batch (reads, checks and converts the bytes). Then the batch
waits for its *turn*, in the order of the file. In the turn the thread computes the checksums of the output. Then it
writes the batch. Other threads fill and write other batches meanwhile.

Writes are of whole blocks, past the page cache. The bytes of an incomplete last block are carried to the next batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate

import torch

from asyncckpt.errors import CheckpointError, OutOfMemoryError
from asyncckpt.exporting.batches import BATCH_BYTES, Batch, Conversion, FilePlan, Window, batches
from asyncckpt.exporting.stored import StoredState
from asyncckpt.loading.data_file import fetch
from asyncckpt.shm.huge import huge_buffer, own_buffer
from asyncckpt.shm.memcpy import address_of
from asyncckpt.shm.segment import IMAGE_PAGE, round_up
from asyncckpt.storage.storage import OutputFile
from asyncckpt.threads import Pool, without_gc

# Number of batches that are filled or written at once, so that some are read while others are written.
_THREADS = 6
# Maximum bytes of all batches in flight. The largest gathered tensor does not count, so that other batches are read
# while it is written.
_IN_FLIGHT_BYTES = 64 << 20
# The memory of a batch, in bytes. A batch may begin and end within a page of the image.
_BUFFER_BYTES = BATCH_BYTES + 2 * IMAGE_PAGE
# Maximum bytes of one write.
_WRITE_BYTES = BATCH_BYTES
_ALIGNMENT = 64


def write(
    plan: FilePlan,
    state: StoredState,
    output: OutputFile,
    readers: ThreadPoolExecutor,
    progress: Callable[[int], None],
) -> int:
    """Write a file, and make it durable.

    Args:
        plan: The output file.
        state: The state to read.
        output: The new file; the caller closes it.
        readers: The threads that read.
        progress: Called with the number of bytes written since the last call, on any thread.

    Returns:
        The length of the file, in bytes.

    Raises:
        DamagedCheckpointError, StorageError: Bytes are damaged, or storage refuses. The text names the tensors.
    """
    writing = _Writing(plan, state, output, readers, progress)
    writing.run()
    length = plan.length() if plan.length is not None else plan.nbytes
    output.truncate(length)
    output.sync()
    return length


class _Writing:
    @without_gc
    def __init__(
        self,
        plan: FilePlan,
        state: StoredState,
        output: OutputFile,
        readers: ThreadPoolExecutor,
        progress: Callable[[int], None],
    ) -> None:
        self._plan, self._state, self._output = plan, state, output
        self._readers, self._progress = readers, progress
        self._batches = list(batches(plan, state.files))
        largest = max(each.end - each.begin for each in self._batches)
        self._room = _IN_FLIGHT_BYTES + (largest if largest > 2 * BATCH_BYTES else 0)
        # Guards the next three attributes.
        self._changed = threading.Condition()
        self._turn = 0
        self._in_flight = 0
        self._failed = False
        # The next two attributes are used only by the batch in its turn.
        self._carried = b""
        self._constant = 0

    def run(self) -> None:
        """Write all batches. Raises the error of the first batch that fails."""
        with Pool(_THREADS, thread_name_prefix="asyncckpt-export") as pool:
            tasks = []
            try:
                for number, batch in enumerate(self._batches):
                    if not self._admit(batch):
                        break
                    tasks.append(pool.submit(self._carry_out, number, batch))
                for task in tasks:
                    task.result()
            except BaseException:  # even after an interrupt, the threads have to end before the files are closed
                self._give_up()
                raise

    def _admit(self, batch: Batch) -> bool:
        """Wait for the memory of a batch. Return False if another batch has failed.

        Batches are admitted in order, so that no batch waits for a turn that cannot come.
        """
        nbytes = batch.end - batch.begin
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._in_flight + nbytes <= self._room)
            self._in_flight += nbytes
            return not self._failed

    def _give_up(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _carry_out(self, number: int, batch: Batch) -> None:
        try:
            first = batch.begin // IMAGE_PAGE * IMAGE_PAGE
            nbytes = round_up(batch.end, IMAGE_PAGE) - first
            with self._about(batch):
                memory = huge_buffer(nbytes) if nbytes > _BUFFER_BYTES else own_buffer(_BUFFER_BYTES)
                window = Window(first, memory[:nbytes])
                self._fill(batch, window)
            with self._in_turn(number) as is_wanted:
                if not is_wanted:
                    return
                self._complete(batch, window)
                last = number == len(self._batches) - 1
                end = round_up(batch.end, IMAGE_PAGE) if last else batch.end // IMAGE_PAGE * IMAGE_PAGE
                self._carried = b"" if last else bytes(window[max(end, first) : batch.end])
            with self._about(batch):
                for at in range(first, end, _WRITE_BYTES):
                    self._output.write(window[at : min(at + _WRITE_BYTES, end)], at)
            self._progress(batch.end - batch.begin)
        except BaseException:
            self._give_up()
            raise
        finally:
            with self._changed:
                self._in_flight -= batch.end - batch.begin
                self._changed.notify_all()

    @contextmanager
    def _in_turn(self, number: int) -> Iterator[bool]:
        """Wait for the turn of a batch. Yield False if another batch has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._turn == number)
            is_wanted = not self._failed
        yield is_wanted
        with self._changed:
            self._turn += 1
            self._changed.notify_all()

    @contextmanager
    def _about(self, batch: Batch) -> Iterator[None]:
        """Name the tensors of the batch in an error."""
        try:
            yield
        except CheckpointError as error:
            raise type(error)(f"{error.message} (exporting {batch.what})", path=error.path) from error
        except (MemoryError, OSError) as error:
            raise OutOfMemoryError(f"{batch.end - batch.begin:,} bytes to gather {batch.what} in: {error}") from error

    def _complete(self, batch: Batch, window: Window) -> None:
        """Add the bytes around the tensors, and the carried bytes of the batch before. Call this only in the turn."""
        window[window.begin : window.begin + len(self._carried)] = self._carried
        constants = self._plan.constants
        while self._constant < len(constants) and constants[self._constant][0] < batch.end:
            at, data = constants[self._constant]
            begin, end = max(at, batch.begin), min(at + len(data), batch.end)
            window[begin:end] = memoryview(data)[begin - at : end - at]
            if at + len(data) > batch.end:  # the rest is for the next batch
                break
            self._constant += 1
        if self._plan.complete is not None:
            self._plan.complete(Window(batch.begin, window[batch.begin : batch.end]))

    def _fill(self, batch: Batch, window: Window) -> None:
        """Read the bytes of the tensors of a batch."""
        base = address_of(window.data) - window.begin if window.data else 0
        parts = ((move.file, move.begin, move.end, base + move.to) for move in batch.moves)
        fetch(self._state.files, parts, self._readers)
        some: list[Conversion] = []
        nbytes = 0
        for each in batch.conversions:
            size = round_up(each.end - each.begin, _ALIGNMENT)
            if some and nbytes + size > BATCH_BYTES:
                self._convert(some, nbytes, window)
                some, nbytes = [], 0
            some.append(each)
            nbytes += size
        if some:
            self._convert(some, nbytes, window)

    def _convert(self, conversions: Sequence[Conversion], nbytes: int, window: Window) -> None:
        """Read elements, ``nbytes`` in total, and copy them, converted, to their places."""
        scratch = _scratch(nbytes)
        base = address_of(scratch)
        begins = list(accumulate((round_up(each.end - each.begin, _ALIGNMENT) for each in conversions), initial=0))
        parts = ((each.file, each.begin, each.end, base + at) for each, at in zip(conversions, begins, strict=False))
        fetch(self._state.files, parts, self._readers)
        source, target = (torch.frombuffer(memory, dtype=torch.uint8) for memory in (scratch, window.data))
        with torch.no_grad():
            for each, at in zip(conversions, begins, strict=False):
                elements = source[at : at + each.end - each.begin].view(each.dtype)
                for copy in each.copies:
                    to = target[copy.to - window.begin :]
                    to = to[: len(to) // each.to_dtype.itemsize * each.to_dtype.itemsize].view(each.to_dtype)
                    to.as_strided(copy.shape, copy.to_strides, to.storage_offset()).copy_(
                        elements.as_strided(copy.shape, copy.strides, elements.storage_offset() + copy.first)
                    )


def _scratch(nbytes: int) -> memoryview:
    """Return memory for this thread to read into. The thread keeps a buffer of the usual size."""
    if nbytes > BATCH_BYTES:
        return huge_buffer(nbytes)
    memory: memoryview | None = getattr(_own, "scratch", None)
    if memory is None:
        memory = _own.scratch = huge_buffer(BATCH_BYTES)
    return memory[: max(nbytes, 1)]


_own = threading.local()
