"""The part ``link``: copies from and to the device, the cost of registering memory, writes from registered memory."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from bench.limits import WRITE_BYTES, WRITE_THREADS

from asyncckpt.devices import kinds
from asyncckpt.devices.kinds import DeviceEvent
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.shm.segment import Segment
from asyncckpt.storage.local_file import LocalFile
from gpu_check.budget import Budget
from gpu_check.device import Device
from gpu_check.figures import Figure
from gpu_check.task import Task

_BYTES = 4 << 30
_CHUNK_BYTES = 64 << 20
_WRITE_ROUNDS = 3
_MOST_COPIES, _SMALL_BYTES, _WAITS_S = 1500, 4096, 0.005


def measure(task: Task) -> Iterator[Figure]:
    """Measure the link first, as everything else is read against it."""
    device = task.device
    nbytes = max(1, int(_BYTES * task.scale) // _CHUNK_BYTES) * _CHUNK_BYTES
    source = torch.ones(nbytes, dtype=torch.uint8, device=device.device)
    to_host, from_host = device.link_seconds(nbytes)
    yield Figure("copy to torch's pinned memory", nbytes / to_host / 1e9, "GB/s")
    yield Figure("copy from torch's pinned memory", nbytes / from_host / 1e9, "GB/s")
    with device.segment(nbytes) as (segment, slot):
        yield Figure("copy to a slot that is not registered", _rate(device, slot, source) / 1e9, "GB/s")
        if device.pinner is None:
            yield Figure("registration", "this kind of device has none")
            return
        yield from _registration(device, segment)
        pinned = PinnedMemory(segment, range(0, nbytes, _CHUNK_BYTES), device.device)
        yield Figure("ranges of the slot that are registered", len(pinned.addresses), at_least=1)
        ours, back = _rate(device, slot, source), _rate(device, source, slot)
        queued = _queued_seconds(device, slot, source)
        room = _room(device, slot, source)
        pinned.close()
        yield Figure("copy to our slot", ours / 1e9, "GB/s")
        yield Figure("copy to our slot, by torch's", ours * to_host / nbytes, at_least=0.95)
        yield Figure("copy from our slot, by torch's", back * from_host / nbytes, at_least=0.95)
        yield Figure("of such a copy the host waits", queued * ours / nbytes, at_most=0.2)
        yield Figure("copies, each with an event, until a call waits", room)
        yield from _writes(device, segment, task.budget)


def _rate(device: Device, target: torch.Tensor, source: torch.Tensor) -> float:
    """Return bytes a second."""
    return source.numel() / device.time(lambda: _copy(target, source))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue copies in chunks, as a save does: none crosses the border of two registered ranges."""
    for into, some in zip(torch.split(target, _CHUNK_BYTES), torch.split(source, _CHUNK_BYTES), strict=True):
        into.copy_(some, non_blocking=True)


def _queued_seconds(device: Device, target: torch.Tensor, source: torch.Tensor) -> float:
    """Return the seconds until the host goes on after it has queued a copy."""
    found = []
    for _ in range(4):
        device.synchronize()
        begun = time.perf_counter()
        _copy(target, source)
        found.append(time.perf_counter() - begun)
    device.synchronize()
    return min(found)


def _room(device: Device, target: torch.Tensor, source: torch.Tensor) -> int:
    """Return how many small copies, each with an event, a busy stream takes until one call waits for another's end."""
    stream = device.kind.new_stream(device.device)
    events: list[DeviceEvent] = []
    device.synchronize()
    with device.kind.use(device.device, stream):
        _copy(target, source)
        while len(events) < _MOST_COPIES:
            begun = time.perf_counter()
            target[:_SMALL_BYTES].copy_(source[:_SMALL_BYTES], non_blocking=True)
            events.append(device.kind.record(stream))
            if time.perf_counter() - begun > _WAITS_S:
                break
    device.synchronize()
    return len(events)


def _registration(device: Device, segment: Segment) -> Iterator[Figure]:
    """Register the segment while another thread launches kernels."""
    longest = _LongestLaunch(device)
    time.sleep(0.5)
    longest.take()
    time.sleep(0.5)
    usual = longest.take()
    begun = time.perf_counter()
    pinned = PinnedMemory(segment, range(0, segment.nbytes, _CHUNK_BYTES), device.device)
    took = time.perf_counter() - begun
    stalled = longest.take()
    longest.end()
    pinned.close()
    yield Figure("registration of a slot", took / (segment.nbytes / 2**30), "s/GiB", at_most=0.15)
    yield Figure("longest launch of another thread, usually", usual * 1e3, "ms")
    yield Figure("longest launch of another thread during registration", stalled * 1e3, "ms", at_most=10)


class _LongestLaunch:
    """Launches kernels on a thread of its own, and knows how long the slowest launch took."""

    def __init__(self, device: Device) -> None:
        self._longest, self._ended = 0.0, False
        self._thread = threading.Thread(target=self._run, args=(device,))
        self._thread.start()

    def take(self) -> float:
        """Return the seconds of the slowest launch since the last call."""
        longest, self._longest = self._longest, 0.0
        return longest

    def end(self) -> None:
        """Stop the thread."""
        self._ended = True
        self._thread.join()

    def _run(self, device: Device) -> None:
        with kinds.use(device.device):
            tensor = torch.zeros(1, device=device.device).add_(1)  # from now on the kernel is loaded
            device.synchronize()
            for number in iter(int, None):
                begun = time.perf_counter()
                tensor.add_(1)
                self._longest = max(self._longest, time.perf_counter() - begun)
                if self._ended:
                    break
                if number % 16 == 0:
                    device.synchronize()
                time.sleep(0)


def _writes(device: Device, segment: Segment, budget: Budget) -> Iterator[Figure]:
    """Write the slot to the disk past the page cache, registered and not, in turns."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-") as folder:
        for _ in range(_WRITE_ROUNDS):
            if seconds[True] and budget.left < 3 * (max(seconds[True]) + max(seconds[False])):
                break
            for registered, found in seconds.items():
                cuts = range(0, segment.nbytes, _CHUNK_BYTES)
                pinned = PinnedMemory(segment, cuts, device.device) if registered else None
                found.append(_write(segment, f"{folder}/slot"))
                if pinned is not None:
                    pinned.close()
    rates = {each: tuple(segment.nbytes / one / 1e9 for one in found) for each, found in seconds.items()}
    yield Figure("direct write from a slot, not registered", median(rates[False]), "GB/s", samples=rates[False])
    yield Figure("direct write from a slot, registered", median(rates[True]), "GB/s", samples=rates[True])
    by = median(rates[True]) / median(rates[False])
    yield Figure("write from a registered slot, by one that is not", by, at_least=0.9)


def _write(segment: Segment, path: str) -> float:
    begun = time.perf_counter()
    file = LocalFile(path, direct=True)

    def write(number: int) -> None:
        for offset in range(number * WRITE_BYTES, segment.nbytes, WRITE_THREADS * WRITE_BYTES):
            file.write(segment.view[offset : offset + WRITE_BYTES], offset)

    with ThreadPoolExecutor(WRITE_THREADS) as pool:
        list(pool.map(write, range(WRITE_THREADS)))
    file.sync()
    file.close()
    took = time.perf_counter() - begun
    os.unlink(path)
    return took
