"""Stop, fail and retire the workers of a test."""

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
"""The script of a faulty worker, for ``worker_process.command``."""

Faulty = Callable[[str], None]


def stop(pid: int) -> None:
    """Stop a process, and wait until all its threads have stopped. After the signal they still run for a moment."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while any(_state(task) not in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "T"  # the thread has ended


def wait_reached(gate: Path) -> None:
    """Wait until a faulty worker stops or waits at its point."""
    deadline = time.monotonic() + 60
    while not Path(f"{gate}.reached").exists():
        assert time.monotonic() < deadline, "the worker does not get to its fault"
        time.sleep(0.005)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def overdue(gate: Path) -> Iterator[None]:
    """Wait until a faulty worker reaches its fault. In the block, the trainer treats pending saves as overdue."""
    wait_reached(gate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerSaves, "_is_overdue", lambda *_: True)
        yield


def send_away(runtime: Path) -> None:
    """Retire the lingering workers, and check that they leave nothing behind."""
    deadline = time.monotonic() + 60
    while runtime.exists():
        for lock in runtime.glob("*.lock"):
            takeover = Takeover.find(lock.stem, 30, worker_process.detached_workers())
            if takeover is not None:
                _retire(takeover, lock.stem)
            else:
                with contextlib.suppress(JobTakenError):  # the worker is just leaving
                    endpoint.Endpoint(lock.stem, 0).close()  # killed: the next owner of the name clears up
        # A worker without an endpoint waits for another worker's endpoint, or is about to leave.
        if not _is_looked_at(runtime):
            left = {path for path in runtime.glob("*") if path.suffix not in (".log", endpoint.ROOT_LOCK)}
            if not left:  # otherwise a worker has just released its lock and ended: the next round clears up
                return
            assert time.monotonic() < deadline, f"left in the runtime folder: {left}"
        assert time.monotonic() < deadline, "workers have not left"
        time.sleep(0.02)


def _retire(takeover: Takeover, name: str) -> None:
    """Retire a worker. If it does not leave, fail with the stacks of its threads."""
    aborted = threading.Event()
    pid = endpoint.peer_pid(takeover._connection)  # in a container the worker's own number differs

    def abort() -> None:
        aborted.set()
        os.kill(pid, signal.SIGABRT)  # writes the stacks to the log

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
    """Return whether a worker with the runtime folder ``runtime`` is still there."""
    for process in psutil.process_iter():
        try:
            is_worker = "worker" in " ".join(process.cmdline())
            if is_worker and process.environ().get(endpoint.FOLDER_VARIABLE) == str(runtime):
                return True
        except psutil.Error:
            continue
    return False
