"""Examine this host: memory, limits of processes, the runtime folder, the worker, devices, and installed versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import resource
import secrets
import time
from collections.abc import Iterator

import torch

from asyncckpt.budgets import NOTICE_S
from asyncckpt.devices.kinds import kind_of
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.doctor.finding import Finding, Level
from asyncckpt.errors import CheckpointError, OutOfMemoryError
from asyncckpt.link.endpoint import FOLDER_VARIABLE, endpoint_name, runtime_folder
from asyncckpt.link.process import WorkerOptions, WorkerProcess
from asyncckpt.shm.budget import RESERVE_BYTES, available_bytes
from asyncckpt.shm.huge import HostMemory, only_private
from asyncckpt.shm.segment import PAGE, Segment

_START_S = 4.0
_LEAST_FILES, _LEAST_PROCESSES = 256, 64
_PINNED_BYTES = 16 << 20
_GB = 1e9
TRIED = {
    "torch": ("2.6", "2.15"),
    "nvidia-resiliency-ext": ("0.4.1", "0.7"),
    "megatron-core": ("0.16", "0.16"),
    "transformers": ("5.24", "5.24"),
    "lightning": ("2.6", "2.6"),
    "deepspeed": ("0.19", "0.19"),
    "torchtitan": ("0.3", "0.3"),
    "verl": ("0.8", "0.9"),
    "vllm": ("0.32", "0.32"),
}
"""The first and the last version of each package that the tests have run with."""


def examine_host(
    nbytes: int | None, own_bytes: int | None, start_timeout: float, *, is_outside: bool = False
) -> Iterator[Finding]:
    """Yield the findings about this host.

    Args:
        nbytes: The bytes of the images of all ranks of this host; None: unknown.
        own_bytes: The bytes of the image of this rank; None: unknown.
        start_timeout: ``Config.start_timeout``.
        is_outside: Whether the worker is in another container or cgroup, which the images count to.
    """
    if is_outside:
        yield Finding("memory", "ok", "images count to the platform's worker: run `asyncckpt doctor` beside it, too")
    else:
        yield from _memory(nbytes)
    yield from _memory_files(nbytes or 0)
    yield from _limits(own_bytes)
    yield _cores()
    yield from _worker(start_timeout)
    yield from _devices()
    yield from _versions()


def _memory(nbytes: int | None) -> Iterator[Finding]:
    try:
        left = max(0, available_bytes() - RESERVE_BYTES)
    except OutOfMemoryError as error:
        yield Finding("memory", "risk", str(error), "mount /proc")
        return
    text = f"{left / _GB:.3g} GB can be taken, of the host and its cgroups"
    if nbytes is None or left >= 2 * nbytes:
        yield Finding("memory", "ok", text)
    elif left >= nbytes:
        text += f": one image of {nbytes / _GB:.3g} GB, and no second one for saves that overlap"
        yield Finding("memory", "slow", text, "raise the limit of the cgroup, or save on more hosts")
    else:
        text += f", and one image takes {nbytes / _GB:.3g} GB"
        yield Finding("memory", "fails", text, "raise the limit of the cgroup, or save on more hosts")


def _memory_files(nbytes: int) -> Iterator[Finding]:
    advice = "allow memfd_create, or give /dev/shm room (--shm-size, an emptyDir with medium: Memory)"
    try:
        with Segment.create("asyncckpt-doctor", PAGE, touch=True) as segment:
            place, room = os.readlink(f"/proc/self/fd/{segment.fileno()}"), os.fstatvfs(segment.fileno())
    except (CheckpointError, OSError) as error:
        yield Finding("shared memory", "fails", str(error), advice)
        return
    if not place.startswith("/memfd:"):
        left = room.f_bavail * room.f_frsize
        text = f"memfd_create is refused, and /dev/shm has {left / _GB:.3g} GB left for images"
        yield Finding("shared memory", "fails" if left < nbytes else "risk", text, advice)
    if only_private():
        text = "memory files get no huge pages, so that a write costs more of the processor"
        advice = "write 'advise' to /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        yield Finding("huge pages", "slow", text, advice)


def _limits(nbytes: int | None) -> Iterator[Finding]:
    for option, what, which, least, needed in (
        ("n", "open files", resource.RLIMIT_NOFILE, _LEAST_FILES, "the files and connections of a worker"),
        ("u", "processes and threads", resource.RLIMIT_NPROC, _LEAST_PROCESSES, "a worker beside each rank"),
        ("f", "bytes of a file", resource.RLIMIT_FSIZE, nbytes or 0, "an image, which is a file in memory"),
        ("v", "bytes of addresses", resource.RLIMIT_AS, 4 * (nbytes or 0), "an image and the modules of Python"),
    ):
        # The worker raises the soft limit of its open files. No other limit is raised.
        limit = resource.getrlimit(which)[1 if which == resource.RLIMIT_NOFILE else 0]
        if limit != resource.RLIM_INFINITY and limit < least:
            text = f"{limit:,} {what} are too few for {needed}"
            yield Finding(f"ulimit -{option}", "fails", text, "raise that limit")


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count > 1:
        return Finding("cores", "ok", f"{count} cores for this process and its worker")
    text = "one core for this process and its worker, so that a write takes time of the training"
    return Finding("cores", "slow", text, "allow more cores (taskset, --cpus-per-task, the limit of the container)")


def _worker(start_timeout: float) -> Iterator[Finding]:
    """Start a worker with an endpoint, and end it."""
    begun = time.monotonic()
    name = endpoint_name(f"doctor {secrets.token_hex(6)}", 0)
    try:
        worker = WorkerProcess(WorkerOptions(endpoint=name, nice=0, io_class="none"))
        try:
            trouble = worker.wait_ready(start_timeout)
            seconds = time.monotonic() - begun
            worker.hang_up()
            worker.wait(NOTICE_S)
        finally:
            worker.end()
    except CheckpointError as error:
        yield Finding("worker", "fails", str(error), "look at the processes and limits of this host")
        return
    level: Level = "ok" if seconds < _START_S else "slow"
    yield Finding("worker", level, f"a worker starts within {seconds:.2g} s")
    if trouble is None:
        yield Finding("runtime folder", "ok", runtime_folder())
    else:
        advice = f"set ${FOLDER_VARIABLE} to a folder of this user alone, on a file system with locks and sockets"
        yield Finding("runtime folder", "risk", f"no restarted trainer finds its memory: {trouble}", advice)


def _devices() -> Iterator[Finding]:
    """Register memory with the driver of the device, if there is one."""
    found = torch.accelerator.current_accelerator()  # the one that torch was built for
    if found is None or (kind := kind_of(found)) is None or kind.pinner is None:
        return
    module = torch.get_device_module(found)
    if not module.is_available():
        return
    begun = time.monotonic()
    try:
        # The device of this rank. Any other one would get a context of this process.
        device = torch.device(found.type, module.current_device())
        memory = HostMemory.take(_PINNED_BYTES)
        pinned = PinnedMemory(memory, [memory.nbytes], device)
        is_pinned = bool(pinned.addresses)
        pinned.close()
    except (CheckpointError, RuntimeError) as error:
        yield Finding("pinned memory", "fails", str(error), "look at the driver of the device")
        return
    if is_pinned:
        seconds = time.monotonic() - begun
        yield Finding("pinned memory", "ok", f"{found.type} registers {_PINNED_BYTES >> 20} MiB in {seconds:.2g} s")
    else:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        text = f"{found.type} refuses to register memory, so that copies are slower (RLIMIT_MEMLOCK: {limit:,})"
        yield Finding("pinned memory", "slow", text, "raise the limit of locked memory (ulimit -l)")


def _versions() -> Iterator[Finding]:
    """Compare the installed versions with the versions that the tests have run with."""
    found = []
    for name, (first, last) in TRIED.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            found.append(f"{name} {version}")
            if not _numbers(first) <= _numbers(version) or _numbers(version)[: len(_numbers(last))] > _numbers(last):
                text = f"{name} {version} has not been tried: {first} to {last} have"
                yield Finding("versions", "risk", text, "see docs/compatibility.md")
    yield Finding("versions", "ok", ", ".join(found))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
