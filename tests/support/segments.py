"""The shared-memory segments of asyncckpt that a process has mapped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def mapped_segments(pid: int | None = None) -> dict[int, int]:
    """Return the mapped bytes of each segment by its inode. ``pid``: the process; None: this process."""
    nbytes: Counter[int] = Counter()
    for line in Path(f"/proc/{pid or 'self'}/maps").read_text().splitlines():
        if "/memfd:asyncckpt" in line:
            addresses, _, _, _, inode, *_ = line.split()
            begin, end = (int(address, 16) for address in addresses.split("-"))
            nbytes[int(inode)] += end - begin
    return nbytes
