"""Test which weights and checkpoints stay, by how the trainer ends: each row of the table on the page on weights."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.checkpoints import complete_steps
from support.ranks import script

from asyncckpt import Checkpointer
from asyncckpt.errors import WeightsTimeoutError
from asyncckpt.link.endpoint import endpoint_names
from asyncckpt.weights import WeightSubscriber

pytestmark = pytest.mark.usefixtures("forkserver")

_LIMIT_S = 60.0
_TRAINER = """
import contextlib, gc, os, signal, sys, time, torch, warnings
from asyncckpt import Checkpointer
from asyncckpt.weights import WeightPublisher

root, said, how = sys.argv[1:]

def wait_for(name):
    while not os.path.exists(os.path.join(said, name)):
        time.sleep(0.01)

def begin():
    checkpointer, publisher = Checkpointer(root), WeightPublisher("policy")
    publisher.publish({"w": torch.ones(1000)}, 1)
    checkpointer.prepare({"w": torch.ones(3_000_000)})
    open(os.path.join(said, "published"), "w")
    wait_for("acquired")
    checkpointer.save(1, {"w": torch.ones(3_000_000)})
    return checkpointer, publisher

def main():
    checkpointer, publisher = begin()
    if how == "closes":
        checkpointer.close()
        publisher.close()
    elif how == "drops":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del checkpointer, publisher
            for _ in range(500):  # a save under way holds on to what it is of
                gc.collect()
                if sum("was not closed" in str(each.message) for each in caught) == 2:
                    return
                time.sleep(0.02)
            os._exit(9)
    elif how.startswith("block"):
        kind = {"block": None, "block, error": ValueError, "block, Ctrl-C": KeyboardInterrupt}[how]
        with contextlib.suppress(BaseException), checkpointer, publisher:
            if kind is not None:
                raise kind("as the test wants")
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "os._exit":
        os._exit(0)
    elif how == "sys.exit":
        sys.exit(0)
    elif how == "error":
        raise ValueError("as the test wants")
    elif how == "Ctrl-C":
        raise KeyboardInterrupt("as the test wants")

main()
if how != "ends":
    wait_for("seen")  # the process goes on
"""
_GONE = ["closes", "drops", "block", "block, Ctrl-C", "ends", "sys.exit", "Ctrl-C"]
_STAYS = ["block, error", "error", "os._exit", "killed"]
# These need a process that ends as Python's do.
_REAL = ("ends", "sys.exit", "Ctrl-C", "error")


def _train(root: Path, said: Path, how: str) -> None:
    if how in _REAL:
        command = [sys.executable, "-c", _TRAINER, str(root), str(said), how]
        subprocess.run(command, stderr=subprocess.DEVNULL, timeout=2 * _LIMIT_S, check=False)
    else:
        assert script(_TRAINER, str(root), str(said), how) in (0, -9)


def _wait(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("how", [*_GONE, *_STAYS])
def test_what_stays(root: Path, tmp_path: Path, how: str) -> None:
    with ThreadPoolExecutor(1) as pool, WeightSubscriber("policy") as subscriber:
        trainer = pool.submit(_train, root, tmp_path, how)
        try:
            _wait((tmp_path / "published").exists)
            held = subscriber.acquire()
            (tmp_path / "acquired").touch()
            _wait(lambda: complete_steps(str(root)) == [1])  # a save under way is always committed
            if how in _GONE:
                _wait(lambda: not endpoint_names())
            else:
                _wait(lambda: trainer.done() or how == "block, error")
                assert len(endpoint_names()) == 2
            with WeightSubscriber("policy") as new:
                if how in _GONE:
                    with pytest.raises(WeightsTimeoutError, match="no publisher was found"):
                        new.acquire(timeout=0.0)
                else:
                    with new.acquire() as weights:
                        assert weights.version == 1 and weights["w"].sum() == 1000
            for each in (held, subscriber.acquire()):  # an earlier reader keeps the version that it has mapped
                with each as weights:
                    assert weights["w"].sum() == 1000
        finally:
            (tmp_path / "seen").touch()
        trainer.result(_LIMIT_S)
    with Checkpointer(root) as checkpointer:
        into = {"w": torch.zeros(3_000_000)}
        assert checkpointer.load(into) == 1 and into["w"].sum() == 3_000_000
        assert checkpointer.loaded is not None
        assert checkpointer.loaded.source == ("storage" if how in _GONE else "memory")


_LOSES = """
import atexit, contextlib, gc, psutil, resource, sys, time, torch, asyncckpt
from asyncckpt import Checkpointer, Config
from asyncckpt.supervisor import known_supervisors

place, how = sys.argv[1:]
state = {"w": torch.ones(1 << 20)}
atexit.register(print, "others are called, too", file=sys.stderr)

def save(place, number):
    if how == "torch_save":
        return asyncckpt.torch_save(state, f"{place}-{number}")
    if how == "async_save":
        return asyncckpt.async_save(state, checkpoint_id=f"{place}-{number}")
    return checkpointer.save(number, state)

def lose():
    global checkpointer
    checkpointer = Checkpointer(place, Config(failure="warn" if how == "logged" else "raise"))
    save(place, 0).result()
    for process in psutil.Process().children():
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    handle = save(place, 1)
    if how == "told":
        with contextlib.suppress(asyncckpt.StorageError):
            handle.result()
    if how in ("dropped", "collected"):
        del checkpointer, handle
    while how == "collected" and known_supervisors():
        gc.collect()
        time.sleep(0.02)

lose()
if how == "sys.exit":
    sys.exit()
if how == "error":
    raise ValueError("as the test wants")
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [
        *[("torch_save", 120), ("async_save", 120), ("open", 120), ("dropped", 120), ("collected", 120)],
        *[("sys.exit", 120), ("told", 0), ("logged", 0), ("error", 1)],
    ],
)
def test_a_process_that_lost_a_save_does_not_end_well(tmp_path: Path, how: str, status: int) -> None:
    command = [sys.executable, "-c", _LOSES, str(tmp_path / "place"), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * _LIMIT_S, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.count("others are called, too") == 1
    assert "File too large" in ended.stderr or how == "error"  # after an error, the worker continues alone
