"""A worker that waits for files before it writes, takes more memory, or uploads: ``held_worker.py GATE COUNT JSON``.

The worker waits for ``GATE.write``, ``GATE.take`` and ``GATE.upload``. While it waits, ``GATE.write.reached`` (and so
on) exists.

The first COUNT requests for more memory succeed, but only once another request waits. Later requests wait for
``GATE.take``, and fail. The worker then makes ``GATE.taken``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.link import segment_store
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.storage import uploader
from asyncckpt.worker import __main__ as worker
from asyncckpt.worker import saves
from asyncckpt.worker.attempt import begin_attempt

_GATE, _given = sys.argv[1], int(sys.argv[2])


def _wait(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        open(f"{_GATE}.{name}.reached", "w").close()
    deadline = time.monotonic() + 120
    # The folder of a passed test is removed, while a worker may still have files to upload.
    while os.path.isdir(os.path.dirname(_GATE)) and not os.path.exists(f"{_GATE}.{name}"):
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)


def _held(name: str, real: Any) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        _wait(name)
        return real(*args, **options)

    return call


_take_memory, _take = segment_store.take_memory, SegmentStore.take


def _take_some(segment: Any, wait_released: Any = lambda: False, end: int | None = None, begin: int = 0) -> None:
    global _given
    if begin:
        _given -= 1
        if _given < 0:
            _wait("take")  # like a worker that waits for the host's lock while other workers take memory
            raise OutOfMemoryError("there is too little (as the test wants)")
        _wait("take.reached")
    _take_memory(segment, wait_released, end, begin)


def _take_and_say(*args: Any) -> None:
    try:
        _take(*args)
    finally:
        if _given < 0:
            open(f"{_GATE}.taken", "w").close()


if __name__ == "__main__":
    for owner, name, replacement in (
        (segment_store, "take_memory", _take_some),
        (SegmentStore, "take", _take_and_say),
        (saves, "begin_attempt", _held("write", begin_attempt)),
        (uploader, "copy_checkpoint", _held("upload", uploader.copy_checkpoint)),
    ):
        setattr(owner, name, replacement)
    sys.exit(worker.main(sys.argv[3:]))
