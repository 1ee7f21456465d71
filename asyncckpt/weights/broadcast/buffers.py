"""Buffers: the two that buckets are filled in, or loaded from. Receivers on the source's host may map the source's."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncckpt.shm.huge import huge_buffer
from asyncckpt.shm.segment import PAGE, Segment, round_up
from asyncckpt.weights.lease import readable_memory

ALIGNMENT = 256
"""Bytes, of each tensor in a bucket, unless the bucket is where they lie anyway. Enough for every dtype and device."""

_TOKEN_BYTES = 16
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)


def buffer_bytes(bucket_bytes: int) -> int:
    """What a buffer needs for any bucket: it may begin with up to ``ALIGNMENT`` bytes of nothing."""
    return round_up(bucket_bytes + ALIGNMENT)


def host_identity() -> str:
    """The same for two processes if, and only if, they run under one kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Buffers:
    """Two buffers for buckets, of which one is filled, or loaded from, while the other is under way."""

    def __init__(self, pair: Sequence[torch.Tensor], segment: Segment | None = None) -> None:
        """``segment``: where they are, if receivers may map them; a token stands before them."""
        self.pair = pair
        self._segment = segment
        self._current = 0

    @classmethod
    def of_host(cls, bucket_bytes: int) -> Buffers:
        """In memory of this process alone."""
        nbytes = buffer_bytes(bucket_bytes)
        return cls([torch.frombuffer(huge_buffer(nbytes), dtype=torch.uint8) for _ in range(2)])

    @classmethod
    def shared(cls, bucket_bytes: int) -> Buffers:
        """In a segment, behind a page with a token, by which a receiver knows that it has found the right memory."""
        nbytes = buffer_bytes(bucket_bytes)
        segment = Segment.create("asyncckpt-weights", PAGE + 2 * nbytes, touch=True)
        segment.view[:_TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)
        whole = torch.frombuffer(segment.view, dtype=torch.uint8)
        return cls([whole[PAGE + number * nbytes :][:nbytes] for number in range(2)], segment)

    @classmethod
    def attach(cls, offer: Mapping[str, Any], bucket_bytes: int) -> Buffers | None:
        """Those of the source, as read-only memory: writing into it ends the process.

        None if this process cannot have them: another user's, or a process id that means another process here.
        """
        nbytes = buffer_bytes(bucket_bytes)
        try:
            # Another process may have anything by that number: a pipe without a writer, say, to wait for.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            segment = Segment.attach(os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", flags), writable=False)
        except (OSError, ValueError):
            return None
        with segment:  # what is mapped stays as long as the tensors
            if segment.nbytes != PAGE + 2 * nbytes or bytes(segment.view[:_TOKEN_BYTES]).hex() != offer["token"]:
                return None
            return cls([_populated(segment, PAGE + number * nbytes, nbytes) for number in range(2)])

    @property
    def are_shared(self) -> bool:
        """Whether receivers may map them."""
        return self._segment is not None

    def offer(self) -> dict[str, Any]:
        """What a receiver has to know to ``attach`` shared ones."""
        if self._segment is None:
            return {}
        token = bytes(self._segment.view[:_TOKEN_BYTES]).hex()
        return {"pid": os.getpid(), "fd": self._segment.fileno(), "token": token}

    def next(self) -> int:
        """The number of the one that comes next: they alternate."""
        self._current = 1 - self._current
        return self._current

    def close(self) -> None:
        """Give the memory back; a receiver's mapping lasts."""
        self.pair = []
        if self._segment is not None:
            self._segment.close()


def _populated(segment: Segment, begin: int, nbytes: int) -> torch.Tensor:
    memory = readable_memory(segment, begin, nbytes)
    # The pages are there: have them in this process's table, too, before somebody waits for that.
    _libc.madvise(ctypes.byref(memory), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ)
    return torch.frombuffer(memory, dtype=torch.uint8)
