"""Host memory for the parameters that are off their device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from asyncckpt.shm import budget
from asyncckpt.shm.segment import PAGE, Segment, round_up
from asyncckpt.staging.devices import kind_of
from asyncckpt.staging.pinned import PinnedMemory

_ALIGNMENT = 64


class HostMemory:
    """A place for each of some tensors' bytes, in one piece of memory, which is given back with this object.

    It is not torch's pinned memory, because that is rounded up to the next power of two: 33 GiB would take 64.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | None) -> None:
        """Take memory for these numbers of bytes (none of them 0), pinned if ``device`` is one of CUDA.

        Raises ``OutOfMemoryError``.
        """
        self.sizes = list(sizes)
        offsets: list[int] = []
        end = 0
        for nbytes in sizes:
            offsets.append(round_up(end, PAGE if nbytes >= PAGE else _ALIGNMENT))
            end = offsets[-1] + nbytes
        budget.require(end, "offloading parameters", "leave them on the device, or have other things give memory back")
        segment = Segment.create("asyncckpt-offload", max(end, PAGE))
        try:
            segment.touch()
            cuts = [offset for offset, nbytes in zip(offsets, sizes, strict=True) if nbytes >= PAGE]
            pinned = PinnedMemory(segment, cuts, device) if device is not None and kind_of(device) is not None else None
        except BaseException:
            segment.close()
            raise
        self._give_back = weakref.finalize(self, _give_back, pinned, segment)
        self._give_back.atexit = False  # the process ends, and the driver may be gone already
        self.places = [
            torch.frombuffer(segment.view[offset : offset + nbytes], dtype=torch.uint8)
            for offset, nbytes in zip(offsets, sizes, strict=True)
        ]
        """As bytes, in the order of the sizes."""


def _give_back(pinned: PinnedMemory | None, segment: Segment) -> None:
    if pinned is not None:
        pinned.close()
    segment.close()
