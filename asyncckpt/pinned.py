"""Staging memory that the CUDA driver knows as pinned, so that devices copy into it directly."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

import torch

from asyncckpt.errors import CheckpointError
from asyncckpt.shm.segment import PAGE, Segment

logger = logging.getLogger(__name__)

# One registration of 512 GiB and more fails on some drivers. And while one is under way, the driver lets nobody else
# launch anything: in an overlapped first save, pieces of this size let the training through now and then.
_PIECE_BYTES = 4 << 30
_PORTABLE = 1  # pinned for every device, not only the current one
_SUCCESS, _ALREADY_REGISTERED = 0, 712


class PinnedMemory:
    """A segment made known to the CUDA driver, in pieces that no tensor crosses: a copy into two of them is refused.

    What cannot be registered is copied through the driver's own buffers, slower but right; that is logged.
    """

    def __init__(self, segment: Segment, cuts: Sequence[int], device: torch.device) -> None:
        """Register ``segment``; ``cuts`` are the page offsets between which a piece may end.

        ``device`` is any that this process uses: the calls are made in its context, and open no other.
        """
        self._device = device
        self._registered: list[int] = []
        base = segment.address
        begin = refused = 0
        started = time.perf_counter()
        with torch.cuda.device(device):
            try:
                for end in _pieces(cuts, segment.nbytes):
                    refused += 0 if self._register(base + begin, end - begin) else end - begin
                    begin = end
            except BaseException:
                self.close()
                raise
        if refused:
            logger.warning(
                "%d of %d bytes of staging memory are not pinned: copies are slower", refused, segment.nbytes
            )
        logger.info("pinned %d bytes in %.2f s", segment.nbytes - refused, time.perf_counter() - started)

    def close(self) -> None:
        """Take the registrations back; before the segment is unmapped."""
        with torch.cuda.device(self._device):
            while self._registered:
                code = _unregister(self._registered.pop())
                if code != _SUCCESS:  # of a device that is lost, as a rule; then all its calls fail
                    logger.warning("taking back pinned memory failed with CUDA error %d", code)

    def _register(self, address: int, nbytes: int) -> bool:
        code = _register(address, nbytes)
        if code == _ALREADY_REGISTERED:
            # Somebody unmapped memory that stood here, and did not tell the driver: what it knows is pages that are
            # no longer these, and a copy to here would end in those.
            _unregister(address)
            code = _register(address, nbytes)
        if code == _ALREADY_REGISTERED:
            raise CheckpointError(
                "the CUDA driver takes the staging memory for other memory, which was unmapped while it was pinned;"
                " copies would be lost, so nothing is saved: look for who pins memory and does not take that back"
            )
        if code != _SUCCESS:
            logger.warning("pinning %d bytes of staging memory failed with CUDA error %d", nbytes, code)
            return False
        self._registered.append(address)
        return True


def _register(address: int, nbytes: int) -> int:
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
    if code != _SUCCESS:
        _forget_error()
    return code


def _unregister(address: int) -> int:
    code = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    if code != _SUCCESS:
        _forget_error()
    return code


def _forget_error() -> None:
    """Take the runtime's last error, which this thread would else find after its next, innocent kernel launch.

    torch has no call for cudaGetLastError, but asks for it after each launch of its own, and raises what it finds. (An
    error that lasts, of a device that is lost, is found by the next call again.)
    """
    with contextlib.suppress(RuntimeError):
        torch.ones((), device="cuda")


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
