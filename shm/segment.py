"""Segments: anonymous memory files, mapped by the process that makes them and by those it hands them to.

Anonymous (``memfd_create``) and not named files in ``/dev/shm``: no 64 MB limit of a container, no bus error when
that is full, nothing left behind by a crash. The memory lives as long as any process maps it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from typing import Any

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.shm.memcpy import address_of


class Descriptor(io.FileIO):
    """A descriptor of memory or of a lock, until it is closed: ``Descriptor(fd)``. ``close`` is safe to call twice.

    No exception of a signal handler or of another thread comes in the midst of the making, because none is raised in
    what is written in C. So the making may not be written here.
    """

    @classmethod
    def of(cls, make: Callable[..., int], *given: Any) -> Descriptor:
        """The descriptor that ``make``, which is written in C, returns for what is ``given``.

        No such exception comes in between. Raises as ``make``.
        """
        return next(map(cls, map(make, *((each,) for each in given))))

    def close(self) -> None:
        """Close it, as the function ``close``."""
        with contextlib.suppress(OSError):
            super().close()

    def fileno(self) -> int:
        """Its number; -1: it is closed."""
        return -1 if self.closed else super().fileno()


def close(fd: int) -> None:
    """Close a descriptor that no file was written through. Whatever the kernel says, the descriptor is closed then."""
    with contextlib.suppress(OSError):
        os.close(fd)


PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20

# Not in Python's modules before 3.12/3.13; the values are the kernel's (linux/fcntl.h, asm-generic/mman-common.h).
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23

# Through ctypes, in chunks: mmap.madvise would hold Python's lock for all the seconds that fresh memory takes.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_TOUCH_BYTES = 64 << 20
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2
_BLOCK_BYTES = 512  # of ``st_blocks``


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """The smallest multiple of ``unit`` that holds ``nbytes``."""
    return -(-nbytes // unit) * unit


class Segment:
    """A mapped memory file: ``create`` is for its owner (the worker), ``attach`` for all others.

    ``view`` is the memory; ``slots.py`` says who may write where and when.
    """

    def __init__(self, file: Descriptor, nbytes: int, *, writable: bool = True) -> None:
        """Map a memory file; ``create`` and ``attach`` do.

        Args:
            file: The file, which the segment owns from here on.
            nbytes: Its size in bytes.
            writable: Whether the mapping may be written to.
        """
        self._file = file
        self.closed = True
        """``close`` was called."""
        self.nbytes = nbytes
        try:
            self.view = _mapped(file.fileno(), nbytes, writable=writable)
            self.closed = False
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, name: str, nbytes: int, *, touch: bool = False) -> Segment:
        """Make a memory file that nobody can shrink or grow.

        Args:
            name: What shows in ``/proc/PID/maps``.
            nbytes: Its size in bytes.
            touch: Take the memory now, as the method ``touch`` does; otherwise none is taken before it is written to.

        Returns:
            The segment, to be closed.

        Raises:
            OutOfMemoryError: The kernel refuses the memory, or the descriptor.
        """
        try:
            file = Descriptor.of(os.memfd_create, name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(file.fileno(), nbytes)
                # A file that shrinks under a mapping is a bus error in the process that touches it.
                fcntl.fcntl(file, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
                segment = cls(file, nbytes)
            except BaseException:
                file.close()
                raise
        except (MemoryError, OSError) as error:
            raise _out_of_memory(nbytes, refusal(error)) from error
        try:
            if touch:
                segment.touch()
        except BaseException:
            segment.close()
            raise
        return segment

    @classmethod
    def attach(cls, file: Descriptor, *, writable: bool = True) -> Segment:
        """Map a memory ``file``, which the segment owns from here on.

        A fork has no part in what may be written to, nor keeps its memory: that is of one trainer and its worker.
        Raises ``OutOfMemoryError`` if this process has no address space for it.
        """
        nbytes = os.fstat(file.fileno()).st_size
        try:
            segment = cls(file, nbytes, writable=writable)
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise
            raise _out_of_memory(nbytes, refusal(error)) from error
        if writable:
            _of_this_process.add(segment)
        return segment

    def fileno(self) -> int:
        """The descriptor, which can be sent to another process."""
        return self._file.fileno()

    @property
    def address(self) -> int:
        """The address in this process at which the mapping begins."""
        return address_of(self.view)

    def private_view(self) -> memoryview:
        """A mapping of its own that may be written to: what is written, a page at a time, is seen there alone, and goes
        with its last view.
        """
        return _mapped(self.fileno(), self.nbytes, writable=True, shared=False)

    def touch(self, end: int | None = None, begin: int = 0) -> None:
        """Take the memory from ``begin`` up to ``end`` (None: all) now: no later write has to wait for the kernel, or
        can fail.

        Raises ``OutOfMemoryError`` when the kernel cannot give it.
        """
        if self.closed:
            return
        address = self.address
        # Fewer, larger pages where the host gives them to shared memory (shmem_enabled: advise); a hint, else nothing.
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.nbytes), MADV_HUGEPAGE)
        end = self.nbytes if end is None else end
        for offset in range(begin, end, _TOUCH_BYTES):
            nbytes = min(_TOUCH_BYTES, end - offset)
            if _libc.madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(nbytes), MADV_POPULATE_WRITE) == 0:
                continue
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise _out_of_memory(self.nbytes, os.strerror(code))
            # Before Linux 5.14: one write a page does the same, slowly.
            for page in range(offset, offset + nbytes, PAGE):
                self.view[page] = self.view[page]

    def fill_zeros(self, begin: int, end: int) -> None:
        """Write zeros from byte ``begin`` up to ``end``."""
        ctypes.memset(self.address + begin, 0, end - begin)

    def protect(self) -> None:
        """From now on the mapping can only be read here: to write to it is a segmentation fault."""
        if _libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), mmap.PROT_READ) != 0:
            raise OSError(code := ctypes.get_errno(), os.strerror(code))

    @property
    def taken_bytes(self) -> int:
        """How much of the memory is taken, by whatever process."""
        return os.fstat(self.fileno()).st_blocks * _BLOCK_BYTES

    @property
    def is_taken(self) -> bool:
        """Whether all of it is."""
        return self.taken_bytes >= self.nbytes

    def give_back(self, begin: int = 0) -> None:
        """Give the memory from ``begin`` on back to the system: what was in it is gone, for all who have it mapped, and
        reads as zeros.

        It may be taken again by ``touch``. Raises ``OutOfMemoryError`` if the kernel refuses.
        """
        nbytes = round_up(self.nbytes) - begin
        if nbytes and _libc.fallocate(self.fileno(), _PUNCH_HOLE | _KEEP_SIZE, begin, nbytes) != 0:
            why = os.strerror(ctypes.get_errno())
            raise OutOfMemoryError(f"{nbytes:,} bytes of shared memory cannot be given back: {why}")

    def close(self) -> None:
        """Unmap, and close the descriptor. Safe to call twice, and after a half-finished ``__init__``.

        Where a tensor still points into the mapping, the mapping stays until the tensor is gone.
        """
        self._file.close()
        if not self.closed:
            with contextlib.suppress(BufferError):  # a view is left: the mapping goes when that does
                self.view.release()
            self.closed = True

    def leave_to_parent(self) -> None:
        """In a fork: let go of the memory, whoever still has a view of it. Nobody may look there any more."""
        if not self.closed:
            # Another mapping takes the place of this one, so that the addresses stay taken until all views are gone.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            _libc.mmap(self.address, self.nbytes, 0, flags, -1, 0)
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # whose owner was not closed; the mapping goes by itself
            self._file.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mapped(fd: int, nbytes: int, *, writable: bool, shared: bool = True) -> memoryview:
    """Map a file. It is unmapped with the last view of it, also where an exception comes before anybody has one.

    Python's ``mmap`` sees to that: it reserves the addresses, and the file takes its place there. It is not given the
    file, for it would have a descriptor of its own, which nobody can close in a fork. A large one begins where a huge
    page can.
    """
    unit = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
    view = memoryview(mmap.mmap(-1, nbytes + unit - PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE))
    begin = -address_of(view) % unit
    view = view[begin : begin + nbytes]
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = _MAP_FIXED | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE)
    if _libc.mmap(address_of(view), nbytes, protection, flags, fd, 0) == _MAP_FAILED:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))
    return view if writable else view.toreadonly()


def forget_written(view: memoryview, begin: int, end: int) -> None:
    """Have a private view be as the file is from byte ``begin`` up to ``end``, which are borders of pages.

    Raises ``OSError``.
    """
    address = ctypes.c_void_p(address_of(view) + begin)
    if _libc.madvise(address, ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED) != 0:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))


def refusal(error: BaseException) -> str:
    """Why the kernel has refused a memory file, and what to do."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return (
            "it is larger than this process may make a file (ulimit -f), which holds for memory too: raise that limit"
        )
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if is_limited and (isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM):
        return f"{error}; the address space of this process is limited (ulimit -v): raise that limit"
    return str(error)


def _out_of_memory(nbytes: int, why: object) -> OutOfMemoryError:
    return OutOfMemoryError(f"no {nbytes:,} bytes of shared memory: {why}")


_of_this_process: weakref.WeakSet[Segment] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A fork (a data loader's worker, say) must not keep memory that the trainer gives back."""
    for segment in list(_of_this_process):
        segment.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
