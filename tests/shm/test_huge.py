"""Test memory on huge pages. A host without huge pages gives small pages."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.checkpoints import PAGE

from asyncckpt.loading.data_file import read_plain
from asyncckpt.shm import huge
from asyncckpt.shm.huge import is_huge, own_buffer, take_huge
from asyncckpt.shm.segment import HUGE_PAGE, Descriptor, Segment
from asyncckpt.storage import storage_for

_COLLAPSE = 25


def _mapped_huge(segment: Segment) -> int:
    """Return the bytes of the segment that this process maps by huge pages, according to the kernel."""
    entries = re.findall(
        r"^([0-9a-f]+)-.*?^ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    within = range(segment.address, segment.address + segment.nbytes)
    return sum(int(kib) << 10 for begin, kib in entries if int(begin, 16) in within)


@pytest.fixture
def segment() -> Iterator[Segment]:
    """Return a segment of four huge pages and one small page. Skip the test if the host has no huge pages."""
    with Segment.create("asyncckpt-test", 4 * HUGE_PAGE + PAGE) as made:
        with Segment.create("asyncckpt-test", HUGE_PAGE) as tried:
            take_huge(tried, 0, HUGE_PAGE)
            if not _mapped_huge(tried):
                pytest.skip("this host gives shared memory no huge pages")
        yield made


def test_whole_huge_pages_are_taken(segment: Segment) -> None:
    take_huge(segment, PAGE, 3 * HUGE_PAGE + PAGE)
    assert _mapped_huge(segment) == 2 * HUGE_PAGE == segment.taken_bytes
    segment.touch(3 * HUGE_PAGE + PAGE)
    assert segment.taken_bytes == 3 * HUGE_PAGE + PAGE


def test_what_is_small_is_moved_with_what_is_in_it(segment: Segment) -> None:
    data = os.urandom(2 * HUGE_PAGE)
    segment.view[: len(data)] = data
    other = Segment.attach(Descriptor.of(os.dup, segment.fileno()))
    assert not _mapped_huge(segment) and other.view[7] == data[7]
    assert is_huge(segment)
    assert _mapped_huge(segment) == segment.taken_bytes == len(data)  # no more memory is taken
    other.view[HUGE_PAGE] = 77
    assert segment.view[: len(data)] == data[:HUGE_PAGE] + bytes([77]) + data[HUGE_PAGE + 1 :]
    other.close()


def test_what_is_given_back_can_be_taken_again(segment: Segment) -> None:
    segment.touch()
    assert is_huge(segment)
    segment.give_back(HUGE_PAGE + PAGE)
    assert segment.taken_bytes == HUGE_PAGE + PAGE and is_huge(segment)
    take_huge(segment, HUGE_PAGE + PAGE, segment.nbytes)
    segment.touch()
    assert segment.is_taken and is_huge(segment)


@pytest.mark.parametrize("refuses", ["all", "late"])
def test_a_host_that_has_none_left_gives_small_ones(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    advised, collapsed = huge._advise, []

    def advise(address: int, nbytes: int, advice: int) -> bool:
        if advice != _COLLAPSE:
            return advised(address, nbytes, advice)
        collapsed.append(address)
        return refuses == "late" and len(collapsed) == 1

    monkeypatch.setattr(huge, "_advise", advise)
    monkeypatch.setattr(huge, "_AT_ONCE_BYTES", HUGE_PAGE)
    with Segment.create("asyncckpt-test", 4 * HUGE_PAGE) as segment:
        take_huge(segment, 0, segment.nbytes)
        assert len(collapsed) == (2 if refuses == "late" else 1)  # no further pages are requested
        segment.touch()
        assert segment.is_taken and not is_huge(segment)
        ctypes.memset(segment.address, 7, segment.nbytes)


def test_a_host_that_searches_long_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "_LONG_S", 0.0)
    monkeypatch.setattr(huge, "_AT_ONCE_BYTES", HUGE_PAGE)
    with Segment.create("asyncckpt-test", 4 * HUGE_PAGE) as segment:
        take_huge(segment, 0, segment.nbytes)
        assert segment.taken_bytes <= HUGE_PAGE


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_buffer_of_a_thread_that_forks(tmp_path: Path) -> None:
    """The child has a zeroed buffer of its own. The parent's buffer keeps its bytes."""
    (tmp_path / "file").write_bytes(data := os.urandom(3 * PAGE))
    with closing(storage_for(str(tmp_path)).open(str(tmp_path / "file"))) as file:
        assert read_plain(file, 5, len(data)) == data[5:]
        if (child := os.fork()) == 0:
            os._exit(0 if not any(own_buffer(PAGE)) and read_plain(file, 7, len(data)) == data[7:] else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bytes(own_buffer(PAGE)[:PAGE]) == data[:PAGE]
