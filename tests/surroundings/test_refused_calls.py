"""System calls that a container or an old kernel refuses: the training goes on without, or the error names the call."""

from __future__ import annotations

import errno
import logging
import signal
from functools import partial
from pathlib import Path

import pytest
from support.killed_training import begin, go_on, judge
from support.ranks import alone, say
from support.seccomp import CALLS, need_seccomp, refuse
from support.surroundings import mounted, refused, trained

from asyncckpt.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("forkserver")

_REFUSALS = pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
_NEEDED = "fcntl(F_OFD_SETLK)"
_SHM_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def filters() -> None:
    """Skip the tests where no call can be refused."""
    need_seccomp()


def _begin(call: str, code: int, root: str) -> None:
    refuse(call, code)
    begin(root, publishes=call != "flock")  # readers find a publisher by its lock


def _go_on(call: str, code: int, root: str) -> None:
    refuse(call, code)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncckpt").addHandler(handler)
    say((go_on(root), "\n".join(told)))


def _train(call: str, code: int, root: Path) -> tuple[str, str]:
    """Train, die, go on, and judge. Return the source of the state, and the warnings."""
    assert alone(_begin, call, code, str(root))[0] == -signal.SIGKILL
    ended, told = alone(_go_on, call, code, str(root))
    assert ended == 0
    judge(root)
    source, warnings = told
    return source, warnings


@_REFUSALS
@pytest.mark.parametrize("call", sorted(CALLS.keys() - {_NEEDED, "flock"}))
def test_of_calls_that_can_be_done_without(root: Path, call: str, code: int) -> None:
    source, warnings = _train(call, code, root)
    assert source == "memory"
    assert ("keeps its priority" in warnings) == (call in ("setpriority", "ioprio_set"))


@_REFUSALS
def test_without_locks_there_is_no_load_from_memory(root: Path, code: int) -> None:
    source, warnings = _train("flock", code, root)
    assert source == "storage"
    assert "another job can save there" in warnings and "allow flock" in warnings


def _needs_locks_of_slots(code: int, root: str) -> None:
    refuse(_NEEDED, code)
    with pytest.raises(CheckpointError, match=r"F_OFD_SETLK.*seccomp"):
        begin(root)


@_REFUSALS
def test_without_locks_of_slots_nothing_is_saved(root: Path, code: int) -> None:
    assert alone(_needs_locks_of_slots, code, str(root))[0] == 0
    assert not [path for path in root.iterdir() if path.name != "asyncckpt.lock"]


def test_a_small_dev_shm_without_memfd(root: Path, tmp_path: Path) -> None:
    """A large save fails by an error, and a smaller one succeeds. No process dies of a bus error, or leaves a name."""
    small = mounted(root, f"mount -t tmpfs -o size={_SHM_BYTES} tmpfs /dev/shm")
    without_memfd = partial(refuse, "memfd_create", errno.EPERM)
    refused(root, *small, text="--shm-size", in_child=without_memfd, mib=2 * _SHM_BYTES >> 20)
    names = tmp_path / "names"
    listed = ("sh", "-c", f'"$0" "$@"; code=$?; ls /dev/shm > "{names}"; exit $code')
    trained(root.with_name("fits"), *small, *listed, in_child=without_memfd)
    assert names.read_text() == ""


def test_without_memfd_and_dev_shm(root: Path) -> None:
    none = mounted(root, "mount -t tmpfs -o ro tmpfs /dev/shm")
    refused(root, *none, text="memfd_create is refused, too", in_child=partial(refuse, "memfd_create", errno.ENOSYS))
