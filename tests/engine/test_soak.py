"""Test that no resource grows with the number of saves, and that many tensors need few descriptors."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from asyncckpt import Checkpointer
from asyncckpt.config import Config

MIB = 1 << 20


def holds_soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_steady_over_200_saves(root: Path) -> None:
    state = {f"layer {number}": torch.randn(20_000) for number in range(100)} | {"step": torch.zeros(1)}
    values = {f"value {number}": float(number) for number in range(100)}
    with Checkpointer(root, Config(keep_last=2)) as checkpointer:
        trainer = psutil.Process()

        def measured() -> tuple[dict[str, int], int]:
            """Return resource counts of the trainer and its worker, and the worker's private memory in bytes."""
            client = checkpointer._engine.worker
            assert client is not None
            worker = psutil.Process(client.pid)
            memory = worker.memory_info()
            return {
                "trainer files": trainer.num_fds(),
                "trainer threads": trainer.num_threads(),
                "worker files": worker.num_fds(),
                "worker threads": worker.num_threads(),
                "shared": len([entry for entry in worker.memory_maps() if "memfd" in entry.path]),
            }, memory.rss - memory.shared

        def are_old_ones_gone() -> bool:
            """Return whether the old checkpoints are removed. The worker removes them after the save has ended."""
            return len(checkpointer.steps()) == 2 and not list(root.glob(".*.asyncckpt-trash"))

        for step in range(200):
            values["value 7"] = step / 7
            checkpointer.save(step, {**state, **values})
            if step in (20, 199):
                checkpointer.wait(60)
                assert holds_soon(are_old_ones_gone), sorted(root.iterdir())
            if step == 20:
                time.sleep(0.5)  # let closing files and threads finish
                early, private = measured()

        def has_grown_nothing() -> bool:
            now = measured()[0]
            return all(now[each] <= early[each] for each in early)

        assert holds_soon(has_grown_nothing), (early, measured()[0])
        private_late = measured()[1]
    assert private_late - private < 4 * MIB and private_late < 60 * MIB


MANY = """
import resource, sys, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from asyncckpt.checkpointer import Checkpointer
state = {f"tensor {number}": torch.full((number % 7,), float(number)) for number in range(20_000)}
with Checkpointer(sys.argv[1]) as checkpointer:
    for step in range(3):
        checkpointer.save(step, state).result(60)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpointer.load(into)
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
"""


def test_20_000_tensors_under_256_descriptors(root: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", MANY, str(root)], check=True, timeout=200, cwd="/")
