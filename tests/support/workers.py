"""Workers of a test: how they fail, and how they go."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncckpt.errors import JobTakenError
from asyncckpt.link import endpoint
from asyncckpt.link import process as worker_process
from asyncckpt.link.takeover import Takeover
from asyncckpt.protocol.trainer import TrainerSaves

FAULTY = str(Path(__file__).with_name("faulty_worker.py"))
"""The script, for ``worker_process.command``."""

Faulty = Callable[[str], None]


def stop(pid: int) -> None:
    """Stop a process, and return when it is: the signal alone lets its threads run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while any(_state(task) not in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "T"  # the thread has ended: it does nothing any more


def wait_reached(gate: Path) -> None:
    """Wait until a faulty worker has come to where it stops or waits."""
    deadline = time.monotonic() + 60
    while not Path(f"{gate}.reached").exists():
        assert time.monotonic() < deadline, "the worker does not get to its fault"
        time.sleep(0.005)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def overdue(gate: Path) -> Iterator[None]:
    """From when a faulty worker has come to its fault, whatever it does not say at once is too late."""
    wait_reached(gate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerSaves, "_is_overdue", lambda *_: True)
        yield


def send_away(runtime: Path) -> None:
    """Have the workers leave that linger; nothing of them may stay."""
    deadline = time.monotonic() + 60
    while runtime.exists():
        for lock in runtime.glob("*.lock"):
            takeover = Takeover.find(lock.stem, 30, worker_process.detached_workers())
            if takeover is not None:
                _retire(takeover, lock.stem)
            else:
                with contextlib.suppress(JobTakenError):  # it is just leaving
                    endpoint.Endpoint(lock.stem, 0).close()  # it was killed; whoever has the name next clears up
        # A worker without an endpoint waits for that of another, or is about to leave.
        if not _is_looked_at(runtime):
            left = {path for path in runtime.glob("*") if path.suffix not in (".log", endpoint.ROOT_LOCK)}
            if not left:  # else one has just ended, which had its lock a moment ago: the next look clears up
                return
            assert time.monotonic() < deadline, f"left in the runtime folder: {left}"
        assert time.monotonic() < deadline, "workers have not left"
        time.sleep(0.02)


def _retire(takeover: Takeover, name: str) -> None:
    """Have a worker leave. If it does not, say where its threads are."""
    aborted = threading.Event()
    pid = endpoint.peer_pid(takeover._connection)  # in a container it knows itself by another number

    def abort() -> None:
        aborted.set()
        os.kill(pid, signal.SIGABRT)  # the log has its stacks then

    timer = threading.Timer(45, abort)
    timer.start()
    try:
        with takeover:
            takeover.retire(60)
    finally:
        timer.cancel()
        timer.join()
    assert not aborted.is_set(), f"a worker does not leave: {endpoint.take_log(name)}"


def _is_looked_at(runtime: Path) -> bool:
    """Whether there is still a worker to which ``runtime`` is the runtime folder."""
    for process in psutil.process_iter():
        try:
            is_worker = "worker" in " ".join(process.cmdline())
            if is_worker and process.environ().get(endpoint.FOLDER_VARIABLE) == str(runtime):
                return True
        except psutil.Error:
            continue
    return False
