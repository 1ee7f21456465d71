"""A disk with a volatile write cache: one file, served over /dev/fuse, below a loop device.

A power cut loses writes that no flush has followed. The kernel sends a flush as FSYNC.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import select
import stat
import struct
from multiprocessing.connection import Connection
from typing import Literal

Cut = Literal["keep", "mix"]
"""The effect of a power cut on unflushed blocks: keep all, or choose for each block."""

_BLOCK, _SECTOR = 4096, 512
# Superblocks of ext4 and btrfs are written in place. File systems rely on disks to write such a block whole.
_NEVER_TORN = {0, (64 << 10) // _BLOCK, (64 << 20) // _BLOCK}

_MAX_WRITE = 1 << 20
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
# Requests, from linux/fuse.h.
_FORGET, _WRITE, _FSYNC, _READ, _INTERRUPT, _DESTROY, _BATCH_FORGET = 2, 16, 20, 15, 36, 38, 42
_libc = ctypes.CDLL(None, use_errno=True)


class CachedDisk:
    """The bytes of a disk, with every version of an unflushed block."""

    def __init__(self, path: str) -> None:
        """Open the image at ``path``."""
        with open(path, "r+b") as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            self._bytes = mmap.mmap(file.fileno(), self.nbytes)
        self._versions: dict[int, list[bytes]] = {}

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._bytes[offset : offset + nbytes]

    def write(self, offset: int, data: memoryview) -> None:
        blocks = range(offset // _BLOCK, (offset + len(data) - 1) // _BLOCK + 1)
        for block in blocks:
            if block not in self._versions:
                self._versions[block] = [self._block(block)]
        self._bytes[offset : offset + len(data)] = bytes(data)
        for block in blocks:
            self._versions[block].append(self._block(block))

    def flush(self) -> None:
        """Make all writes durable."""
        self._versions.clear()

    def cut(self, how: Cut, choice: random.Random) -> str:
        """Forget unflushed writes. Return the number of blocks that were kept, lost and torn."""
        kept = choice.choice((0.0, 0.5, 0.5, 0.9)) if how == "mix" else 1.0
        torn = choice.choice((0.0, 0.2)) if how == "mix" else 0.0
        counts = [0, 0, 0]
        for block, versions in self._versions.items():
            if choice.random() < kept:
                counts[0] += 1
                continue
            if choice.random() < torn and block not in _NEVER_TORN:
                sectors = (choice.choice(versions)[at : at + _SECTOR] for at in range(0, _BLOCK, _SECTOR))
                left = b"".join(sectors)
                counts[2] += 1
            else:
                left = choice.choice(versions[:-1])
                counts[1] += 1
            self._bytes[block * _BLOCK : (block + 1) * _BLOCK] = left
        self._versions.clear()
        return "{} blocks kept, {} lost, {} torn".format(*counts)

    def _block(self, block: int) -> bytes:
        return self._bytes[block * _BLOCK : (block + 1) * _BLOCK]


def serve(pipe: Connection, image: str, at: str) -> None:
    """Mount ``image`` as the one file ``at`` until it is unmounted.

    ``pipe`` takes ("cut", how, seed), ("cut at", request, how, seed) and ("power",). The second cuts the power just
    before the given write or flush, counted from now on. Each cut is reported at once as ("cut", description).
    """
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode={stat.S_IFREG:o},user_id=0,group_id=0"
    if _libc.mount(b"asyncckpt-torture", os.fsencode(at), b"fuse", 0, options.encode()):
        pipe.send(("failed", os.strerror(ctypes.get_errno())))
        return
    pipe.send(("mounted",))
    with contextlib.suppress(EOFError, BrokenPipeError):
        _Server(pipe, fd, CachedDisk(image)).run()
    os.close(fd)


class _Server:
    def __init__(self, pipe: Connection, fd: int, disk: CachedDisk) -> None:
        self._pipe = pipe
        self._fd = fd
        self._disk = disk
        self._has_power = True
        self._left = 0  # writes and flushes until the power is cut; 0: no cut is planned
        self._how: Cut = "keep"
        self._seed = 0

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._fd, self._pipe.fileno()], [], [])
            if self._pipe.fileno() in ready:
                self._obey(self._pipe.recv())
            elif not self._answer():
                return

    def _obey(self, command: tuple[str, ...]) -> None:
        match command:
            case ("cut", how, seed):
                self._how, self._seed = how, seed  # type: ignore[assignment]
                self._cut()
            case ("cut at", left, how, seed):
                self._left, self._how, self._seed = left, how, seed  # type: ignore[assignment]
            case ("power",):
                self._has_power, self._left = True, 0

    def _cut(self) -> None:
        if self._has_power:
            self._has_power, self._left = False, 0
            self._pipe.send(("cut", self._disk.cut(self._how, random.Random(self._seed))))

    def _answer(self) -> bool:
        """Answer one request. Return False after the file is unmounted."""
        try:
            request = memoryview(os.read(self._fd, _MAX_WRITE + 4096))
        except OSError as error:
            return error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT)
        _, code, unique = struct.unpack_from("<IIQ", request)
        if code in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return True
        failure, body = self._done(code, request[40:])
        with contextlib.suppress(FileNotFoundError):  # the request was interrupted
            os.write(self._fd, struct.pack("<IiQ", 16 + len(body), -failure, unique) + body)
        return bool(code != _DESTROY)

    def _done(self, code: int, body: memoryview) -> tuple[int, bytes]:
        """Carry out a request. Return an error number, or 0, and the answer."""
        if code in (_WRITE, _FSYNC) and self._left:
            self._left -= 1
            if not self._left:
                self._cut()
        if code in (_READ, _WRITE, _FSYNC) and not self._has_power:
            return errno.EIO, b""
        match code:
            case 26:  # INIT
                sizes = (16, 12, _MAX_WRITE, 1, _MAX_WRITE >> 12, 0, 0)
                return 0, struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 20, _BIG_WRITES | _MAX_PAGES, *sizes)
            case 3 | 4:  # GETATTR, SETATTR
                return 0, self._facts()
            case 14:  # OPEN
                return 0, bytes(16)
            case 15:  # READ
                _, offset, nbytes = struct.unpack_from("<QQI", body)
                return 0, self._disk.read(offset, nbytes)
            case 16:  # WRITE
                _, offset, nbytes = struct.unpack_from("<QQI", body)
                self._disk.write(offset, body[40 : 40 + nbytes])
                return 0, struct.pack("<II", nbytes, 0)
            case 17:  # STATFS
                return 0, bytes(80)
            case 20:  # FSYNC
                self._disk.flush()
                return 0, b""
            case 18 | 25 | 38:  # RELEASE, FLUSH, DESTROY
                return 0, b""
        return errno.ENOSYS, b""

    def _facts(self) -> bytes:
        size = self._disk.nbytes
        times = (0,) * 6  # three times and their nanoseconds
        return struct.pack(
            "<QII6Q10I", 3600, 0, 0, 1, size, size // _SECTOR, *times, stat.S_IFREG | 0o600, 1, 0, 0, 0, _BLOCK, 0
        )
