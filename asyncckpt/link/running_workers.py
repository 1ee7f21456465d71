"""The workers of this user on this host: what each is for, what it waits for, and how one is ended.

They are found by their command lines, so that those are known too that have no endpoint, or do not answer. What a
worker does it says itself, at its endpoint.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias

import psutil

from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.link.endpoint import connect, peer_pid
from asyncckpt.link.endpoint_messages import AskStatus, Retire, WorkerStatus
from asyncckpt.link.messages import send
from asyncckpt.link.process import CommandLine, parse
from asyncckpt.link.takeover import ask, is_running

# How long a worker may take to say what it does, and to end when it is killed.
_ANSWER_S, _END_S = 2.0, 5.0
_POLL_S = 0.05
# Side by side: those that do not answer take their time.
_ASKED_AT_ONCE = 32

Doing: TypeAlias = Literal["serving", "writing", "lingering", "leaving", "stopped", "unknown"]
"""What a worker does: it waits for what its trainer wants next; it writes; its trainer is gone, and it waits for
another; it is about to end; it was stopped by a signal; or it does not say."""


@dataclass(frozen=True, kw_only=True)
class RunningWorker:
    """A worker, as it was found.

    ``command_line``: what it was started for, and by whom. ``has_trainer``: whether its trainer lives, or may live.
    ``nbytes``: of shared memory, taken. ``age``: in seconds. ``status``: what it says itself; None: ``trouble`` says
    why it does not.
    """

    process: psutil.Process
    command_line: CommandLine
    has_trainer: bool
    nbytes: int
    age: float
    doing: Doing
    status: WorkerStatus | None
    trouble: str | None

    @property
    def pid(self) -> int:
        """Its process id, by which users name it."""
        return self.process.pid


def running_workers() -> list[RunningWorker]:
    """All that this process can see, the oldest first. Takes a few seconds where some do not answer."""
    started = []
    for process in psutil.process_iter():
        try:
            if process.uids().effective == os.geteuid() and (said := parse(process.cmdline())) is not None:
                started.append((process, said))
        except psutil.Error:  # it has just ended
            continue
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        found = pool.map(lambda each: _look(*each), started)
        return sorted((each for each in found if each is not None), key=lambda each: -each.age)


def end_worker(worker: RunningWorker, timeout: float, *, force: bool = False) -> None:
    """Have a worker end, and wait until it has. It writes first what it has to write.

    Args:
        worker: As it was found.
        timeout: Seconds to wait; it ends by itself later, where that is too short.
        force: End it at once, whatever it does, also where its trainer lives. What is not written is lost.

    Raises:
        CheckpointError: It is not ended, because its trainer lives, or because it is stopped.
        SaveTimeoutError: It still writes, or cannot even be killed.
    """
    if force:
        _signal(worker, kill=True)
        if not _wait_end(worker, _END_S):
            raise SaveTimeoutError(f"the worker {worker.pid} cannot be killed: it is in a call to storage")
        return
    if worker.doing == "stopped":
        raise CheckpointError(
            f"the worker {worker.pid} is stopped by a signal, and writes nothing: have it go on (kill -CONT"
            f" {worker.pid}), or kill it (--force), and what it has not written is lost"
        )
    if worker.has_trainer:
        raise CheckpointError(
            f"the trainer {worker.command_line.trainer} of the worker {worker.pid} lives, and saves by it: end the"
            " trainer; or kill the worker (--force), which fails the save under way, and the trainer starts another"
        )
    deadline = time.monotonic() + timeout
    # One without an endpoint that answers understands SIGTERM: as long as it writes, it takes no notice of that.
    while not (is_asked := _ask_to_retire(worker)):
        _signal(worker, kill=False)
        if _wait_end(worker, min(_ANSWER_S, deadline - time.monotonic())) or time.monotonic() >= deadline:
            break
    if is_asked:
        _wait_end(worker, deadline - time.monotonic())
    if _is_there(worker):
        raise SaveTimeoutError(
            f"the worker {worker.pid} still writes after {timeout:g} s; it ends by itself when all is written, or when"
            " it is killed (--force), and what it has not written is lost"
        )


def _look(process: psutil.Process, said: CommandLine) -> RunningWorker | None:
    """None: it has ended meanwhile."""
    try:
        with process.oneshot():
            state, created = process.status(), process.create_time()
        if state == psutil.STATUS_ZOMBIE:
            return None
        is_stopped = state == psutil.STATUS_STOPPED
        status, trouble = (None, "by a signal") if is_stopped else _ask(process.pid, said)
        has_trainer = _may_have_trainer(process.pid, said.trainer, created) if status is None else status.has_trainer
        nbytes = _shared_memory(process.pid)
    except psutil.Error:
        return None
    return RunningWorker(
        process=process,
        command_line=said,
        has_trainer=has_trainer,
        nbytes=nbytes,
        age=max(0.0, time.time() - created),
        doing="stopped" if is_stopped else _doing(status, trouble, has_trainer=has_trainer),
        status=status,
        trouble=trouble,
    )


def _ask(pid: int, said: CommandLine) -> tuple[WorkerStatus | None, str | None]:
    """Ask a worker for its status. Returns the status, or None and the reason."""
    name = said.options.endpoint
    if name is None:
        return None, None  # nobody finds it but its trainer
    if (connection := connect(name, _ANSWER_S, said.runtime)) is None:
        return None, f"there is nobody at its endpoint in {said.runtime}"
    with connection:
        if peer_pid(connection) != pid:
            return None, "another worker has its endpoint"
        try:
            status: WorkerStatus = ask(connection, AskStatus(), _ANSWER_S, WorkerStatus)
        except CheckpointError as error:
            return None, error.message
        except (EOFError, OSError):
            return None, "it is just leaving"
    return status, None


def _doing(status: WorkerStatus | None, trouble: str | None, *, has_trainer: bool) -> Doing:
    if status is None:
        # Without an endpoint it has nobody to wait for but its trainer.
        return "unknown" if trouble is not None else "serving" if has_trainer else "leaving"
    if status.saving:
        return "writing"
    if status.has_trainer:
        return "serving"
    return "leaving" if status.lingers is None else "lingering"


def _may_have_trainer(worker: int, trainer: int, created: float) -> bool:
    """Whether the ``trainer`` of a worker lives that was ``created`` then and does not say it; where nobody can say,
    it may.
    """
    try:
        if os.readlink(f"/proc/{worker}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return True  # that number is of another container
        # One of that number that came later is another process.
        return is_running(trainer) and psutil.Process(trainer).create_time() <= created
    except (OSError, psutil.Error):
        return False


def _shared_memory(pid: int) -> int:
    """How many bytes of its segments are taken."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it has just closed it
                if os.readlink(entry.path).startswith("/memfd:asyncckpt "):
                    total += entry.stat().st_blocks * 512
    return total


def _ask_to_retire(worker: RunningWorker) -> bool:
    """Whether it was told, by its endpoint."""
    said = worker.command_line
    if said.options.endpoint is None or (connection := connect(said.options.endpoint, _ANSWER_S, said.runtime)) is None:
        return False
    with connection, contextlib.suppress(OSError):
        if peer_pid(connection) == worker.pid:
            send(connection, Retire())
            return True
    return False


def _signal(worker: RunningWorker, *, kill: bool) -> None:
    """psutil looks whether it is still the same process that has the number."""
    with contextlib.suppress(psutil.Error):  # it has ended
        worker.process.kill() if kill else worker.process.terminate()


def _is_there(worker: RunningWorker) -> bool:
    try:
        return worker.process.is_running() and worker.process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_end(worker: RunningWorker, timeout: float) -> bool:
    """Whether it has ended within so many seconds."""
    deadline = time.monotonic() + timeout
    while _is_there(worker):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
