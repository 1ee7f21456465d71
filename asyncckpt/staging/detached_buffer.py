"""Memory that was a staging buffer's, until another is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.format.held_image import HeldImage
from asyncckpt.format.segment_layout import CheckpointLayout, FileSetLayout, Region, TorchFileLayout
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.messages import Release
from asyncckpt.shm.segment import Segment

# What may be missing: so small a part.
_FEW = 64

Constants: TypeAlias = Sequence[tuple[Region, bytes | memoryview]]
"""What is the same in every save, each with where it stands in the segment."""


@dataclass
class DetachedBuffer:
    """Memory whose worker is gone: a segment, what its bytes are, and the images that are still held in it.

    ``number`` is that of the segment in the worker that has adopted it; 0: none has. It stays ``pinned``: to tell a
    driver of it again takes 0.1 s a GB. ``is_free``: nobody needs what is in it.
    """

    segment: Segment
    layout: CheckpointLayout | FileSetLayout | TorchFileLayout
    held: tuple[HeldImage, ...] = ()
    number: int = 0
    pinned: PinnedMemory | None = None
    is_free: bool = False

    def close(self) -> None:
        """Let go of the memory. Safe to call twice."""
        self.is_free = False  # first: an exception may come in between
        if self.pinned is not None:
            self.pinned.close()
        self.segment.close()


def fitting(
    detached: Sequence[DetachedBuffer],
    layout: CheckpointLayout | FileSetLayout | TorchFileLayout,
    constants: Constants,
    nbytes: int,
    least: int,
) -> DetachedBuffer | None:
    """Of what is ``detached``, that which was for the same plan, down to the last constant byte; or of which nothing is
    needed any more, if it is ``nbytes`` long and the memory of the first ``least`` is taken, or nearly.
    """
    for each in detached:
        if each.number == 0 or each.segment.closed:
            continue
        # The worker asks whether there is memory for more, and this would not: only some pages may be missing, as
        # another layout of the same tensors needs for its files.
        if each.is_free and each.segment.nbytes >= nbytes and each.segment.taken_bytes >= least - least // _FEW:
            return each
        view = each.segment.view
        same = each.layout == layout
        if same and all(view[region.offset : region.offset + region.nbytes] == data for region, data in constants):
            return each
    return None


def give_back(detached: list[DetachedBuffer], client: WorkerClient) -> None:
    """Give all that is ``detached`` back, which ``client`` has adopted."""
    while detached:
        unfit = detached[-1]  # taken from the list when it is gone, for an exception may come in between
        unfit.close()
        if unfit.number:
            client.tell(Release(unfit.number))
        detached.pop()
