"""File systems on loop devices that can lose power and be mounted again."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import shutil
import struct
import subprocess
import time
from pathlib import Path

from torture.jobs import context
from torture.served_disk import Cut, serve
from torture.tally import LIMIT_S

FILE_SYSTEMS = ("ext4", "xfs", "btrfs")

_IMAGE_BYTES = 320 << 20  # xfs needs 300 MB
_MAKE = {
    "ext4": ["mkfs.ext4", "-F", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-f", "-q"],
    "btrfs": ["mkfs.btrfs", "-f", "-q"],
}
_FS_IOC_SHUTDOWN, _FLUSH_LOG, _DROP_LOG = 0x8004587D, 1, 2
_BUSY_S = 10.0
_LOG_LINES = 60


_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


def own_mounts() -> None:
    """Give this process and its children mounts of their own, before anything is mounted.

    The mounts end with the last of these processes. No other namespace copies them, which would keep a disk busy.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)


class DiskError(Exception):
    """A disk could not be made, mounted or unmounted."""


class KernelError(DiskError):
    """The kernel crashed in a mount: the fault is in its file system."""


class LoopDisk:
    """A file system that loses power by FS_IOC_SHUTDOWN. Data not written by then is lost."""

    def __init__(self, folder: Path, file_system: str, options: str) -> None:
        """Make and mount a file system. Raises ``DiskError``."""
        self.file_system = file_system
        self.mount_point = folder / "mount"
        self._options = options
        self._folder = folder
        self._image = folder / "image"
        self._device = ""
        self._is_mounted = False
        self.mount_point.mkdir(parents=True)
        with contextlib.ExitStack() as undone:
            undone.callback(self.remove)
            with self._image.open("wb") as file:
                file.truncate(_IMAGE_BYTES)
            _run(*_MAKE[file_system], str(self._image))
            self._mount()
            undone.pop_all()

    @property
    def is_cut(self) -> bool:
        """Whether the disk has lost power by itself."""
        return False

    def cut(self, choice: random.Random, *, hard: bool = False) -> str:
        """Cut the power, and return a description. ``hard``: lose as much as this disk can."""
        flags = _DROP_LOG if hard else choice.choice((_FLUSH_LOG, _DROP_LOG))
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, struct.pack("I", flags))
        finally:
            os.close(fd)
        return "log dropped" if flags == _DROP_LOG else "log flushed"

    def mount_again(self) -> None:
        """Mount the file system after a cut. No process may have files open. Raises ``DiskError``."""
        self._unmount()
        self._mount()

    def remove(self) -> None:
        """Unmount the file system and remove its folder."""
        with contextlib.suppress(DiskError):
            self._unmount()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _mount(self) -> None:
        if not self._device:
            self._device = _run("losetup", "--find", "--show", str(self._backing())).strip()
        options = ["-o", self._options] if self._options else []
        try:
            _run("mount", "-t", self.file_system, *options, self._device, str(self.mount_point))
        except DiskError as error:
            raise type(error)(f"{error}; the kernel says: {_kernel_log()}") from None
        self._is_mounted = True

    def _unmount(self) -> None:
        if self._is_mounted:
            _unmount(self.mount_point)
            self._is_mounted = False
        if self._device:  # no dirty page of the device may outlive the cut
            _run("losetup", "--detach", self._device)
            self._device = ""

    def _backing(self) -> Path:
        return self._image


class ServedDisk(LoopDisk):
    """A file system on a disk with a volatile write cache. See ``served_disk.py``."""

    def __init__(self, folder: Path, file_system: str, options: str, how: Cut) -> None:
        self._how = how
        self._served = folder / "served"
        self._was_cut: str | None = None
        self._pipe, self._theirs = context.Pipe()
        self._server = context.Process(
            target=serve, args=(self._theirs, str(folder / "image"), str(self._served)), daemon=True
        )
        super().__init__(folder, file_system, options)

    @property
    def is_cut(self) -> bool:
        if self._was_cut is None and self._pipe.poll():
            self._was_cut = self._hear("cut")
        return self._was_cut is not None

    def cut_at(self, request: int, choice: random.Random) -> None:
        """Make the disk lose power just before a write or flush. ``request`` counts these from now on."""
        self._pipe.send(("cut at", request, self._how, choice.getrandbits(32)))

    def cut(self, choice: random.Random, *, hard: bool = False) -> str:
        if not self.is_cut:
            self._pipe.send(("cut", self._how, choice.getrandbits(32)))
            self._was_cut = self._hear("cut")
        return self._was_cut or ""

    def mount_again(self) -> None:
        self._unmount()
        self._pipe.send(("power",))
        self._was_cut = None
        self._mount()

    def remove(self) -> None:
        with contextlib.suppress(DiskError):
            self._unmount()
        if os.path.ismount(self._served):
            with contextlib.suppress(DiskError):
                _unmount(self._served)
        self._pipe.close()
        if self._server.pid is not None:
            self._server.join(1)
            self._server.kill()
        super().remove()

    def _backing(self) -> Path:
        if self._server.pid is None:
            self._served.touch()
            self._server.start()
            self._theirs.close()
            self._hear("mounted")
        return self._served

    def _hear(self, kind: str) -> str:
        if not self._pipe.poll(LIMIT_S):
            raise DiskError(f"the disk has not {kind} within {LIMIT_S:g} s")
        said = self._pipe.recv()
        if said[0] != kind:
            raise DiskError(f"the disk has {said}")
        return said[1] if len(said) > 1 else ""


def missing(file_systems: list[str]) -> str:
    """Return the reason why no disk can be mounted here, or ""."""
    if os.geteuid():
        return "this is not root"
    absent = [name for name in (*(_MAKE[each][0] for each in file_systems), "losetup") if shutil.which(name) is None]
    absent += [path for path in ("/dev/loop-control", "/dev/fuse") if not os.path.exists(path)]
    return f"there is no {', '.join(absent)}" if absent else ""


def _unmount(path: Path) -> None:
    until = time.monotonic() + _BUSY_S
    while True:  # files of killed processes may be closed a little later
        try:
            _run("umount", str(path))
            return
        except DiskError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def _kernel_log() -> str:
    """Return the last lines of the kernel's log, if this process may read it."""
    ended = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
    return " | ".join(ended.stdout.splitlines()[-_LOG_LINES:])


def _run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise (KernelError if ended.returncode < 0 else DiskError)(
            f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr.strip()}"
        )
    return ended.stdout
