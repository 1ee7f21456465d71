"""Attempts at a checkpoint, without a worker around them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from asyncckpt.format.index import spans
from asyncckpt.format.segment_layout import DataFile, ImageLayout, Region
from asyncckpt.format.write_request import Existing, WriteRequest
from asyncckpt.shm.hosted_segment import HostedSegment
from asyncckpt.shm.segment import Segment
from asyncckpt.storage import storage_for
from asyncckpt.worker.attempt import Attempt, begin_attempt
from asyncckpt.worker.durable_files import DurableFiles
from asyncckpt.worker.staged_image import StagedImage
from support.checkpoints import PAGE


def checkpoint_attempt(
    tmp_path: Path, segment: Segment, existing: Existing = "refuse", small_files: tuple[tuple[str, bytes], ...] = ()
) -> Attempt:
    """Begin an attempt to write a hand-made image."""
    hosted = HostedSegment(segment)
    hosted.layout = checkpoint_image(segment)
    request = replace(request_for(tmp_path, existing), small_files=small_files)
    staged_image = StagedImage(request, hosted, lambda: True)
    staged_image.complete()
    return begin_attempt(storage_for(staged_image.request.path), staged_image, DurableFiles())


def request_for(tmp_path: Path, existing: Existing = "refuse") -> WriteRequest:
    """Return a request to save step 5 as save 1, in a job of one rank."""
    return WriteRequest(1, 1, 0, str(tmp_path / "root" / "final"), "attempt", 5, 0, 1, existing, None, False, 60.0)


def checkpoint_image(segment: Segment) -> ImageLayout:
    """Make an image of two pages, with constants before it. Return its layout."""
    bounds = spans([0, 100], 2 * PAGE)
    words = memoryview(bounds).cast("B")
    segment.view[PAGE : PAGE + 4] = b"meta"
    segment.view[PAGE + 64 : PAGE + 68] = b"head"
    segment.view[PAGE + 128 : PAGE + 128 + len(words)] = words
    segment.view[2 * PAGE : 4 * PAGE] = os.urandom(2 * PAGE)
    head, spans_ = Region(PAGE + 64, 4), Region(PAGE + 128, len(words))
    file = DataFile(0, 2 * PAGE, head, 2 * PAGE, spans_, number=0, prefix="")
    return ImageLayout((file,), 2 * PAGE, (2 * PAGE,), (("", Region(PAGE, 4)),), is_held=True)
