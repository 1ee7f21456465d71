"""The ranks of a training, forked from a process that has imported the framework."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from torture.frameworks.kind import Kind, Options
from torture.frameworks.log import Log, read_log

RUN = "ASYNCCKPT_TORTURE_RUN"
"""The environment variable that identifies the workers of a run."""

_PR_SET_PDEATHSIG = 1
_fork = multiprocessing.get_context("fork")


class Ranks:
    """All ranks of a training, each in a process of its own."""

    def __init__(self, kind: Kind, run: Path, attempt: int, options: Options | None) -> None:
        """Start the ranks.

        Args:
            kind: The kind of the training.
            run: The folder of this run. The training uses the folder ``training`` within.
            attempt: The number of earlier starts.
            options: See ``Kind.train``.
        """
        self._run = run
        self._logs = [run / f"log-{attempt}-{rank}" for rank in range(kind.world_size)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            _fork.Process(target=_main, args=(kind, run, rank, port, self._logs[rank], options))
            for rank in range(kind.world_size)
        ]
        for process in self.processes:
            process.start()

    def said(self) -> list[list[dict[str, Any]]]:
        """Return the log of each rank."""
        return [read_log(log) for log in self._logs]

    def wait_for_step(self, rank: int, step: int, limit_s: float) -> bool:
        """Wait until ``rank`` reaches ``step``, or a rank ends. Return False after a timeout."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if any(each.get("step", 0) >= step for each in read_log(self._logs[rank])) or self.ended():
                return True
            time.sleep(0.005)
        return False

    def ended(self) -> bool:
        """Return whether a rank has ended."""
        return any(process.exitcode is not None for process in self.processes)

    def wait(self, limit_s: float, grace_s: float) -> bool:
        """Wait for the end of all ranks. As a launcher does, kill the others ``grace_s`` after one has failed.

        Returns whether all ranks ended in time, or one failed.
        """
        deadline = time.monotonic() + limit_s
        while any(process.exitcode is None for process in self.processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in self.processes):
                deadline = min(deadline, time.monotonic() + grace_s)
            time.sleep(0.01)
        is_in_time = all(process.exitcode is not None for process in self.processes) or any(
            process.exitcode for process in self.processes
        )
        self.kill(range(len(self.processes)))
        return is_in_time

    def kill(self, ranks: Any) -> None:
        """Kill these ranks."""
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].join()

    def workers(self, rank: int | None = None) -> list[int]:
        """Return the ids of all workers of this run, even those of dead trainers, or only the workers of ``rank``."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_worker = "asyncckpt.worker" in process.cmdline() and process.environ().get(RUN) == str(self._run)
                if is_worker and (rank is None or process.ppid() == self.processes[rank].pid):
                    found.append(process.pid)
        return found

    def kill_all(self, with_workers: bool, choice: random.Random) -> None:
        """Kill all ranks in random order, and with ``with_workers`` also the workers of this run."""
        ids = [process.pid or 0 for process in self.processes if process.exitcode is None]
        ids += self.workers() if with_workers else []
        choice.shuffle(ids)
        for each in ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.kill(range(len(self.processes)))


def _main(kind: Kind, run: Path, rank: int, port: int, log_path: Path, options: Options | None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(run / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    world = str(kind.world_size)
    os.environ |= {RUN: str(run), "TMPDIR": str(run / "scratch"), "OMP_NUM_THREADS": "1"}
    if kind.world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": world}
        os.environ |= {"LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    tempfile.tempdir = None
    logging.getLogger("asyncckpt").setLevel(logging.INFO)
    logging.getLogger("asyncckpt").addHandler(logging.StreamHandler())
    logging.getLogger("asyncckpt").propagate = False  # a framework may have its own handler
    torch.set_num_threads(1)
    log = Log(log_path)
    code = 0
    try:
        kind.train(run / "training", log, options)
    except BaseException as error:
        log.add_error(error)
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # multiprocessing does not call them
    sys.stdout.flush()
    os._exit(code)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of ``function`` in a child process, because a process with threads must not fork later."""
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    with ours:
        try:
            answer = ours.recv()
        except EOFError:
            answer = RuntimeError(f"{function.__name__} has died")
    process.join()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _answer(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answer = function(*args)
    except Exception as error:
        traceback.print_exc()
        answer = RuntimeError(f"{function.__name__}: {type(error).__name__}: {error}")
    pipe.send(answer)
