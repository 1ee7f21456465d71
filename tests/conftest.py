"""What every test gets: a check that it leaves nothing behind, and a few state dicts."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from asyncckpt import engines
from asyncckpt.nvrx import runtime as runtime_of_nvrx
from asyncckpt.worker import client, door
from asyncckpt.worker.visit import Visit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _open_files() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        # pytest's own captures and torch's caches come and go; what we open are these kinds.
        if target.startswith(("socket:", "/memfd:", "anon_inode:[pidfd]")):
            found.add(f"{fd.name} {target}")
    return found


def _maps() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:asyncckpt")


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own."""
    folder = tmp_path_factory.mktemp("host") / "runtime"
    monkeypatch.setenv(door.FOLDER_VARIABLE, str(folder))
    return folder


def send_away(runtime: Path) -> None:
    """Have the workers leave that linger; nothing of them may stay."""
    deadline = time.monotonic() + 30
    while runtime.exists():
        for lock in runtime.glob("*.lock"):
            visit = Visit.pay(lock.stem, 30, client.deserted())
            if visit is not None:
                visit.retire(60)
                visit.close()
            else:
                door.Door(lock.stem, 0).close()  # its worker was killed; whoever has the name next clears up
        # One that has no door waits for that of another, or is about to see that it need not.
        if not _is_looked_at(runtime):
            assert not list(runtime.glob("*")), "left in the runtime folder"
            return
        assert time.monotonic() < deadline, "workers have not left"
        time.sleep(0.02)


def _is_looked_at(runtime: Path) -> bool:
    """Whether there is still a worker to which ``runtime`` is the runtime folder."""
    for process in psutil.process_iter():
        try:
            is_worker = "worker" in " ".join(process.cmdline())
            if is_worker and process.environ().get(door.FOLDER_VARIABLE) == str(runtime):
                return True
        except psutil.Error:
            continue
    return False


@pytest.fixture(autouse=True)
def no_leaks(runtime: Path) -> Iterator[None]:
    """Fail a test that leaves a descriptor, a thread, a process or shared memory behind."""
    process = psutil.Process()
    before = _open_files(), {child.pid for child in process.children()}, _maps()
    threads = set(threading.enumerate())
    yield
    engines.shared.close()
    runtime_of_nvrx.close()
    send_away(runtime)
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        client.deserted()
        left = {
            "files": sorted(_open_files() - before[0]),
            "processes": sorted({child.pid for child in process.children()} - before[1]),
            "threads": [thread.name for thread in threading.enumerate() if thread not in threads and _ours(thread)],
            "mappings": max(0, _maps() - before[2]),
        }
        if not any(left.values()):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.01)


def _ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("asyncckpt")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


Faulty = Callable[[str], None]


@pytest.fixture
def faulty_worker(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Call it with "point:action" to have the workers started from then on fail there; see ``faulty_worker.py``."""
    real = client.command

    def choose(fault: str) -> None:
        script = str(Path(__file__).with_name("faulty_worker.py"))
        monkeypatch.setattr(client, "command", lambda: [real()[0], script, fault] if fault else real())

    return choose


def small_state() -> dict[str, Any]:
    """A few tensors of several kinds, and values beside them."""
    return {
        "model": {"weight": torch.randn(64, 32), "bias": torch.zeros(32, dtype=torch.bfloat16)},
        "optimizer": {"state": [{"exp_avg": torch.randn(64, 32), "step": torch.tensor(3.0)}], "lr": 1e-3},
        "step": 7,
    }


def zeros_like(state: Any) -> Any:
    """The same structure with other values, to load into."""
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeros_like(value) for value in state]
    if isinstance(state, torch.Tensor):
        plain = state.layout == torch.strided and not state.is_quantized
        return torch.zeros_like(state) if plain else state.clone()
    return None


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the bit (of tensors: their values, dtypes and shapes)."""
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.layout != torch.strided:
            return bool(torch.equal(one.to_dense(), other.to_dense()))
        if one.is_quantized:
            return bool(torch.equal(one.dequantize(), other.dequantize()))
        return _raw(one) == _raw(other)
    return type(one) is type(other) and repr(one) == repr(other)


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""
