"""Run tests on all ranks of a job. Each rank is a fork of this process, which has imported the slow modules.

A job runs the tests of one file, one after the other, as Megatron-LM does. After a test fails or hangs, the ranks may
be at different places. They are killed, and another job runs the rest of the file.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import random
import shutil
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_suite import port
from megatron_suite.cpu import OnCpu

TESTS = "tests/unit_tests/dist_checkpointing"
# Test files that cannot pass here, and the GPU package that each needs. They run only if named.
WANTING = {"test_fp8.py": "TransformerEngine", "test_layer_wise_optimizer.py": "Emerging-Optimizers"}
_LIMIT_S = 180.0
_GRACE_S = 5.0
_fork = multiprocessing.get_context("fork")


def collect(folder: Path, names: list[str]) -> list[str]:
    """Return the tests of the files ``names``. Without names, return the tests of all files except ``WANTING``."""
    paths = [f"{TESTS}/{name}" for name in names] or [TESTS, *(f"--ignore={TESTS}/{name}" for name in WANTING)]
    process = _fork.Process(target=_collect, args=(folder / "tests", paths))
    process.start()
    process.join()
    return (folder / "tests").read_text().splitlines()


def run(tests: list[str], folder: Path, ranks: int, *, ours: bool) -> Iterator[tuple[str, str, float]]:
    """Run ``tests``. Yield each test, its outcome ("passed", "skipped", "failed" or "hung"), and its seconds.

    The output of a job's ranks stays in a subfolder of ``folder``, named after the test file.
    """
    files = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    for file, left in files.items():
        for number in itertools.count():
            if not left:
                break
            with _Job(left, folder / f"{Path(file).stem}-{number}", ranks, ours=ours) as job:
                for result in job.results():
                    del left[0]
                    yield result


class _Job:
    """All ranks of a job. They run ``tests`` until one test fails or hangs."""

    def __init__(self, tests: list[str], folder: Path, ranks: int, *, ours: bool) -> None:
        self._tests = list(tests)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tcp = _free_port()
        self._ranks: dict[Connection, Any] = {}
        for rank in range(ranks):
            here, there = _fork.Pipe(duplex=False)
            process = _fork.Process(target=_rank, args=(self._tests, folder, rank, ranks, tcp, ours, there))
            process.start()
            there.close()
            self._ranks[here] = process

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the ranks and their child processes."""
        for process in self._ranks.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.join()

    def results(self) -> Iterator[tuple[str, str, float]]:
        """Yield the results, as ``run`` does."""
        for test in self._tests:
            start = time.monotonic()
            outcome = self._outcome()
            yield test, outcome, time.monotonic() - start
            if outcome in ("failed", "hung"):
                break

    def _outcome(self) -> str:
        """Return the outcome of the next test."""
        seen, waiting = set(), dict(self._ranks)
        deadline = time.monotonic() + _LIMIT_S
        while waiting and time.monotonic() < deadline:
            dead = {rank for rank, process in waiting.items() if not process.is_alive()}
            told = wait(list(waiting), timeout=1)
            for rank in [rank for rank in waiting if rank in told or rank in dead]:
                seen.add(_told(rank))
                del waiting[rank]
            if "failed" in seen:  # the other ranks may be waiting for the failed one
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if "failed" in seen:
            return "failed"
        if waiting:
            return "hung"
        return "passed" if "passed" in seen else "skipped"


def _free_port() -> int:
    """Return a free port below 32768, because Linux gives higher ports to outgoing connections."""
    while True:
        tcp = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("localhost", tcp)):
            return tcp


def _told(rank: Connection) -> str:
    """Return the outcome of ``rank``'s next test. The rank must have reported, or be dead."""
    try:
        return str(rank.recv()) if rank.poll() else "failed"
    except EOFError:
        return "failed"


def _rank(tests: list[str], folder: Path, rank: int, ranks: int, tcp: int, ours: bool, parent: Connection) -> None:
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": tcp}
    os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR="localhost")
    torch.set_num_threads(1)
    if ours:
        importlib.import_module("asyncckpt.integrations.megatron").install()
    with OnCpu():
        _pytest([tests[0].partition("::")[0], "-s", "-v", f"--basetemp={folder / str(rank)}"], _Rank(tests, parent))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


class _Rank:
    """A pytest plugin that runs these tests in this order, and reports each outcome."""

    def __init__(self, tests: list[str], parent: Connection) -> None:
        self._tests = tests
        self._parent = parent
        self._seen: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self._tests]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._seen.add(report.outcome)
        if report.failed:
            print(report.longreprtext, flush=True)

    def pytest_runtest_logfinish(self) -> None:
        outcome = next(word for word in ("failed", "passed", "skipped") if word in self._seen)
        self._seen.clear()
        self._parent.send(outcome)
        if outcome != "failed":  # after a failure the parent kills this rank
            port.close_groups()


class _Collected:
    """A pytest plugin that writes down the collected tests."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_finish(self, session: Any) -> None:
        self._file.write_text("\n".join(item.nodeid for item in session.items))


def _collect(file: Path, paths: list[str]) -> None:
    file.touch()
    with OnCpu():
        _pytest([*paths, "--collect-only", "-qq", "--continue-on-collection-errors"], _Collected(file))


def _pytest(arguments: list[str], *plugins: object) -> None:
    import pytest

    from megatron_suite import plugin

    inner = importlib.import_module(f"{TESTS.replace('/', '.')}.conftest")  # the outer one needs containers
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take seconds on each rank
    options = ["--noconftest", "-c", os.devnull, f"--rootdir={os.getcwd()}", "-p", "no:cacheprovider", "--assert=plain"]
    pytest.main([*options, *arguments], plugins=[plugin, inner, *plugins])
