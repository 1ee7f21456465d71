"""Describe the machine of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch


def describe(folder: str) -> dict[str, str]:
    """Return the hardware, the system, and the disk of ``folder``."""
    found = {
        "CPU": f"{_cpu()}, {psutil.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "disk": _disk(folder),
        "system": f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}",
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.machine()


def _disk(folder: str) -> str:
    """Return the file system of ``folder``, and the kind of its device."""
    inside = [part for part in psutil.disk_partitions(all=True) if _is_inside(folder, part.mountpoint)]
    if not inside:
        return "unknown"
    part = max(inside, key=lambda each: len(each.mountpoint))
    name = os.path.basename(os.path.realpath(part.device))
    block = Path("/sys/class/block", name)
    if not block.exists():
        return part.fstype
    # The folder of a partition is inside that of its disk.
    disk = block if (block / "queue").exists() else block.resolve().parent
    if name.startswith("vd"):
        return f"{part.fstype} on a virtual disk"
    spins = (disk / "queue" / "rotational").read_text().strip() == "1"
    kind = "NVMe" if name.startswith("nvme") else "disk" if spins else "SSD"
    return f"{part.fstype} on {kind}"


def _is_inside(folder: str, mountpoint: str) -> bool:
    return os.path.commonpath([os.path.realpath(folder), mountpoint]) == mountpoint
