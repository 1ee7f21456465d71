"""The part ``env``: the machine that all other figures are read against."""

from __future__ import annotations

import resource
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from bench import machine
from bench.limits import WriteLimit

import asyncckpt
from asyncckpt.shm.memcpy import compiled
from gpu_check.budget import Budget
from gpu_check.figures import Figure
from gpu_check.task import Task

DISK = "direct write to the disk"
_WRITE_BYTES = 1 << 30
_WRITES = 4
_QUERIES = {
    "driver": "driver_version",
    "PCIe generation": "pcie.link.gen.current",
    "PCIe generation, at most": "pcie.link.gen.max",
    "PCIe width": "pcie.link.width.current",
}
_IN_C = ("shm/_copies", "planning/_forms")
_PEERS = ("nvidia-resiliency-ext", "torch_checkpointing", "multiprocess", "isal", "cryptography")


def measure(task: Task) -> Iterator[Figure]:
    """Describe the machine, and measure its disk."""
    device = task.device
    for name, text in machine.describe(tempfile.gettempdir()).items():
        yield Figure(name, text)
    yield Figure("device", device.module.get_device_name() if device.is_real else device.type)
    yield Figure("devices", device.module.device_count())
    if device.type == "cuda":
        yield from _driver()
    yield Figure("cores", len(psutil.Process().cpu_affinity() or ()))
    yield Figure("host memory, free", psutil.virtual_memory().available / 2**30, "GiB")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Figure("RLIMIT_MEMLOCK", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB")
    for name in ("enabled", "shmem_enabled"):
        yield Figure(f"transparent_hugepage/{name}", _chosen(Path("/sys/kernel/mm/transparent_hugepage", name)))
    yield Figure("/dev/shm", psutil.disk_usage("/dev/shm").total / 2**30, "GiB")
    beside = Path(asyncckpt.__file__).parent
    missing = [name for name in _IN_C if compiled(str(beside / name), Path(name).name) is None]
    yield Figure("parts in C", f"not compiled: {', '.join(missing)}" if missing else "compiled")
    for name in _PEERS:
        yield Figure(name, _version(name))
    yield from _disk(task.scale, task.budget)


def _driver() -> Iterator[Figure]:
    """Ask the driver's own tool."""
    command = ["nvidia-smi", "--format=csv,noheader", f"--query-gpu={','.join(_QUERIES.values())}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield Figure("driver", f"nvidia-smi does not answer: {error}")
        return
    for name, value in zip(_QUERIES, said.splitlines()[0].split(","), strict=True):
        yield Figure(name, value.strip())


def _chosen(path: Path) -> str:
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError as error:
        return str(error)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _disk(scale: float, budget: Budget) -> Iterator[Figure]:
    """Write some GiB past the page cache, as far as the budget goes."""
    nbytes = max(1 << 20, int(_WRITE_BYTES * scale))
    with tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-") as folder:
        limit = WriteLimit(nbytes, folder)
        seconds: list[float] = []
        while len(seconds) < _WRITES and (not seconds or budget.left > 2 * max(seconds)):
            seconds.append(limit.direct_write())
    rates = tuple(nbytes / each / 1e9 for each in seconds)
    yield Figure(DISK, sum(rates) / len(rates), "GB/s", samples=rates)
    yield Figure("torch's threads", torch.get_num_threads())
