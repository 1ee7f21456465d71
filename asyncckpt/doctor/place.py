"""Examine the place of checkpoints by two small checkpoints, which are written, linked, read and removed there."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from asyncckpt.doctor.finding import Finding
from asyncckpt.errors import CheckpointError, JobTakenError, unless_interrupt
from asyncckpt.format.manifest import MANIFEST_NAME, Manifest
from asyncckpt.link.root_lock import check_job, holder_on_this_host
from asyncckpt.link.takeover import is_running
from asyncckpt.loading.source import check_root
from asyncckpt.shm.huge import huge_buffer
from asyncckpt.shm.segment import round_up
from asyncckpt.storage import complete_steps, is_address, storage_for
from asyncckpt.storage.file_system import LockFile
from asyncckpt.storage.local import free_bytes
from asyncckpt.storage.storage import LinkSource, OpenAttempt, Storage

PROBE = ".asyncckpt-doctor-"
"""The begin of the names of trials. They are hidden, so that no trainer takes a trial for a checkpoint."""
CLOCK_S = 5.0
"""The difference of two clocks in seconds that is told."""
_DATA = "data"
# The limits of the trial of speed. A disk is judged by its first bytes, because a diagnosis has to be short.
_LEAST_BYTES, _MOST_BYTES, _MOST_S = 1 << 20, 128 << 20, 0.5
_GB = 1e9
# File systems in memory, and file systems that a container has for itself.
_IN_MEMORY, _OF_A_CONTAINER = ("tmpfs", "ramfs", "hugetlbfs"), ("overlay", "aufs")
# Options of mounts with which a file system forgets what it has confirmed.
_FORGETFUL = ("nobarrier", "barrier=0", "soft", "softerr")


class Need(NamedTuple):
    """The needs of a training.

    Attributes:
        nbytes: The size of one checkpoint in bytes; None: unknown.
        keeps: The number of checkpoints in the root; None: retention removes none.
        job_id: ``Config.job_id``.
        direct_io: ``Config.direct_io``.
    """

    nbytes: int | None = None
    keeps: int | None = None
    job_id: str | None = None
    direct_io: bool = True


def examine_place(root: str, need: Need) -> Iterator[Finding]:
    """Yield the findings about a root, an absolute path or an address."""
    is_folder = not is_address(root)
    try:
        if is_folder:
            check_root(root)
        check_job(root, need.job_id)
        holder = holder_on_this_host(root)
        if holder is not None and holder.trainer != os.getpid() and is_running(holder.trainer):
            raise JobTakenError(
                f"the worker {holder.worker} of the trainer {holder.trainer} saves to this folder; end that job, or"
                " save to another folder",
                path=root,
            )
    except CheckpointError as error:
        yield Finding("root", "fails", str(error))
    is_new = is_folder and not os.path.exists(root)
    try:
        if is_folder:
            yield _medium(root)
        yield from _trial(storage_for(root, direct_io=need.direct_io), root, need, is_folder=is_folder)
        if is_folder:
            yield _lock(root)
            yield from _room(root, need)
    except CheckpointError as error:
        yield Finding("save", "fails", str(error))
    except unless_interrupt(OSError) as error:
        yield Finding("save", "fails", f"looking at {root} failed: {error}", "look at the storage there")
    if is_new:
        with contextlib.suppress(OSError):
            os.rmdir(root)


def _trial(storage: Storage, root: str, need: Need, *, is_folder: bool) -> Iterator[Finding]:
    """Save, link, read and remove. Raises ``StorageError`` as a save would."""
    first, second = (os.path.join(root, f"{PROBE}{secrets.token_hex(6)}") for _ in range(2))
    try:
        opened = storage.begin_checkpoint(first, (attempt := f"{secrets.token_hex(6)}-1"), need.nbytes or 0)
        try:
            yield _speed(opened, need, is_folder=is_folder)
            source = opened.link_source(_DATA)
            nbytes = _finish(opened, attempt)
        except BaseException:
            opened.discard()
            raise
        yield Finding("save", "ok", "a checkpoint is written, synced and committed")
        yield from _clock(storage, first) if is_folder else ()
        yield _listing(storage, root, first, nbytes)
        yield _link(storage, second, source)
    finally:
        with contextlib.suppress(CheckpointError):
            storage.remove_checkpoint(first)


def _speed(opened: OpenAttempt, need: Need, *, is_folder: bool) -> Finding:
    """Write a file, and sync it."""
    free = free_bytes(opened.path) if is_folder else None
    most = _MOST_BYTES if free is None else min(_MOST_BYTES, free // 8)
    data = huge_buffer(_MOST_BYTES)
    data[:8] = secrets.token_bytes(8)
    at, nbytes, begun = 0, min(_LEAST_BYTES, most), time.monotonic()
    with closing(opened.create(_DATA, large=True)) as file:
        while True:  # each piece is as long as all before, so that a slow disk is not written to for long
            started = time.monotonic()
            file.write(data[: round_up(nbytes, file.block_bytes)], at)
            file.sync()
            seconds = time.monotonic() - started
            if at + nbytes >= most or time.monotonic() - begun > _MOST_S:
                break
            at += nbytes
            nbytes = min(at, most - at)
    rate = nbytes / seconds
    text = f"{rate / _GB:.2g} GB/s for {nbytes / 1e6:.3g} MB with a sync"
    if need.nbytes:
        text += f"; {need.nbytes / _GB:.3g} GB take about {need.nbytes / rate:.3g} s"
    if not is_folder or file.direct:
        return Finding("speed", "ok", text)
    advice = "leave Config.direct_io at True" if not need.direct_io else "use a file system with O_DIRECT"
    return Finding("speed", "slow", f"{text}, through the page cache, which costs a copy and memory", advice)


def _clock(storage: Storage, path: str) -> Iterator[Finding]:
    stamp = storage.stamp(os.path.join(path, MANIFEST_NAME))
    ahead = 0.0 if stamp is None else stamp.modified / 1e9 - time.time()
    if abs(ahead) > CLOCK_S:
        text = f"the clock of the file system is {ahead:+.0f} s off the clock of this host"
        yield Finding("clock", "risk", text, "set both by NTP: leftovers of dead jobs are removed by their age")


def _finish(opened: OpenAttempt, attempt: str) -> int:
    """Write the manifest, and finalize. Return the size of the manifest in bytes."""
    text = Manifest(attempt, None, time.time(), 1, True, 0, {}, {}).encode()
    opened.copy(MANIFEST_NAME, len(text), lambda: iter([memoryview(text)]))
    opened.finalize("refuse")
    opened.release()
    return len(text)


def _listing(storage: Storage, root: str, path: str, nbytes: int) -> Finding:
    begun = time.monotonic()
    is_listed = os.path.basename(path) in storage.names_in(root)
    found = storage.read(os.path.join(path, MANIFEST_NAME))
    if not is_listed or len(found) != nbytes:
        text = "a checkpoint that was just committed is not in a listing of this host"
        return Finding(
            "listing", "risk", text, "a load may find the step before: turn caches of folders off (NFS: noac)"
        )
    return Finding(
        "listing", "ok", f"what is committed is listed and read {(time.monotonic() - begun) * 1e3:.0f} ms later"
    )


def _link(storage: Storage, path: str, source: LinkSource | None) -> Finding:
    opened = storage.begin_checkpoint(path, f"{secrets.token_hex(6)}-2", 0)
    try:
        if source is not None and opened.link(_DATA, source):
            return Finding("link", "ok", "unchanged files are linked, and not written again")
    finally:
        opened.discard()
    return Finding("link", "slow", "unchanged files are written again with each save: this storage links no files")


def _lock(root: str) -> Finding:
    with closing(LockFile(os.path.join(root, f"{PROBE}{secrets.token_hex(6)}"))) as file:
        file.remove()
        if file.is_held is None:
            return Finding(
                "lock", "risk", "the file system has no locks", "see to it that one job at a time saves here"
            )
    return Finding("lock", "ok", "one job at a time can save here")


def _room(root: str, need: Need) -> Iterator[Finding]:
    """Compare the free space with the need. A trial has refused too little space for one checkpoint."""
    if (free := free_bytes(root)) is None:
        return
    text = f"{free / _GB:.3g} GB are free"
    if need.nbytes is None:
        yield Finding("space", "ok", text)
    else:
        count, there = free // need.nbytes, len(complete_steps(root))
        wanted = max(1, (need.keeps or 1) + 1 - there)
        text += f", for {count} checkpoints beside {there}"
        advice = f"free space, or {'set' if need.keeps is None else 'lower'} the number of checkpoints to keep"
        yield Finding("space", "ok", text) if count >= wanted else Finding("space", "fails", text, advice)
    space = os.statvfs(root)
    if space.f_files > 0 and space.f_favail < 1000:
        yield Finding("files", "fails", f"{space.f_favail} more files can be made (inodes)", "remove files there")


def _medium(root: str) -> Finding:
    """Name a medium that does not keep what it has confirmed. Raises ``OSError``."""
    kind, options = _mount_of(root)
    if kind in _IN_MEMORY:
        return Finding(
            "medium", "risk", f"{root} is in memory ({kind})", "save to a disk, with Config.local_root there"
        )
    if kind in _OF_A_CONTAINER:
        return Finding("medium", "risk", f"{root} ends with its container ({kind})", "mount a volume there")
    if weak := sorted(set(options) & set(_FORGETFUL)):
        text = f"{root} is mounted with {', '.join(weak)}: it may lose what it has confirmed"
        return Finding("medium", "risk", text, "mount it without that")
    return Finding("medium", "ok", f"{kind}, which keeps what it has confirmed")


def _mount_of(path: str) -> tuple[str, list[str]]:
    """Return the kind and the options of the file system of ``path``, which may be missing. Raises ``OSError``."""
    place, longest, found = os.fsencode(os.path.realpath(path)), -1, ("unknown", [""])
    with open("/proc/self/mountinfo", "rb") as mounts:
        for line in mounts:  # number, parent, device, root, mount point, options, ... - kind, source, options
            before, _, after = line.rstrip(b"\n").partition(b" - ")
            fields, (kind, _, options) = before.split(b" "), after.split(b" ")
            point = re.sub(rb"\\(\d{3})", lambda code: bytes([int(code[1], 8)]), fields[4])
            is_above = place == point or place.startswith(point.rstrip(b"/") + b"/")
            if is_above and len(point) >= longest:  # the last one covers the others
                all_options = (fields[5] + b"," + options).decode(errors="replace")
                longest, found = len(point), (kind.decode(errors="replace"), all_options.split(","))
    return found
