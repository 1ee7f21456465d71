"""Fixtures for all tests, with a check for leaks."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver as server
from pathlib import Path

import psutil
import pytest
import torch
from support import accelerators
from support.hosts import hosts_of
from support.workers import FAULTY, Faulty, send_away

from asyncckpt.engine import shared as engines
from asyncckpt.integrations.nvrx import AsyncCallsQueue
from asyncckpt.integrations.nvrx.filesystem import engines as engines_of_nvrx
from asyncckpt.link import endpoint as endpoint
from asyncckpt.link import process as worker_process
from asyncckpt.weights import WeightPublisher, WeightSubscriber

# obstore needs Python 3.11.
has_obstore = importlib.util.find_spec("obstore") is not None
_FOR_STORES = (
    *("engine/test_object_stores.py", "engine/test_sets_on_stores.py"),
    *("asyncckpt/storage/test_object_store.py", "asyncckpt/storage/test_stock_names.py"),
    *("exporting/test_stored_there.py", "report/test_on_stores.py", "test_party_on_stores.py"),
)
collect_ignore = [] if has_obstore else list(_FOR_STORES)


def _open_files() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        # Descriptors of pytest's captures and torch's caches come and go. Our descriptors are of these kinds.
        if target.startswith(("socket:", "/memfd:", "anon_inode:[pidfd]")):
            found.add(f"{fd.name} {target}")
    return found


def _maps() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:asyncckpt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each xdist worker begin with some of the slow tests, so that none runs alone at the end.

    Each worker gets the same number of neighbouring tests, and begins with the first of them.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    ordered = []
    for worker in range(workers):
        first = slow[worker::workers]
        then = max(0, (len(items) + worker) // workers - len(first))
        ordered += first + others[:then]
        del others[:then]
    items[:] = ordered + others


@pytest.fixture(scope="session")
def forkserver() -> Iterator[None]:
    """Start the process that forks ranks and trainers, so that these need not import torch."""
    server.ensure_running()
    yield
    server._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's own runtime folder. ``$RUNTIME_FOLDERS``: its parent, instead of a temporary folder."""
    place = os.environ.get("RUNTIME_FOLDERS")
    folder = (Path(tempfile.mkdtemp(dir=place)) if place else tmp_path_factory.mktemp("host")) / "runtime"
    monkeypatch.setenv(endpoint.FOLDER_VARIABLE, str(folder))
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # an aborted worker prints its stack
    return folder


@pytest.fixture
def two_hosts(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the runtime folders of two simulated hosts. The first folder is this host's."""
    other = tmp_path / "other"
    yield [str(runtime), str(other)]
    monkeypatch.setenv(endpoint.FOLDER_VARIABLE, str(other))
    send_away(other)
    monkeypatch.setenv(endpoint.FOLDER_VARIABLE, str(runtime))


@pytest.fixture(autouse=True)
def no_leaks(runtime: Path) -> Iterator[None]:
    """Fail a test that leaves a descriptor, thread, process or shared memory behind, or the garbage collector off."""
    process = psutil.Process()
    before = _open_files(), {child.pid for child in process.children()}, _maps(), accelerators.registrations()
    threads = set(threading.enumerate())
    # Otherwise each collection below visits all objects of torch and pytest, for some 0.3 s.
    gc.freeze()
    yield
    is_collected = gc.isenabled()
    gc.enable()
    engines.shared.close()
    engines_of_nvrx.close()
    send_away(runtime)
    deadline = time.monotonic() + 60
    while True:
        gc.collect()
        worker_process.detached_workers()
        subprocess._cleanup()  # type: ignore[attr-defined]  # processes that an interrupt has lost
        left = {
            "files": sorted(_open_files() - before[0]),
            "processes": sorted({child.pid for child in process.children()} - before[1]),
            "threads": [thread.name for thread in threading.enumerate() if thread not in threads and _ours(thread)],
            "mappings": max(0, _maps() - before[2]),
            "pinned": max(0, accelerators.registrations() - before[3]),
        }
        if not any(left.values()):
            assert is_collected, "the garbage collector was left switched off"
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.01)


def _ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("asyncckpt")


@pytest.fixture
def device_type() -> Iterator[str]:
    """Yield the type of the test's device. Give back unused memory of the device at the end."""
    device_type = accelerators.load()
    yield device_type
    gc.collect()
    accelerators.module().empty_cache()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def hosts(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder that holds a folder for each host of the ranks."""
    yield from hosts_of(tmp_path, monkeypatch, runtime)


@pytest.fixture
def queue() -> Iterator[AsyncCallsQueue]:
    """Yield asyncckpt's version of nvrx's queue."""
    queue = AsyncCallsQueue(cpu_shm_mode=True)
    yield queue
    queue.close()


@pytest.fixture
def faulty_worker(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Return a function. Its argument "point:action" lets later workers fail; see ``support/faulty_worker.py``."""
    real = worker_process.command

    def choose(fault: str) -> None:
        monkeypatch.setattr(worker_process, "command", lambda: [real()[0], FAULTY, fault] if fault else real())

    return choose


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread. More threads do not help tiny models, and slow other processes down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    with WeightPublisher("policy") as publisher:
        yield publisher


@pytest.fixture
def subscriber() -> Iterator[WeightSubscriber]:
    with WeightSubscriber("policy") as subscriber:
        yield subscriber


@pytest.fixture
def gate(runtime: Path, monkeypatch: pytest.MonkeyPatch, faulty_worker: Faulty) -> Iterator[Path]:
    """Yield the path of a file. The worker writes nothing before this file exists."""
    # Unlike ``tmp_path``, this folder is kept while a worker still writes after the test.
    gate = runtime.parent / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    faulty_worker("write:hold")
    yield gate
    gate.touch()
