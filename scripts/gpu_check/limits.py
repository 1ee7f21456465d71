"""The part ``limits``: how fast the link is, what pinning costs, and how near to the link saves come."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.devices import kinds
from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.engine.engine import Engine
from asyncckpt.shm.segment import Segment
from gpu_check.device import Device
from gpu_check.figures import Figure

_BYTES = 4 << 30
_CHUNK_BYTES = 64 << 20
_LEAST_GB_S = 45.0
_SAVES = 5
_LIMIT_S = 300.0


def measure(device: Device, scale: float) -> Iterator[Figure]:
    """The link first, as all else is measured by it."""
    nbytes = max(_CHUNK_BYTES, int(_BYTES * scale))
    source = torch.ones(nbytes, dtype=torch.uint8, device=device.device)
    with closing(Segment.create("asyncckpt-gpu-check", nbytes)) as segment:
        segment.touch()
        yield from _registration(device, segment)
        link = yield from _link(device, segment, source)
    del source
    yield from _saves(device, scale, link)


def _registration(device: Device, segment: Segment) -> Iterator[Figure]:
    if device.pinner is None:
        yield Figure("registration", "this kind of device has none")
        return
    longest = _LongestLaunch(device)
    time.sleep(0.5)
    usual = longest.take()
    begun = time.perf_counter()
    pinned = PinnedMemory(segment, range(0, segment.nbytes, _CHUNK_BYTES), device.device)
    took = time.perf_counter() - begun
    stalled = longest.take()
    longest.end()
    pinned.close()
    yield Figure("registration of memory", took / (segment.nbytes / 2**30), "s/GiB", at_most=0.15)
    yield Figure("longest launch of another thread, usually", usual * 1e3, "ms")
    yield Figure("longest launch of another thread during registration", stalled * 1e3, "ms", at_most=10)


class _LongestLaunch:
    """Launches kernels on a thread of its own, and knows how long the slowest launch took."""

    def __init__(self, device: Device) -> None:
        self._longest, self._ended = 0.0, False
        self._thread = threading.Thread(target=self._run, args=(device,))
        self._thread.start()

    def take(self) -> float:
        """Of those since the last call."""
        longest, self._longest = self._longest, 0.0
        return longest

    def end(self) -> None:
        self._ended = True
        self._thread.join()

    def _run(self, device: Device) -> None:
        with kinds.use(device.device):
            tensor = torch.zeros(1, device=device.device)
            for number in iter(int, None):
                begun = time.perf_counter()
                tensor.add_(1)
                self._longest = max(self._longest, time.perf_counter() - begun)
                if self._ended:
                    break
                if number % 16 == 0:
                    device.synchronize()
                time.sleep(0)


def _link(device: Device, segment: Segment, source: torch.Tensor) -> Generator[Figure, None, float]:
    """Returns bytes a second into memory of ours."""
    nbytes = source.numel()
    pinned = PinnedMemory(segment, range(0, nbytes, _CHUNK_BYTES), device.device)
    ours = nbytes / _copied_in_chunks(device, segment, source)
    pinned.close()
    yield Figure("copy into our memory, in chunks of 64 MiB", ours / 1e9, "GB/s", at_least=_LEAST_GB_S)
    try:
        torchs = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        yield Figure("torch's pinned memory", f"there is none: {error}")
        return ours
    theirs = nbytes / device.time(lambda: torchs.copy_(source, non_blocking=True))
    yield Figure("copy into torch's pinned memory, at once", theirs / 1e9, "GB/s")
    yield Figure("ours by that", ours / theirs, at_least=0.95)
    return ours


def _copied_in_chunks(device: Device, segment: Segment, source: torch.Tensor) -> float:
    target = torch.frombuffer(segment.view, dtype=torch.uint8)

    def copy() -> None:
        for into, some in zip(torch.split(target, _CHUNK_BYTES), torch.split(source, _CHUNK_BYTES), strict=True):
            into.copy_(some, non_blocking=True)

    return device.time(copy)


def _saves(device: Device, scale: float, link: float) -> Iterator[Figure]:
    """Of states of several shapes: how long the caller is held, by what the bytes take on the link, and the CPU."""
    gib, many = 2 * scale, int(25_000 * min(scale, 1.0))
    for name, state, most, most_ms, most_cpu_ms in (
        ("400 tensors", _uniform(device, 400, gib), 1.05, 3.0, None),
        ("10,000 tensors", _uniform(device, 10_000, gib), 1.3, 10.0, None),
        ("1,000 parameters with AdamW's state", _adamw(device, 1_000, gib), 1.3, 10.0, None),
        (f"{many:,} parameters with AdamW's state", _adamw(device, many, gib), None, 5.0, 60.0),
    ):
        nbytes = sum(each.nbytes for each in state.values() if each.device == device.device)
        copied, _ = _held(state, overlap=False)
        yield Figure(f"{name}: save, by the link", copied * link / nbytes, at_most=most)
        held, cpu = _held(state, overlap=True)
        yield Figure(f"{name}: overlapped save holds the caller", held * 1e3, "ms", at_most=most_ms)
        yield Figure(f"{name}: CPU of the process until it is staged", cpu * 1e3, "ms", at_most=most_cpu_ms)


def _held(state: dict[str, Any], *, overlap: bool) -> tuple[float, float]:
    """The medians of the seconds in which ``save`` has not returned, and of those of CPU until all is staged."""
    held, cpu = [], []
    with (
        tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-") as root,
        Engine(Config(overlap=overlap, linger=0), alone=True) as engine,
    ):
        engine.prepare(state)
        for number in range(_SAVES + 1):
            begun, used = time.perf_counter(), time.process_time()
            save = engine.save(Path(root, str(number % 2)), state, existing="replace")
            held.append(time.perf_counter() - begun)
            save.wait_staged(_LIMIT_S)
            cpu.append(time.process_time() - used)
            save.result(_LIMIT_S)
    return statistics.median(held[1:]), statistics.median(cpu[1:])


def _uniform(device: Device, count: int, gib: float) -> dict[str, torch.Tensor]:
    elements = max(1, int(gib * 2**30 / count / 4))
    return {f"w{number}": torch.ones(elements, device=device.device) for number in range(count)}


def _adamw(device: Device, count: int, gib: float) -> dict[str, torch.Tensor]:
    """Parameters in bfloat16, their moments in float32, and the steps on the host, where AdamW has them."""
    elements = max(1, int(gib * 2**30 / count / 10))
    state: dict[str, torch.Tensor] = {}
    for number in range(count):
        state[f"{number}.parameter"] = torch.ones(elements, dtype=torch.bfloat16, device=device.device)
        state[f"{number}.exp_avg"] = torch.ones(elements, device=device.device)
        state[f"{number}.exp_avg_sq"] = torch.ones(elements, device=device.device)
        state[f"{number}.step"] = torch.ones(())
    return state
