"""Test segments, slots and the memory budget."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import PAGE
from support.interrupts import interrupted_everywhere
from support.segments import mapped_segments

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.shm import budget
from asyncckpt.shm.segment import Descriptor, Segment, round_up
from asyncckpt.shm.slots import HEADER_BYTES, MAX_SLOTS, SlotTable, State

_F_ADD_SEALS, _F_SEAL_FUTURE_WRITE = 1033, 0x10  # constants of the kernel


def test_a_segment_is_shared_and_cannot_shrink() -> None:
    with Segment.create("asyncckpt-test", 3 * PAGE + 1) as segment:
        assert segment.nbytes == 3 * PAGE + 1
        segment.touch()
        with Segment.attach(Descriptor.of(os.dup, segment.fileno())) as other:
            segment.view[PAGE] = 7
            assert other.view[PAGE] == 7
            assert other.address != segment.address
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fileno(), PAGE)
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fileno(), 8 * PAGE)


def test_close_is_safe_twice_and_with_a_view_left() -> None:
    segment = Segment.create("asyncckpt-test", PAGE)
    view = segment.view[:10]
    segment.close()
    segment.close()
    view[0] = 1  # the mapping stays while a view exists
    view.release()


def test_a_fork_lets_go_of_it() -> None:
    """The fork keeps read-only segments, so that a reader's fork can still read."""
    with Segment.create("asyncckpt-test", PAGE) as segment:
        mine = Segment.attach(Descriptor.of(os.dup, segment.fileno()))
        read = Segment.attach(Descriptor.of(os.dup, segment.fileno()), writable=False)
        left = mine.view[:10]
        mine.view[0] = 7
        if (pid := os.fork()) == 0:
            os._exit(0 if mine.closed and segment.closed and mine.fileno() < 0 and read.view[0] == 7 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert left[0] == 7 and not mine.closed
        left.release()
        mine.close()
        read.close()


# Python closes the descriptor and warns about it. It also warns about an exception in ``__del__``.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_at_any_instruction_leaves_nothing() -> None:
    with Segment.create("asyncckpt-test", PAGE) as segment:
        nbytes, fd = mapped_segments(), segment.fileno()
        interrupted = interrupted_everywhere(lambda: Segment.attach(Descriptor.of(os.dup, fd)).close(), "shm/")
        for tried, _ in enumerate(interrupted):
            assert mapped_segments() == nbytes, tried
        assert tried > 100


def test_touch_takes_the_memory() -> None:
    with Segment.create("asyncckpt-test", 64 * PAGE) as segment:
        assert os.fstat(segment.fileno()).st_blocks == 0
        segment.touch()
        assert os.fstat(segment.fileno()).st_blocks * 512 == 64 * PAGE


def test_slots_start_free_and_keep_their_state() -> None:
    table = SlotTable(memoryview(bytearray(HEADER_BYTES)))
    assert all(table.state(slot) is State.FREE for slot in range(MAX_SLOTS))
    table.take(3, save_id=17)
    assert (table.state(3), table.save_id(3)) == (State.STAGING, 17)
    table.set(3, State.STAGED)
    assert (table.state(3), table.save_id(3), table.state(2)) == (State.STAGED, 17, State.FREE)
    table.close()


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_round_up(nbytes: int, rounded: int) -> None:
    assert round_up(nbytes, PAGE) == rounded


def _cgroup(root: Path, limit: int, used: int, cached: int) -> None:
    for base, names in (
        (root, ("memory.max", "memory.current")),
        (root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        base.mkdir(parents=True, exist_ok=True)
        (base / names[0]).write_text(f"{limit}\n")
        (base / names[1]).write_text(f"{used}\n")
        (base / "memory.stat").write_text(f"anon 1\nactive_file {cached}\ninactive_file 0\n")


def test_the_budget_heeds_the_cgroup(tmp_path: Path) -> None:
    _cgroup(tmp_path, limit=1 << 30, used=900 << 20, cached=100 << 20)
    assert budget.available_bytes(tmp_path) == (1 << 30) - (800 << 20)
    assert budget.available_bytes(tmp_path / "none") > budget.available_bytes(tmp_path)


def test_too_little_memory_says_how_much_and_what_to_do(tmp_path: Path) -> None:
    _cgroup(tmp_path, limit=1 << 30, used=512 << 20, cached=0)
    budget.require(200 << 20, "staging", "use fewer slots", tmp_path)
    with pytest.raises(OutOfMemoryError, match=r"staging needs 0.49 GiB .* 0.50 GiB are left .* use fewer slots"):
        budget.require(500 << 20, "staging", "use fewer slots", tmp_path)


SMALL = """
import os, sys, torch
from asyncckpt.checkpointer import Checkpointer
os.environ["ASYNC_CKPT_RUNTIME_DIR"] = sys.argv[1] + "/runtime"
state = {"w": torch.arange(50_000_000.0)}
with Checkpointer(sys.argv[1]) as checkpointer:
    save = checkpointer.save(1, state)
    assert not os.listdir("/dev/shm")  # so there is nothing that a log-out (RemoveIPC) could remove
    save.result(60)
    checkpointer.load(into := {"w": torch.zeros(50_000_000)})
assert torch.equal(into["w"], state["w"])
print("done")
"""


def test_a_small_dev_shm_makes_no_difference(tmp_path: Path) -> None:
    """A container may have only 64 MB there. The state has 200 MB."""
    command = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1" "$2"'
    trial = subprocess.run(["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"], capture_output=True)
    if trial.returncode:
        pytest.skip("no file system may be mounted here")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, SMALL, str(tmp_path)],
        stdout=subprocess.PIPE,
        timeout=200,
        cwd="/",
        check=True,
    )
    assert done.stdout == b"done\n"


def test_memory_that_the_kernel_does_not_take_back() -> None:
    with Segment.create("asyncckpt-test", PAGE) as segment:
        fcntl.fcntl(segment.fileno(), _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        with pytest.raises(OutOfMemoryError, match="cannot be given back: Operation not permitted"):
            segment.give_back()


def test_a_close_that_fails_is_no_error() -> None:
    descriptor = Descriptor.of(os.open, "/dev/null", os.O_RDONLY)
    os.close(descriptor.fileno())
    descriptor.close()
    assert descriptor.closed
