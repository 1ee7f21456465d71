"""A process that holds an image, and serves it to clients with the key. A test can stop and kill the process."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncckpt.format.segment_layout import DataFile, ImageLayout, Region
from asyncckpt.format.write_request import COPY_SLOTS, ImageKey, WriteRequest
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import State
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.server import TransferServer
from support.checkpoints import PAGE, checksum

KEY = b"the key of the job"
IMAGE = ImageKey("attempt", 0)
SPAN_BYTES = 1 << 20


def image_bytes(nbytes: int) -> bytes:
    """Return the bytes of the image. They are the same in every process."""
    page = bytes((7 * number + number // 256) % 256 for number in range(PAGE))
    numbers = array("Q", range(nbytes // PAGE))
    data = bytearray(page * len(numbers))
    for number, word in enumerate(numbers):
        data[number * PAGE : number * PAGE + 8] = word.to_bytes(8, "little")
    return bytes(data)


def copy_bytes(nbytes: int) -> int:
    """Return the size of a segment for copies of an image of ``nbytes``."""
    return _begin(nbytes) + COPY_SLOTS * nbytes


def _begin(nbytes: int) -> int:
    """Return the offset of the first slot."""
    bounds = nbytes // min(SPAN_BYTES, nbytes) + 1
    return PAGE * (2 + -(-bounds * 8 // PAGE))


def lay_out(store: SegmentStore, nbytes: int, slots: int) -> int:
    """Allocate a segment with equal images of ``nbytes`` (whole pages) in its slots. Return its number."""
    bounds = array("Q", range(0, nbytes + 1, min(SPAN_BYTES, nbytes)))
    constants = PAGE, PAGE + PAGE
    begins = tuple(_begin(nbytes) + slot * nbytes for slot in range(slots))
    number, segment = store.allocate(begins[-1] + nbytes)
    words = memoryview(bounds).cast("B")
    segment.view[constants[0] : constants[0] + 8] = b"metadata"
    segment.view[constants[1] : constants[1] + len(words)] = words
    for begin in begins:
        segment.view[begin : begin + nbytes] = image_bytes(nbytes)
    spans = Region(constants[1], len(words))
    file = DataFile(0, nbytes, Region(constants[0] + 4, 4), nbytes, spans, number=0, prefix="")
    store.hosted(number).describe(ImageLayout((file,), nbytes, begins, (("", Region(constants[0], 8)),), is_held=True))
    return number


def stage(store: SegmentStore, number: int, slot: int, save_id: int, key: ImageKey) -> WriteRequest:
    """Mark a slot as staged, as a trainer does. Return the request of the save."""
    table = store.hosted(number).slots
    table.take(slot, save_id)
    table.set(slot, State.STAGED)
    path = f"/nowhere/step-{save_id}"
    request = WriteRequest(save_id, number, slot, path, key.attempt, 5, key.rank, 2, "refuse", None, False, 60.0)
    store.slot_taken(request)
    store.image_staged(request)
    return request


def hold(store: SegmentStore, nbytes: int) -> int:
    """Put ``IMAGE``, of ``nbytes``, into slot 0 of a new segment of ``store``. Return the number of the segment."""
    number = lay_out(store, nbytes, 1)
    stage(store, number, 0, 1, IMAGE)
    return number


@dataclass
class ImageHolder:
    """The process, and the address of its server."""

    address: TransferAddress
    process: subprocess.Popen[str]


@contextmanager
def image_holder(nbytes: int) -> Iterator[ImageHolder]:
    """Run a process that holds an image of ``nbytes``. Kill the process at the end."""
    command = [sys.executable, "-c", "import sys; from support.image_holder import serve; serve(int(sys.argv[1]))"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, str(nbytes)], stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield ImageHolder(TransferAddress("127.0.0.1", port), process)
        finally:
            process.kill()


def serve(nbytes: int) -> None:
    """Hold an image and serve it until standard input ends. The process runs this."""
    store = SegmentStore()
    hold(store, nbytes)
    server = TransferServer(store, (KEY,), "127.0.0.1")
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    sys.stdin.read()


def checksums_of(nbytes: int) -> list[int]:
    """Return the checksums of the spans of the image."""
    data = memoryview(image_bytes(nbytes))
    return [checksum(data[at : at + SPAN_BYTES]) for at in range(0, nbytes, SPAN_BYTES)]
