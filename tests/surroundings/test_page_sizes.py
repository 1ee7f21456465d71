"""Kernels with other sizes of pages, simulated: each multiple of a page of 64 KiB is one of 4 KiB, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.killed_training import judge

# Imported by each process before all else. Pages of other processes in /proc are those of the real kernel.
_PATCH = """
import mmap
mmap.PAGESIZE = {page}
from asyncckpt.shm import segment
segment.HUGE_PAGE = {huge}
real = segment._libc

class Checked:
    def __getattr__(self, name):
        return getattr(real, name)

    def madvise(self, address, nbytes, advice):
        assert address.value % {page} == 0, (address, advice)
        return real.madvise(address, nbytes, advice)

    def fallocate(self, fd, mode, begin, nbytes):
        assert begin % {page} == 0 and nbytes % {page} == 0, (begin, nbytes)
        return real.fallocate(fd, mode, begin, nbytes)

segment._libc = Checked()
"""
_TRAIN = """
import sys
from asyncckpt.weights import lease
lease.PAGE = {real}
from support.killed_training import begin, go_on
print({do}(sys.argv[1]))
"""
_MEMORY = """
import os
from asyncckpt.shm.huge import huge_buffer, is_huge, take_huge
from asyncckpt.shm.segment import HUGE_PAGE, PAGE, Segment

def taken():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = taken()
buffer = huge_buffer(4 << 20)
assert taken() - before < 8 << 20, "a huge page for a small buffer"
with Segment.create("small", 10 * PAGE) as small, Segment.create("large", 3 * HUGE_PAGE + 5 * PAGE) as large:
    assert large.address % HUGE_PAGE == small.address % PAGE == 0
    take_huge(small, 0, small.nbytes)
    take_huge(large, HUGE_PAGE - PAGE, 2 * HUGE_PAGE - PAGE)  # no whole huge page
    assert not large.taken_bytes and not small.taken_bytes
    large.touch(3 * PAGE)
    assert large.taken_bytes == 3 * PAGE and is_huge(large)
    large.give_back(PAGE)
    assert large.taken_bytes == PAGE
print("done")
"""

_SIZES = pytest.mark.parametrize(("page", "huge"), [(64 << 10, 512 << 20), (4 << 10, 2 << 20)])


def _run(code: str, page: int, huge: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if page % os.sysconf("SC_PAGE_SIZE"):
        pytest.skip("the pages of this kernel are larger")
    (folder / "sitecustomize.py").write_text(_PATCH.format(page=page, huge=huge))
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )


@_SIZES
def test_trainings(root: Path, tmp_path: Path, page: int, huge: int) -> None:
    """Save, publish and read weights, die, load from memory, save another structure, load from storage."""
    real = os.sysconf("SC_PAGE_SIZE")
    begun = _run(_TRAIN.format(real=real, do="begin"), page, huge, tmp_path, str(root))
    assert begun.returncode == -signal.SIGKILL
    gone_on = _run(_TRAIN.format(real=real, do="go_on"), page, huge, tmp_path, str(root))
    assert gone_on.stdout == "memory\n"
    judge(root)


@_SIZES
def test_memory(tmp_path: Path, page: int, huge: int) -> None:
    """Huge pages are for whole huge pages alone, and no memory is taken for less."""
    assert _run(_MEMORY, page, huge, tmp_path).stdout == "done\n"


def test_the_files_are_the_same_for_all(root: Path, tmp_path: Path) -> None:
    """A file has the same bytes on all kernels, so that images may travel."""
    made = []
    for page, huge in ((64 << 10, 512 << 20), (4 << 10, 2 << 20)):
        place = root.with_name(f"pages-{page}")
        place.mkdir(parents=True)
        code = _TRAIN.format(real=os.sysconf("SC_PAGE_SIZE"), do="begin")
        _run(code, page, huge, tmp_path, str(place / "root"))
        made.append((place / "root/step-00000002/__0_0.distcp").read_bytes())
    assert made[0] == made[1]
