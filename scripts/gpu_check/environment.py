"""The part ``env``: what the machine is, and the one thing of which all else depends: whether our memory is pinned."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import torch

from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.shm.segment import Segment
from gpu_check.device import Device
from gpu_check.figures import Figure

_BYTES = 256 << 20


def measure(device: Device, scale: float) -> Iterator[Figure]:
    """Facts, and of a copy into memory of ours, registered and not: does the host go on meanwhile?"""
    yield Figure("torch", torch.__version__)
    yield Figure("Python", platform.python_version())
    yield Figure("device", device.module.get_device_name() if device.is_real else device.type)
    yield Figure("devices", device.module.device_count())
    yield Figure("cores", len(psutil.Process().cpu_affinity() or ()))
    yield Figure("host memory", psutil.virtual_memory().total / 2**30, "GiB")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Figure("ulimit -l", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB")
    yield Figure("/dev/shm", psutil.disk_usage("/dev/shm").total / 2**30, "GiB")
    nbytes = int(_BYTES * scale)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device.device)
    pageable = torch.empty(nbytes, dtype=torch.uint8)
    slow = device.time(lambda: pageable.copy_(source, non_blocking=True))
    yield Figure("copy into pageable memory", nbytes / slow / 1e9, "GB/s")
    with closing(Segment.create("asyncckpt-gpu-check", nbytes)) as segment:
        segment.touch()
        pinned = PinnedMemory(segment, [], device.device)
        yield Figure("ranges of our memory that are registered", len(pinned.addresses), at_least=1)
        whole, queued = _copy(device, source, segment)
        pinned.close()
    yield Figure("copy into our memory", nbytes / whole / 1e9, "GB/s")
    yield Figure("of such a copy the host waits", queued / whole, at_most=0.2)


def _copy(device: Device, source: torch.Tensor, segment: Segment) -> tuple[float, float]:
    """Seconds until it is done, and until the host goes on."""
    target = torch.frombuffer(segment.view, dtype=torch.uint8)
    whole = device.time(lambda: target.copy_(source, non_blocking=True))
    queued = float("inf")
    for _ in range(4):
        device.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        queued = min(queued, time.perf_counter() - begun)
    device.synchronize()
    return whole, queued
