"""Memory that was a staging buffer's, until another is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.shm.segment import Segment
from asyncckpt.worker.held_image import HeldImage
from asyncckpt.worker.segment_layout import CheckpointLayout, FileSetLayout, TorchFileLayout


@dataclass
class DetachedBuffer:
    """Memory whose worker is gone: a segment, what its bytes are, and the images that are still held in it.

    ``number`` is that of the segment in the worker that has adopted it; 0: none has. It stays ``pinned``: to tell a
    driver of it again takes 0.1 s a GB. ``is_free``: nobody needs what is in it; else ``is_filled`` says whether what
    slots share is in it.
    """

    segment: Segment
    layout: CheckpointLayout | FileSetLayout | TorchFileLayout
    held: tuple[HeldImage, ...] = ()
    number: int = 0
    pinned: PinnedMemory | None = None
    is_free: bool = False
    is_filled: bool = False

    @property
    def has_shared_part(self) -> bool:
        """Whether what slots share is in it."""
        return self.is_filled or bool(self.held)

    def close(self) -> None:
        """Let go of the memory. Safe to call twice."""
        self.is_free = False  # first: an exception may come in between
        if self.pinned is not None:
            self.pinned.close()
        self.segment.close()
