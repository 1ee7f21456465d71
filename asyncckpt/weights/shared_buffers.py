"""Buffers that the receivers on the source's host map: what the source fills there, they need not be sent."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.weights.buckets import Buffers, buffer_bytes

_TOKEN_BYTES = 16
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)


def host_identity() -> str:
    """The same for two processes if, and only if, they run under one kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SharedBuffers(Buffers):
    """The source's end: a page with a token, by which a receiver knows that it has found the right memory, and the two
    buffers."""

    def __init__(self, bucket_bytes: int) -> None:
        nbytes = buffer_bytes(bucket_bytes)
        self._segment = Segment.create("asyncckpt-weights", PAGE + 2 * nbytes)
        try:
            self._segment.touch()
        except BaseException:
            self._segment.close()
            raise
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._segment.view[:_TOKEN_BYTES] = self._token
        whole = torch.frombuffer(self._segment.view, dtype=torch.uint8)
        super().__init__([whole[PAGE + turn * nbytes :][:nbytes] for turn in range(2)])

    def offer(self) -> dict[str, Any]:
        """What a receiver has to know."""
        return {"pid": os.getpid(), "fd": self._segment.fileno(), "token": self._token.hex()}

    def close(self) -> None:
        """Give it back; a receiver's mapping lasts."""
        self.pair = []
        self._segment.close()


def attach(offer: Mapping[str, Any], bucket_bytes: int) -> Buffers | None:
    """A receiver's end; None if it cannot have it: another user's, or a process id that means another process here.

    The tensors are read-only memory: writing into one ends the process.
    """
    nbytes = buffer_bytes(bucket_bytes)
    try:
        # Another process may have anything by that number: a pipe without a writer, say, to wait for.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", flags)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != PAGE + 2 * nbytes:
            return None
        mapping = mmap.mmap(fd, PAGE + 2 * nbytes, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    if mapping[:_TOKEN_BYTES].hex() != offer["token"]:
        mapping.close()
        return None
    return Buffers([_readable(mapping, PAGE + turn * nbytes, nbytes) for turn in range(2)])


def _readable(mapping: mmap.mmap, begin: int, nbytes: int) -> torch.Tensor:
    """Some of it as a tensor, which keeps the mapping; torch only warns of memory that it may not write to."""
    address = np.frombuffer(mapping, np.uint8).ctypes.data + begin
    # The pages are there: have them in this process's table, too, before somebody waits for that.
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.keep = mapping  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)
