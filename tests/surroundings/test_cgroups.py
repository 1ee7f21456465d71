"""A container with too little memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from support.surroundings import Trainings, judge, refused

MIB = 1 << 20
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def _cgroup() -> Iterator[tuple[Path, str]]:
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


def _enter(folder: Path, pid: int = 0) -> None:
    (folder / "cgroup.procs").write_text(str(pid))


def test_too_little_memory_for_an_image(root: Path) -> None:
    """The states of the training have 384 MiB, beside torch. An image has 128 MiB, and 256 MiB have to stay free."""
    with _cgroup() as (folder, limit):
        (folder / limit).write_text(str(800 * MIB))
        refused(root, text="GiB are left", in_child=partial(_enter, folder), mib=128, steps=[1])


def test_the_worker_is_killed_for_its_memory(root: Path, tmp_path: Path) -> None:
    """The save that is under way fails, and the next one starts another worker."""
    with _cgroup() as (folder, limit):
        trainings = Trainings.start(root, hold=str(tmp_path / "hold"), steps=[1, 2, 3], single=False)
        try:
            hold = trainings.held()
            (training,) = psutil.Process(trainings.process.pid).children()
            (worker,) = training.children()
            (folder / limit).write_text("0")
            _enter(folder, worker.pid)
            hold.unlink()
            (report,) = trainings.end()
        finally:
            trainings.kill()
    assert report.saved == [1, 3] and report.loaded == [3], report
    assert len(report.errors) == 1 and "was killed by SIGKILL" in report.errors[0], report
    judge(root, [1, 3])
