"""Segments: anonymous memory files, mapped by the process that creates them and by processes that receive them.

Segments are anonymous (``memfd_create``), not named files in ``/dev/shm``. So they have no 64 MB limit of a container.
If a container refuses ``memfd_create``, they are files without a name in ``/dev/shm``. Memory is taken before it is
written to, so that a full ``/dev/shm`` is an error and not a bus error. A crash leaves nothing behind: the memory lives
as long as any process maps it.
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
    """Own a file descriptor of memory or of a lock until it is closed: ``Descriptor(fd)``.

    ``close`` is safe to call twice. A signal handler or another thread may raise an exception between any two steps of
    Python code, but not within C code. So this class has no ``__init__`` in Python: an exception there would leak the
    descriptor.
    """

    @classmethod
    def of(cls, make: Callable[..., int], *given: Any) -> Descriptor:
        """Return the descriptor that ``make`` returns for the arguments ``given``. ``make`` must be written in C.

        No asynchronous exception can leak the descriptor. Raises as ``make``.
        """
        return next(map(cls, map(make, *((each,) for each in given))))

    def close(self) -> None:
        """Close the descriptor and ignore errors, as the function ``close`` does."""
        with contextlib.suppress(OSError):
            super().close()

    def fileno(self) -> int:
        """Return the descriptor's number; -1 after ``close``."""
        return -1 if self.closed else super().fileno()


def close(fd: int) -> None:
    """Close a descriptor that no file was written through. Ignore errors: the kernel closes the descriptor anyway."""
    with contextlib.suppress(OSError):
        os.close(fd)


HUGE_SETTINGS = "/sys/kernel/mm/transparent_hugepage"


def _huge_page() -> int:
    with contextlib.suppress(OSError, ValueError), open(f"{HUGE_SETTINGS}/hpage_pmd_size") as file:
        return int(file.read())
    return 2 << 20


# The page of this kernel: the unit of mappings, and of memory that is taken or given back.
PAGE = mmap.PAGESIZE
# The huge page of this kernel: 2 MiB, or 512 MiB with pages of 64 KiB. Smaller memory is never on huge pages, so that
# no memory is wasted. The kernel may give it contiguous pages of a size in between.
HUGE_PAGE = _huge_page()
# Alignment of the slots of a segment, and of the large files in an image. It is the same on all hosts, because images
# travel, and a multiple of the page of every kernel.
IMAGE_PAGE = 64 << 10
# Alignment of large tensors in a file, the same on all hosts. Also the smallest unit of direct I/O: a file system may
# ask for more (``block_bytes`` of a file).
BLOCK = 4096

# Not in Python's modules before 3.12/3.13. The values are the kernel's (linux/fcntl.h, asm-generic/mman-common.h).
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4
MADV_POPULATE_WRITE = 23

# Call madvise through ctypes, in chunks. mmap.madvise would hold Python's lock for all the seconds that fresh memory
# takes.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_TOUCH_BYTES = 64 << 20
_MADV_REMOVE = 9
_SHM = "/dev/shm"
# Answers to a call that the kernel does not have, or that a seccomp profile or a setting of the kernel refuses.
_REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2
_BLOCK_BYTES = 512  # unit of ``st_blocks``


def round_up(nbytes: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``nbytes``."""
    return -(-nbytes // unit) * unit


def memory_file(name: str) -> Descriptor:
    """Make an empty memory file without a path. ``name`` is shown in ``/proc``. Raises ``OSError``."""
    try:
        return Descriptor.of(os.memfd_create, name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
    try:
        return Descriptor.of(os.open, _SHM, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = f"{error.strerror}; memfd_create is refused, too: allow it, or mount a tmpfs there that may be written"
        raise OSError(error.errno, why, _SHM) from error


class Segment:
    """A mapped memory file. The owner (the worker) calls ``create``, all other processes call ``attach``.

    ``view`` is the memory. ``slots.py`` explains which process may write to which part, and when. A forked child loses
    a writable segment, because its memory belongs to one trainer and its worker alone.
    """

    def __init__(self, file: Descriptor, nbytes: int, *, writable: bool = True) -> None:
        """Map a memory file. Callers use ``create`` or ``attach`` instead.

        Args:
            file: The file, which the segment owns from here on.
            nbytes: Size in bytes.
            writable: Whether the mapping may be written to.
        """
        self._file = file
        self.closed = True
        """Whether ``close`` was called."""
        self.nbytes = nbytes
        try:
            self.view = _mapped(file.fileno(), nbytes, writable=writable)
            self.closed = False
            if writable:
                _of_this_process.add(self)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, name: str, nbytes: int, *, touch: bool = False) -> Segment:
        """Create a memory file with a fixed size, which no process can change.

        Args:
            name: Name shown in ``/proc/PID/maps``.
            nbytes: Size in bytes.
            touch: Take the memory now, as the method ``touch`` does. Otherwise memory is taken when it is first written
                to.

        Returns:
            The segment, to be closed by the caller.

        Raises:
            OutOfMemoryError: The kernel refuses the memory, or the descriptor.
        """
        try:
            file = memory_file(name)
            try:
                os.ftruncate(file.fileno(), nbytes)
                # If a file shrinks under a mapping, a process that touches the mapping gets a bus error.
                with contextlib.suppress(PermissionError):  # a file in /dev/shm takes no seals
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

        Raises ``OutOfMemoryError`` if this process has no address space left.
        """
        nbytes = os.fstat(file.fileno()).st_size
        try:
            return cls(file, nbytes, writable=writable)
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise
            raise _out_of_memory(nbytes, refusal(error)) from error

    def fileno(self) -> int:
        """Return the descriptor, which can be sent to another process."""
        return self._file.fileno()

    @property
    def address(self) -> int:
        """The address of the mapping in this process."""
        return address_of(self.view)

    def private_view(self) -> memoryview:
        """Return a private, writable mapping. Pages written there are copies, and are freed with the last view."""
        return _mapped(self.fileno(), self.nbytes, writable=True, shared=False)

    def touch(self, end: int | None = None, begin: int = 0) -> None:
        """Take the memory from ``begin`` up to ``end`` now; None is the end of the segment.

        Later writes then neither wait for the kernel nor fail. Raises ``OutOfMemoryError`` if the kernel cannot give
        the memory.
        """
        if self.closed:
            return
        address = self.address
        end = self.nbytes if end is None else end
        for offset in range(begin, end, _TOUCH_BYTES):
            nbytes = min(_TOUCH_BYTES, end - offset)
            if _libc.madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(nbytes), MADV_POPULATE_WRITE) == 0:
                continue
            # There is no memory left, or no such advice (before Linux 5.14). The file takes the memory, too, changes no
            # byte, and names the error.
            try:
                os.posix_fallocate(self.fileno(), offset, nbytes)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    self.require_room(end - begin)
                raise _out_of_memory(self.nbytes, refusal(error)) from error

    def require_room(self, nbytes: int) -> None:
        """Raise ``OutOfMemoryError`` if this segment is in ``/dev/shm``, and there is no room for ``nbytes`` more."""
        room = os.fstatvfs(self.fileno())
        if room.f_blocks and room.f_bavail * room.f_frsize < nbytes:  # a file of memfd_create has no number of blocks
            why = (
                f"memfd_create is refused here, so the memory is in {_SHM}, which has {room.f_blocks * room.f_frsize:,}"
                f" bytes, {room.f_bavail * room.f_frsize:,} of them free: make it larger (Docker: --shm-size;"
                " Kubernetes: an emptyDir with medium Memory), or allow memfd_create"
            )
            raise _out_of_memory(nbytes, why)

    def protect(self) -> None:
        """Make the mapping read-only in this process. Writes to it are segmentation faults from now on."""
        if _libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), mmap.PROT_READ) != 0:
            raise OSError(code := ctypes.get_errno(), os.strerror(code))

    @property
    def taken_bytes(self) -> int:
        """The number of bytes of the memory that any process has taken."""
        return os.fstat(self.fileno()).st_blocks * _BLOCK_BYTES

    @property
    def is_taken(self) -> bool:
        """Whether all of the memory is taken."""
        return self.taken_bytes >= self.nbytes

    def give_back(self, begin: int = 0) -> None:
        """Give the memory from ``begin`` on back to the system.

        Every process that maps the memory loses its contents and reads zeros. ``touch`` may take the memory again.
        Raises ``OutOfMemoryError`` if the kernel refuses.
        """
        nbytes = round_up(self.nbytes, PAGE) - begin
        if not nbytes or _libc.fallocate(self.fileno(), _PUNCH_HOLE | _KEEP_SIZE, begin, nbytes) == 0:
            return
        # The mapping allows the same, in a container that refuses the call.
        if _libc.madvise(ctypes.c_void_p(self.address + begin), ctypes.c_size_t(nbytes), _MADV_REMOVE) != 0:
            why = os.strerror(ctypes.get_errno())
            raise OutOfMemoryError(f"{nbytes:,} bytes of shared memory cannot be given back: {why}")

    def close(self) -> None:
        """Unmap the memory and close the descriptor. Safe to call twice, and after an incomplete ``__init__``.

        If a tensor still points into the mapping, the mapping stays until the tensor is gone.
        """
        self._file.close()
        if not self.closed:
            with contextlib.suppress(BufferError):  # a view is left; the memory is unmapped with the last view
                self.view.release()
            self.closed = True

    def leave_to_parent(self) -> None:
        """Release the memory in a forked child, even if views are left. The views must not be used any more."""
        if not self.closed:
            # Replace this mapping by an inaccessible mapping, so that the addresses stay taken until all views are
            # gone.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            _libc.mmap(self.address, self.nbytes, 0, flags, -1, 0)
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # the owner has not called ``close``; the mapping is freed by itself
            self._file.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mapped(fd: int, nbytes: int, *, writable: bool, shared: bool = True) -> memoryview:
    """Map a file. The mapping is removed with its last view, even if an exception comes before the caller has a view.

    Python's ``mmap`` object reserves the addresses and unmaps them, and the file is mapped in its place. ``mmap`` is
    not given the file, because it would duplicate the descriptor, and a fork could not close the duplicate. A large
    mapping begins at a huge page.
    """
    unit = alignment_of(nbytes)
    view = memoryview(mmap.mmap(-1, nbytes + unit, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE))
    begin = -address_of(view) % unit
    view = view[begin : begin + nbytes]
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = _MAP_FIXED | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE)
    if _libc.mmap(address_of(view), nbytes, protection, flags, fd, 0) == _MAP_FAILED:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))
    return view if writable else view.toreadonly()


def alignment_of(nbytes: int) -> int:
    """Return the alignment of a mapping of ``nbytes``. Only a mapping of at least one huge page is worth huge pages."""
    return HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE


def forget_written(view: memoryview, begin: int, end: int) -> None:
    """Restore a private view to the contents of the file from byte ``begin`` up to ``end``, both page boundaries.

    Raises ``OSError``.
    """
    address = ctypes.c_void_p(address_of(view) + begin)
    if _libc.madvise(address, ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED) != 0:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))


def refusal(error: BaseException) -> str:
    """Return the reason why the kernel has refused a memory file, with advice."""
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
    """Release all writable segments, because a fork must not keep memory that the trainer gives back.

    A data loader's worker is an example of a fork.
    """
    for segment in list(_of_this_process):
        segment.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
