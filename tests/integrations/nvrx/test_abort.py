"""The abort hook ends waits in other threads, and has the interface that each nvrx release expects."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peers import NVRX, python
from support.states import same

from asyncckpt import Checkpointer, Save
from asyncckpt.config import Config
from asyncckpt.errors import ClosedError, WorkerDiedError
from asyncckpt.integrations import nvrx
from asyncckpt.link.client import WorkerClient

_HOOK = """
import pickle
from asyncckpt.integrations.nvrx import AbortAsyncckpt
hook = AbortAsyncckpt(timeout=3)
assert hook("state") == "state" and type(hook).__name__ == "AbortAsyncckpt"
try:
    import nvidia_resiliency_ext.inprocess as inprocess
except ImportError:
    print("without")
else:
    from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed
    for each in (hook, inprocess.Compose(AbortTorchDistributed(), hook), inprocess.Compose(hook)):
        assert isinstance(each, Abort), each
        inprocess.Wrapper(abort=each)
    print("with")
"""


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("version", [*NVRX, ""])
def test_it_is_what_the_wrapper_takes(version: str) -> None:
    said = python(_HOOK, *([version, "defusedxml-0.7.1"] if version else []))
    assert said.split()[-1] == ("with" if version else "without")


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step))}


def test_a_wait_in_another_thread_ends(root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread waits for a slot, because the gate holds every write."""
    checkpointer = Checkpointer(root, Config(slots=1))
    checkpointer.save(1, _state(1))
    took: list[float] = []
    waiting = threading.Event()
    wait_for: Any = WorkerClient.wait_while_it_lives

    def noted(*args: Any, **options: Any) -> Any:
        waiting.set()
        return wait_for(*args, **options)

    def abort() -> None:
        waiting.wait(60)
        begun = time.monotonic()
        nvrx.AbortAsyncckpt()(None)
        took.append(time.monotonic() - begun)

    thread = threading.Thread(target=abort)
    thread.start()
    with monkeypatch.context() as patch, pytest.raises((WorkerDiedError, ClosedError)):
        patch.setattr(WorkerClient, "wait_while_it_lives", noted)
        checkpointer.save(2, _state(2))
    thread.join()
    assert took[0] < 5
    gate.touch()
    with Checkpointer(root) as another:
        into = _state(0)
        assert another.load(into) == 1 and same(into, _state(1))
        another.save(2, _state(2)).result(60)


def test_the_queue_finalizes_nothing_of_before(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    finalized: list[int] = []

    def request(number: int) -> nvrx.AsyncRequest:
        return nvrx.AsyncRequest(time.sleep, (0,), [lambda: finalized.append(number)])

    queue.schedule_async_request(request(1))
    queue.add_save(Save.finished("somewhere"))
    nvrx.AbortAsyncckpt()(None)
    assert queue.get_num_unfinalized_calls() == 0 and queue.maybe_finalize_async_calls(blocking=True) == []
    assert queue.schedule_async_request(request(2)) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and finalized == [2]
