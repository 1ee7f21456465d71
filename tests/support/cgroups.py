"""Memory cgroups for tests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_cgroup() -> Iterator[tuple[Path, str]]:
    """Make a cgroup for this test. Yields its folder, and the name of the file of its limit."""
    is_v1 = _V1.is_dir()
    folder = (_V1 if is_v1 else _V2) / f"asyncckpt-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        limit = "memory.limit_in_bytes" if is_v1 else "memory.max"
        if not (folder / limit).exists():
            pytest.skip("cgroups have no limits of memory here")
        yield folder, limit
    finally:
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # processes are just ending
                folder.rmdir()
            time.sleep(0.02)


def enter(folder: Path, pid: int = 0) -> None:
    """Move a process to the cgroup; 0: this one."""
    (folder / "cgroup.procs").write_text(str(pid))
