"""Memory budget: how many more bytes this host and this container can give."""

from __future__ import annotations

from pathlib import Path

import psutil

from asyncckpt.errors import OutOfMemoryError

# Memory left for all other processes. Taking the last page of a host invokes the kernel's OOM killer, not an error.
RESERVE_BYTES = 256 << 20
_CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


def available_bytes(cgroup_root: Path = _CGROUP) -> int:
    """Return the bytes that can be taken now: the minimum over the host and each enclosing cgroup.

    Raises ``OutOfMemoryError`` if the host does not report its memory.
    """
    try:
        limits = [psutil.virtual_memory().available]
    except OSError as error:
        raise OutOfMemoryError(f"the free memory of this host is not known: {error}") from error
    for folder, limit_name, usage_name in cgroup_folders(cgroup_root):
        limit = _read_number(folder / limit_name)
        usage = _read_number(folder / usage_name)
        if limit is not None and usage is not None:
            # Page cache counts as used, but the kernel gives it back on demand.
            limits.append(limit - usage + _reclaimable(folder / "memory.stat"))
    return max(0, min(limits))


def require(nbytes: int, purpose: str, hint: str, cgroup_root: Path = _CGROUP) -> None:
    """Raise ``OutOfMemoryError`` unless enough memory can be taken.

    Args:
        nbytes: Number of bytes to take. A further ``RESERVE_BYTES`` have to stay free.
        purpose: Purpose of the memory; part of the error's text.
        hint: Advice for the user; part of the error's text.
        cgroup_root: Mount point of the cgroups.
    """
    available = available_bytes(cgroup_root)
    if nbytes + RESERVE_BYTES > available:
        raise OutOfMemoryError(
            f"{purpose} needs {nbytes / _GIB:.2f} GiB of memory and {available / _GIB:.2f} GiB are left"
            f" (of which {RESERVE_BYTES / _GIB:.2f} GiB stay untouched); {hint}"
        )


def cgroup_folders(root: Path = _CGROUP) -> list[tuple[Path, str, str]]:
    """Return this process's memory cgroup and its ancestors, as (folder, limit file, usage file)."""
    found = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path may name folders that only the host sees. The root is then the container's cgroup.
        folder = base / path.lstrip("/")
        for place in [folder, *folder.parents]:
            if place.is_relative_to(base):
                found.append((place, limit, usage))
    return found


def _read_number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _reclaimable(stat: Path) -> int:
    fields = dict(line.partition(" ")[::2] for line in _read(stat).splitlines())
    return sum(int(fields.get(name, 0)) for name in ("active_file", "inactive_file"))


def _read(file: Path) -> str:
    """Return the text of ``file``; empty if the file cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
