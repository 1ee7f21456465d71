"""The workers of this user on this host: find them, ask them for their status, and end them.

Workers are found by their command lines. So the list has workers without an endpoint, and workers that do not answer.
A worker tells its activity at its endpoint.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias

import psutil

from asyncckpt.budgets import NOTICE_S
from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.link.api import WorkerApi, WorkerStatus
from asyncckpt.link.calls import call, tell
from asyncckpt.link.endpoint import connect, peer_pid, trainer_of
from asyncckpt.link.process import CommandLine, parse
from asyncckpt.link.socket_connection import OtherVersionError
from asyncckpt.link.takeover import is_running
from asyncckpt.threads import wait_until

# Timeout for a worker to tell its status. A person waits for the list, and some workers may never answer.
_ANSWER_S = 2.0
# Number of workers to ask in parallel, because some may not answer.
_ASKED_AT_ONCE = 32

Doing: TypeAlias = Literal["serving", "writing", "lingering", "leaving", "stopped", "unknown"]
"""The activity of a worker: it waits for the next request of its trainer; it writes; it has no trainer, and waits for
one; it is about to end; it was stopped by a signal; or it does not answer."""


@dataclass(frozen=True, kw_only=True)
class RunningWorker:
    """A worker at the time of the look.

    Args:
        process: The process.
        command_line: Its command line.
        trainer: The process id of its trainer; 0: it has none yet, or the trainer is in another container.
        has_trainer: Whether the trainer lives, or may live.
        nbytes: Number of bytes of its shared memory.
        age: Its age in seconds.
        doing: Its activity.
        status: Its answer; None if it does not answer.
        trouble: The reason why it does not answer.
    """

    process: psutil.Process
    command_line: CommandLine
    trainer: int
    has_trainer: bool
    nbytes: int
    age: float
    doing: Doing
    status: WorkerStatus | None
    trouble: str | None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid


def running_workers() -> list[RunningWorker]:
    """Return all workers that this process can see, the oldest first. Takes a few seconds if some do not answer."""
    started = []
    for process in psutil.process_iter():
        try:
            if process.uids().effective == os.geteuid() and (said := parse(process.cmdline())) is not None:
                started.append((process, said))
        except psutil.Error:  # the process has ended just now
            continue
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        found = pool.map(lambda each: _look(*each), started)
        return sorted((each for each in found if each is not None), key=lambda each: -each.age)


def end_worker(worker: RunningWorker, timeout: float, *, force: bool = False) -> None:
    """End a worker, and wait for its end. The worker first writes the staged saves.

    Args:
        worker: The worker.
        timeout: Seconds to wait. Later the worker ends by itself.
        force: Kill the worker, whatever it does, also if its trainer lives. Unwritten saves are lost.

    Raises:
        CheckpointError: The trainer lives, or the worker is stopped by a signal. The worker goes on.
        SaveTimeoutError: The worker still writes, or it cannot even be killed.
    """
    if force:
        _signal(worker, kill=True)
        if not _wait_end(worker, NOTICE_S):
            raise SaveTimeoutError(f"the worker {worker.pid} cannot be killed: it is in a call to storage")
        return
    if worker.doing == "stopped":
        raise CheckpointError(
            f"the worker {worker.pid} is stopped by a signal, and writes nothing: resume it (kill -CONT {worker.pid}),"
            " or kill it (--force), which loses its unwritten saves"
        )
    if worker.has_trainer:
        raise CheckpointError(
            f"the trainer {worker.trainer or '(in another container)'} of the worker {worker.pid} lives, and saves by"
            " it: end the trainer; or kill the worker (--force), which fails the save under way, and the trainer starts"
            " another"
        )
    deadline = time.monotonic() + timeout
    # A worker without an answering endpoint ends on SIGTERM, but ignores the signal while it writes. So send it again.
    while not (is_asked := _ask_to_retire(worker)):
        _signal(worker, kill=False)
        if _wait_end(worker, min(_ANSWER_S, deadline - time.monotonic())) or time.monotonic() >= deadline:
            break
    if is_asked:
        _wait_end(worker, deadline - time.monotonic())
    if _is_there(worker):
        raise SaveTimeoutError(
            f"the worker {worker.pid} still writes after {timeout:g} s; it exits when all is written; --force kills"
            " it, and loses its unwritten saves"
        )


def _look(process: psutil.Process, said: CommandLine) -> RunningWorker | None:
    """Look at a worker. Return None if it has ended meanwhile."""
    try:
        with process.oneshot():
            state, created = process.status(), process.create_time()
        if state == psutil.STATUS_ZOMBIE:
            return None
        is_stopped = state == psutil.STATUS_STOPPED
        status, trouble = (None, "by a signal") if is_stopped else _ask(process.pid, said)
        trainer, since = _trainer(process.pid, said) or (said.trainer, created)
        has_trainer = _may_have_trainer(process.pid, trainer, since) if status is None else status.has_trainer
        nbytes = _shared_memory(process.pid)
    except psutil.Error:
        return None
    return RunningWorker(
        process=process,
        command_line=said,
        trainer=trainer,
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
        return None, None  # only its trainer can reach a worker without an endpoint
    if (connection := connect(name, _ANSWER_S, said.runtime)) is None:
        return None, f"no process listens at its endpoint in {said.runtime}"
    with connection:
        if peer_pid(connection) != pid:
            return None, "another worker has its endpoint"
        try:
            status = call(connection, _ANSWER_S, WorkerApi.status)
        except CheckpointError as error:
            return None, error.message
        except OtherVersionError as error:
            return None, str(error)
        except (EOFError, OSError):
            return None, "it is exiting"
    return status, None


def _doing(status: WorkerStatus | None, trouble: str | None, *, has_trainer: bool) -> Doing:
    if status is None:
        # A worker without an endpoint waits for its own trainer only.
        return "unknown" if trouble is not None else "serving" if has_trainer else "leaving"
    if status.saving:
        return "writing"
    if status.has_trainer:
        return "serving"
    return "leaving" if status.lingers is None else "lingering"


def _trainer(pid: int, said: CommandLine) -> tuple[int, float] | None:
    """Return the trainer of a worker with an endpoint, and the time when its session began; None if unknown."""
    name = said.options.endpoint
    return None if name is None else trainer_of(name, pid, said.runtime)


def _may_have_trainer(worker: int, trainer: int, since: float) -> bool:
    """Return whether the trainer of a worker may live. ``since``: the time when its session began."""
    try:
        if os.readlink(f"/proc/{worker}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return True  # the process id belongs to another container
        # A process with that id that started later is not the trainer.
        return is_running(trainer) and psutil.Process(trainer).create_time() <= since
    except (OSError, psutil.Error):
        return False


def _shared_memory(pid: int) -> int:
    """Return the number of bytes of the worker's segments that occupy memory."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # the worker has closed the file just now
                if os.readlink(entry.path).startswith(("/memfd:asyncckpt ", "/dev/shm/#")):
                    total += entry.stat().st_blocks * 512
    return total


def _ask_to_retire(worker: RunningWorker) -> bool:
    """Ask a worker at its endpoint to retire. Return whether the request was sent."""
    said = worker.command_line
    if said.options.endpoint is None or (connection := connect(said.options.endpoint, _ANSWER_S, said.runtime)) is None:
        return False
    with connection, contextlib.suppress(OSError):
        if peer_pid(connection) == worker.pid:
            tell(connection, WorkerApi.retire)
            return True
    return False


def _signal(worker: RunningWorker, *, kill: bool) -> None:
    """Send a signal. psutil checks that the process id still means the same process."""
    with contextlib.suppress(psutil.Error):  # the worker has ended
        worker.process.kill() if kill else worker.process.terminate()


def _is_there(worker: RunningWorker) -> bool:
    try:
        return worker.process.is_running() and worker.process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_end(worker: RunningWorker, timeout: float) -> bool:
    """Return whether the worker ends within ``timeout`` seconds."""
    return wait_until(lambda: not _is_there(worker), timeout)
