"""File systems to mount for the tests."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from file_systems.quirks import QUIRKS

HERE = Path(__file__).parent
_IMAGE_BYTES = 1 << 30  # XFS needs 300 MB or more; the image is sparse
_START_S = 20.0
_COMMAND_S = 60.0
_MIXED = ["no O_DIRECT", "no hard links", "no chmod", "empty statfs", "no fallocate", "no rename flags"]


class CannotMountError(Exception):
    """This file system cannot be mounted here."""


@dataclass(frozen=True)
class Mounted:
    """A mounted file system: a folder in it, and environment variables for the processes that use it."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)


Kind = Callable[[Path], AbstractContextManager[Mounted]]


def run(*command: str | Path) -> None:
    """Run a program. Raises ``CannotMountError`` with the last line of its output."""
    try:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise CannotMountError(f"there is no {command[0]}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise CannotMountError(f"{command[0]}: {said[-1]}")


@contextlib.contextmanager
def mounted(mount: Path, *arguments: str | Path) -> Iterator[None]:
    mount.mkdir()
    run("mount", *arguments, mount)
    try:
        yield
    finally:
        unmount(mount)


def unmount(mount: Path) -> None:
    """Unmount the file system, even if a process still has a file open there."""
    for command in (["umount"], ["umount"], ["umount", "--lazy"]):
        if not subprocess.run([*command, mount], capture_output=True, timeout=_COMMAND_S).returncode:
            return
        time.sleep(1)


@contextlib.contextmanager
def plain_folder(folder: Path) -> Iterator[Mounted]:
    yield Mounted(folder)


@contextlib.contextmanager
def tmpfs(folder: Path) -> Iterator[Mounted]:
    with mounted(folder / "mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs"):
        yield Mounted(folder / "mount")


@contextlib.contextmanager
def overlay(folder: Path) -> Iterator[Mounted]:
    for name in ("lower", "upper", "work"):
        (folder / name).mkdir()
    places = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    with mounted(folder / "mount", "-t", "overlay", "-o", places, "overlay"):
        yield Mounted(folder / "mount")


def on_image(kind: str) -> Kind:
    @contextlib.contextmanager
    def mount(folder: Path) -> Iterator[Mounted]:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        run(f"mkfs.{kind}", "-q", image)
        with mounted(folder / "mount", "-t", kind, "-o", "loop", image):
            yield Mounted(folder / "mount")

    return mount


def fuse(*quirks: str) -> Kind:
    @contextlib.contextmanager
    def mount(folder: Path) -> Iterator[Mounted]:
        if importlib.util.find_spec("mfusepy") is None:
            raise CannotMountError("mfusepy is not installed")
        if not os.access("/dev/fuse", os.W_OK):
            raise CannotMountError("/dev/fuse cannot be opened")
        mirrored, at = folder / "mirrored", folder / "mount"
        mirrored.mkdir()
        at.mkdir()
        environment = _without_locks(folder, quirks)
        with (folder / "served.log").open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, HERE / "quirks.py", mirrored, at, *quirks], stdout=log, stderr=log
            )
        try:
            deadline = time.monotonic() + _START_S
            while not os.path.ismount(at):
                if server.poll() is not None or time.monotonic() > deadline:
                    said = (folder / "served.log").read_text(errors="replace").strip().splitlines() or ["nothing"]
                    raise CannotMountError(f"FUSE: {said[-1]}")
                time.sleep(0.02)
            yield Mounted(at, environment)
        finally:
            if os.path.ismount(at):
                unmount(at)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
            server.kill()
            server.wait()

    return mount


def _without_locks(folder: Path, quirks: tuple[str, ...]) -> dict[str, str]:
    """Build the library that refuses locks, if a quirk asks for it. Return the environment that preloads it."""
    codes = {"no locks": errno.ENOLCK, "no locks, ENOSYS": errno.ENOSYS}
    for quirk in codes.keys() & quirks:
        run("cc", "-shared", "-fPIC", "-O1", "-o", folder / "no_locks.so", HERE / "no_locks.c", "-ldl")
        return {"LD_PRELOAD": f"{folder}/no_locks.so", "NO_LOCKS": str(codes[quirk])}
    return {}


KINDS: dict[str, Kind] = {
    "folder": plain_folder,
    "ext4": on_image("ext4"),
    "xfs": on_image("xfs"),
    "btrfs": on_image("btrfs"),
    "overlayfs": overlay,
    "tmpfs": tmpfs,
    "fuse": fuse(),
    **{f"fuse: {quirk}": fuse(quirk) for quirk in QUIRKS},
    "fuse: as a bucket": fuse(*_MIXED, "no fsync of folders", "inodes change at rename", "no locks"),
    "fuse: as NFS": fuse("old listings", "late names", "silly renames", "no rename flags"),
}
"""Context managers that mount a file system in a given folder, by name."""

# On the last one, tests that list new files fail. The run shows that nothing hangs, and that nothing is lost.
ON_REQUEST = ["folder", "fuse: old listings of own"]


def make_folder(name: str) -> Path:
    """Make an empty folder in memory for the images and the mirrored files."""
    place = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    folder = place / f"asyncckpt-file-systems-{os.getpid()}" / "".join(c if c.isalnum() else "-" for c in name)
    folder.mkdir(parents=True)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove the folder of a file system, unless something is still mounted in it."""
    if os.path.ismount(folder / "mount"):
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
