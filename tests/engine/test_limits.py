"""Test the limits of a process: descriptors and file size. Each failure is an asyncckpt error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, resource, sys, torch
from asyncckpt import Checkpointer, Config
from asyncckpt.errors import CheckpointError

root, state = sys.argv[1], {"w": torch.ones(100_000), "n": 1}
told = set()

def limited(kind, most, name, act):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        act()
    except CheckpointError as error:
        assert kind is not resource.RLIMIT_FSIZE or "ulimit -f" in str(error), error
        told.add(f"{name}: {type(error).__name__}")
    finally:
        resource.setrlimit(kind, before)

def descriptors(more):
    return len(os.listdir("/proc/self/fd")) - 1 + more

config = Config(linger=0, timeout=60, restart_pause=0, worker_restarts=1000)
with Checkpointer(root, config) as other:
    other.save(1, state).result(60)
    for more in range(0, 20, 2):
        with Checkpointer(f"{root}/{more}", config) as checkpointer:
            most = descriptors(more)
            limited(resource.RLIMIT_NOFILE, most, "prepare", lambda: checkpointer.prepare(state))
            limited(resource.RLIMIT_NOFILE, most, "save", lambda: checkpointer.save(1, state).result(60))
            limited(resource.RLIMIT_NOFILE, descriptors(more), "load", lambda: other.load(dict(state), memory=False))
            other.save(2 + more, state).result(60)
for name, size in (("planning", 4096), ("staging", 805_000)):
    state["w"] = torch.ones(200_000)
    with Checkpointer(f"{root}/{name}", config) as checkpointer:
        limited(resource.RLIMIT_FSIZE, size, name, lambda: checkpointer.save(1, state).result(60))
    with Checkpointer(f"{root}/{name} warned", Config(linger=0, failure="warn")) as checkpointer:
        save = None
        def act():
            global save
            checkpointer.prepare(state)
            save = checkpointer.save(1, state)
        limited(resource.RLIMIT_FSIZE, size, name, act)
        assert save is not None and isinstance(save.future.exception(60), CheckpointError), name
print(*sorted(told), sep="\\n")
"""


@pytest.mark.timeout(600)
def test_whatever_runs_out_is_told_as_ours(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(root)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert told == {"prepare", "save", "load", "planning", "staging"}, done.stdout
