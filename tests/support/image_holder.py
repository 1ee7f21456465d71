"""A process that holds an image, and serves it to those who know the key: one that can be stopped, and killed."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncckpt.shm.segment import PAGE
from asyncckpt.shm.slots import State
from asyncckpt.worker.held_image import COPY_SLOTS, ImageKey
from asyncckpt.worker.manifest import checksum
from asyncckpt.worker.segment_layout import CheckpointLayout, DataFile, Region
from asyncckpt.worker.segment_store import SegmentStore
from asyncckpt.worker.transfer.server import TransferServer
from asyncckpt.worker.transfer.transport import TransferAddress
from asyncckpt.worker.write_request import WriteRequest

KEY = b"the key of the job"
IMAGE = ImageKey("attempt", 0)
SPAN_BYTES = 1 << 20


def image_bytes(nbytes: int) -> bytes:
    """What is in the image, the same in every process."""
    page = bytes((7 * number + number // 256) % 256 for number in range(PAGE))
    numbers = array("Q", range(nbytes // PAGE))
    data = bytearray(page * len(numbers))
    for number, word in enumerate(numbers):
        data[number * PAGE : number * PAGE + 8] = word.to_bytes(8, "little")
    return bytes(data)


def copy_bytes(nbytes: int) -> int:
    """How large a segment is that copies of such an image are kept in."""
    return _begin(nbytes) + COPY_SLOTS * nbytes


def _begin(nbytes: int) -> int:
    """Where the slot begins."""
    bounds = nbytes // min(SPAN_BYTES, nbytes) + 1
    return PAGE * (2 + -(-bounds * 8 // PAGE))


def hold(store: SegmentStore, nbytes: int) -> int:
    """Have ``store`` hold an image of ``nbytes`` (whole pages), in slot 0 of a segment whose number is returned."""
    bounds = array("Q", range(0, nbytes + 1, min(SPAN_BYTES, nbytes)))
    constants = PAGE, PAGE + PAGE
    begin = _begin(nbytes)
    number, segment = store.allocate(begin + nbytes)
    words = memoryview(bounds).cast("B")
    segment.view[constants[0] : constants[0] + 8] = b"metadata"
    segment.view[constants[1] : constants[1] + len(words)] = words
    segment.view[begin:] = image_bytes(nbytes)
    spans = Region(constants[1], len(words))
    file = DataFile(0, nbytes, Region(constants[0] + 4, 4), nbytes, spans, number=0, prefix="")
    layout = CheckpointLayout((file,), nbytes, (begin,), Region(constants[0], 8))
    hosted = store.hosted(number)
    hosted.describe(layout)
    hosted.slots.take(0, 1)
    hosted.slots.set(0, State.STAGED)
    path = "/nowhere/step-5"
    store.image_staged(WriteRequest(1, number, 0, path, IMAGE.attempt, 5, IMAGE.rank, 1, "refuse", None, False, 60.0))
    return number


@dataclass
class ImageHolder:
    """Where it serves, and the process."""

    address: TransferAddress
    process: subprocess.Popen[str]


@contextmanager
def image_holder(nbytes: int) -> Iterator[ImageHolder]:
    """A process that holds an image of so many bytes, until this ends."""
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
    """What that process does."""
    store = SegmentStore()
    hold(store, nbytes)
    server = TransferServer(store, (KEY,), "127.0.0.1")
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    sys.stdin.read()


def checksums_of(nbytes: int) -> list[int]:
    """Those of the spans of the image."""
    data = memoryview(image_bytes(nbytes))
    return [checksum(data[at : at + SPAN_BYTES]) for at in range(0, nbytes, SPAN_BYTES)]
