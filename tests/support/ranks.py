"""Run a function as the ranks of a small job: one process each, connected by gloo."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncckpt.config import Config
from asyncckpt.link import process as worker_process
from support.workers import FAULTY

LIMIT_S = 200.0

QUICK = Config(timeout=20, commit_timeout=20)
CONSTANT = Config(timeout=20, commit_timeout=20, assume_constant_structure=True)

fsdp2_on_cpu = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 of torch 2.6 does not train on a CPU"
)

_context = multiprocessing.get_context("forkserver")
# Modules that each rank would otherwise import itself, such as torch._dynamo at the first step of an optimizer.
_context.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch._dynamo", "asyncckpt.integrations.dcp", "asyncckpt.weights", "pytest"]
)


@dataclass
class Ended:
    """The end of a rank: its result, or the traceback of its error, or neither if it was killed."""

    result: Any = None
    error: str | None = None
    killed: bool = False


class Job:
    """The ranks of a job, running."""

    def __init__(self, world_size: int, function: Callable[..., Any], *args: Any, folder: Path) -> None:
        rendezvous = folder / f"meeting-{time.monotonic_ns()}"
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_main,
                args=(theirs, rank, world_size, str(rendezvous), dict(os.environ), function, args),
                daemon=False,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def hear(self, rank: int) -> Any:
        """Return the next value that ``rank`` sends by ``say``."""
        if not self._pipes[rank].poll(LIMIT_S):
            raise TimeoutError(f"rank {rank} says nothing")
        return pickle.loads(self._pipes[rank].recv_bytes())[1]

    def wait(self) -> list[Ended]:
        """Return how all ranks ended. Kill ranks that hang, and raise ``TimeoutError``."""
        ended = [Ended(killed=True) for _ in self._pipes]
        deadline = time.monotonic() + LIMIT_S
        open_ = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while open_ and time.monotonic() < deadline:
            for pipe in wait(list(open_), timeout=1):
                assert isinstance(pipe, Connection)
                rank = open_[pipe]
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    del open_[pipe]
                    continue
                if kind == "result":
                    ended[rank] = Ended(result=value)
                elif kind == "error":
                    ended[rank] = Ended(error=value)
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join(1 if open_ else 20)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
            pipe.close()
        if open_:
            raise TimeoutError(f"ranks {sorted(open_.values())} did not end within {LIMIT_S:g} s")
        return ended


def run(world_size: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """Run ``function(*args)`` on each rank. Return the results. Fail the test if a rank raises or is killed."""
    ended = Job(world_size, function, *args, folder=folder).wait()
    for rank, end in enumerate(ended):
        if end.error is not None or end.killed:
            pytest.fail(f"rank {rank}: {end.error or 'killed'}")
    return [end.result for end in ended]


def alone(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Run ``function`` in a process that belongs to no job. Return its exit code and its ``say`` value."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_alone, args=(theirs, dict(os.environ), function, args), daemon=False)
    process.start()
    theirs.close()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{function.__name__} did not end within {LIMIT_S:g} s")
    said = None
    with ours, contextlib.suppress(EOFError):
        said = pickle.loads(ours.recv_bytes())[1]
    code = process.exitcode
    process.close()
    return code, said


def _alone(pipe: Connection, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _speaker
    _speaker = pipe
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


def script(code: str, *arguments: str) -> int:
    """Run ``code`` as ``python -c`` does, with torch already imported. Return the exit code."""
    return told(code, *arguments)[0]


def told(code: str, *arguments: str) -> tuple[int, Any]:
    """Run ``code`` as ``script`` does. Return the exit code and the value that it sent by ``say``."""
    return alone(_run_script, code, arguments)


def _run_script(code: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


_speaker: Connection | None = None


def say(what: Any) -> None:
    """On a rank: send a value to the test. ``Job.hear`` receives it."""
    assert _speaker is not None
    _speaker.send_bytes(pickle.dumps(("said", what)))


def _main(
    pipe: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    global _speaker
    _speaker = pipe
    gc.freeze()  # otherwise each collection copies the pages that are shared with the forkserver
    faulthandler.dump_traceback_later(LIMIT_S - 5, exit=True)
    torch.set_num_threads(1)  # as torchrun does: many threads on few cores mostly wait for each other
    os.environ.clear()
    os.environ.update(environment)  # the environment of the test, not of the forkserver
    os.environ.pop("MASTER_ADDR", None)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        result = function(*args)
        pipe.send_bytes(pickle.dumps(("result", result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def faulty(fault: str) -> None:
    """On a rank: let its workers fail as ``faulty_worker.py`` describes."""
    real = worker_process.command
    worker_process.command = lambda: [real()[0], FAULTY, fault]


def gated(function: Callable[..., Any], gate: str, *args: Any) -> Any:
    """On a rank: run ``function(*args)``. Its faulty workers wait for the file ``gate``."""
    os.environ["ASYNCCKPT_TEST_GATE"] = gate
    return function(*args)
