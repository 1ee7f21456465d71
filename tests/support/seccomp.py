"""Seccomp filters, as of containers: the kernel refuses one system call to this process and to all its children."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import NamedTuple

import pytest

_libc = ctypes.CDLL(None, use_errno=True)
_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2
# Of linux/bpf_common.h: load a word, jump if it is equal, return.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Of linux/seccomp.h: the results, and the offsets of the call's number, the architecture and the second argument.
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _SECOND_AT = 0, 4, 24
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


class Call(NamedTuple):
    """The numbers of a system call on x86_64 and aarch64. ``second``: its second argument; None: any."""

    x86_64: int
    aarch64: int
    second: int | None = None


CALLS = {
    "memfd_create": Call(319, 279),
    "pidfd_open": Call(434, 434),
    "renameat2": Call(316, 276),
    "flock": Call(73, 32),
    "fcntl(F_OFD_SETLK)": Call(72, 25, 37),
    "madvise": Call(28, 233),
    "fallocate": Call(285, 47),
    "sched_setaffinity": Call(203, 122),
    "setpriority": Call(141, 140),
    "ioprio_set": Call(251, 30),
    "statx": Call(332, 291),
    "copy_file_range": Call(326, 285),
    "ioctl(FICLONE)": Call(16, 29, 0x40049409),
    "close_range": Call(436, 436),
}


def need_seccomp() -> None:
    """Skip the test unless this kernel and architecture have filters."""
    if platform.machine() not in _ARCHITECTURES or not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        pytest.skip("no seccomp filters here")


def refuse(call: str, code: int) -> None:
    """Have the kernel answer ``call`` with the error ``code``, in this process and its children."""
    machine, (*_, second) = platform.machine(), CALLS[call]
    checks = [(_ARCHITECTURE_AT, _ARCHITECTURES[machine]), (_NUMBER_AT, getattr(CALLS[call], machine))]
    checks += [] if second is None else [(_SECOND_AT, second)]
    program = b""
    for number, (at, value) in enumerate(checks):
        to_allow = 2 * (len(checks) - number) - 1
        program += struct.pack("HBBI", _LOAD, 0, 0, at)
        program += struct.pack("HBBI", _JUMP_IF_EQUAL, 0, to_allow, value)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | code)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    memory = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(memory)))
    for option, value, pointer in ((_NO_NEW_PRIVS, 1, None), (_SET_SECCOMP, _MODE_FILTER, filter_)):
        if _libc.prctl(option, value, pointer, 0, 0) != 0:
            raise OSError(found := ctypes.get_errno(), errno.errorcode[found])
