"""Staging memory that the CUDA driver knows as pinned, so that devices copy into it directly."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch

from asyncckpt.shm.segment import PAGE, Segment

logger = logging.getLogger(__name__)

# One registration of 512 GiB and more fails on some drivers.
_PIECE_BYTES = 64 << 30
_PORTABLE = 1  # pinned for every device, not only the current one
_CUDA_SUCCESS, _CUDA_ALREADY_REGISTERED = 0, 712


class PinnedMemory:
    """A segment made known to the CUDA driver, in pieces that no tensor crosses: a copy into two of them is refused.

    What cannot be registered is copied through the driver's own buffers, slower but right; that is logged.
    """

    def __init__(self, segment: Segment, cuts: Sequence[int]) -> None:
        """Register ``segment``; ``cuts`` are the page offsets between which a piece may end."""
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._registered: list[int] = []
        base = segment.address
        begin = 0
        for end in _pieces(cuts, segment.nbytes):
            code = int(self._runtime.cudaHostRegister(base + begin, end - begin, _PORTABLE))
            if code == _CUDA_SUCCESS:
                self._registered.append(base + begin)
            elif code != _CUDA_ALREADY_REGISTERED:
                _clear_cuda_error()
                logger.warning("pinning %d bytes of staging memory failed with CUDA error %d", end - begin, code)
            begin = end

    def close(self) -> None:
        """Take the registrations back; before the segment is unmapped."""
        for address in self._registered:
            self._runtime.cudaHostUnregister(address)
        self._registered.clear()


def _clear_cuda_error() -> None:
    """Forget the runtime's last error, which would else be raised by the next, innocent kernel launch."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()
    except (OSError, AttributeError):
        pass  # linked in some other way: the launch will say so


def _pieces(cuts: Sequence[int], nbytes: int) -> list[int]:
    """Ends of pieces of at most ``_PIECE_BYTES`` where ``cuts`` allow, in whole pages, up to ``nbytes``."""
    ends: list[int] = []
    begin = last = 0
    for cut in [*sorted(cut // PAGE * PAGE for cut in cuts), nbytes]:
        if cut - begin > _PIECE_BYTES and last > begin:
            ends.append(last)
            begin = last
        last = cut
    return [*ends, nbytes]
