"""User functions that run in a helper process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.nvrx_saves import OtherRequest, processes
from support.ranks import alone, run
from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt.errors import UnsavableStateError
from asyncckpt.extension import SocketConnection
from asyncckpt.integrations import nvrx
from asyncckpt.link.takeover import is_running

pytestmark = pytest.mark.usefixtures("forkserver")


def test_any_function_runs_in_a_helper(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    """A closure works too. Its tensor arguments keep the values that they have at the call."""
    path, finalized = str(tmp_path / "file"), []
    whole = torch.arange(1000.0)
    view = whole[10:20].requires_grad_()

    def write(first: torch.Tensor, second: dict[str, Any], *, pid: int) -> None:
        assert os.getpid() != pid and first.untyped_storage().data_ptr() == second["view"].untyped_storage().data_ptr()
        torch.save([first, second["view"], second["model"].state_dict()], path)

    model = torch.nn.Linear(3, 4)
    expected = model.weight.detach().clone()
    arguments = [whole, None]
    preload = lambda: {"view": view, "model": model}  # noqa: E731
    request = OtherRequest(write, arguments, [lambda: finalized.append(1)], {"pid": os.getpid()}, preload)
    queue.schedule_async_request(request)  # type: ignore[arg-type]
    with torch.no_grad():
        whole.zero_()
        model.weight.zero_()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and finalized == [1]
    first, second, weights = torch.load(path)
    assert torch.equal(first, torch.arange(1000.0)) and second.requires_grad and second[0] == 10
    assert torch.equal(weights["weight"], expected)


def test_nothing_to_do_is_done(queue: nvrx.AsyncCallsQueue) -> None:
    finalized: list[int] = []
    queue.schedule_async_request(nvrx.AsyncRequest(None, (), [lambda: finalized.append(1)]))
    assert queue.maybe_finalize_async_calls() == [0] and finalized == [1]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise OSError("as the test wants")


@pytest.mark.parametrize(("function", "words"), [(_die, "killed by SIGKILL"), (_raise, "OSError: as the test wants")])
def test_a_function_that_fails(queue: nvrx.AsyncCallsQueue, function: Callable[[], None], words: str) -> None:
    """The next call works. Upstream, every later call hangs."""
    finalized: list[int] = []
    queue.schedule_async_request(nvrx.AsyncRequest(function, (), [lambda: finalized.append(1)]))
    with pytest.raises(CheckpointException) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    (error,) = [failure[0] for failure in caught.value.failures.values()]
    assert words in str(error) and not finalized
    queue.schedule_async_request(nvrx.AsyncRequest(os.getpid, (), [lambda: finalized.append(2)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1] and finalized == [2]


def test_what_does_not_pickle_is_refused_at_once(queue: nvrx.AsyncCallsQueue) -> None:
    with pytest.raises(UnsavableStateError, match="cannot be pickled"):
        queue.schedule_async_request(nvrx.AsyncRequest(print, ((number for number in range(3)),), []))
    assert queue.get_num_unfinalized_calls() == 0


@pytest.mark.parametrize("at", ["send_bytes", "send_descriptor"])
def test_a_request_that_is_interrupted_takes_no_answer_of_another(
    queue: nvrx.AsyncCallsQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """After Ctrl-C in a request, the helper still completes the requests before and after that request."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    finalized: list[str] = []

    def schedule(name: str, function: Callable[..., object], *arguments: object) -> None:
        queue.schedule_async_request(nvrx.AsyncRequest(function, arguments, [lambda: finalized.append(name)]))

    def wait_and_touch(path: Path) -> None:
        while not path.with_suffix(".go").exists():
            time.sleep(0.01)
        path.touch()

    schedule("before", wait_and_touch, tmp_path / "file")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SocketConnection, at, interrupt)
        schedule("interrupted", print)
    (tmp_path / "file.go").touch()
    for name, function in (("bad", _raise), ("good", os.getpid)):
        schedule(name, function)
    done, _ = futures.wait([call.future for call in queue.async_calls], 60)
    assert len(done) == 3
    with pytest.raises(CheckpointException, match="as the test wants"):
        queue.maybe_finalize_async_calls(blocking=False)
    assert finalized == ["before", "good"] and (tmp_path / "file").exists()


def test_preloading_that_fails_is_raised_at_once(queue: nvrx.AsyncCallsQueue) -> None:
    with pytest.raises(OSError, match="as the test wants"):
        queue.schedule_async_request(nvrx.AsyncRequest(print, (1, 2), [], preload_fn=_raise))


def _leaves_a_function_running(path: str) -> None:
    def write() -> None:
        for _ in range(2000):
            if not is_running(trainer):
                break
        open(path, "w").close()

    trainer = os.getpid()
    nvrx.AsyncCallsQueue().schedule_async_request(nvrx.AsyncRequest(write, (), []))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_trainer_leaves_nobody_behind(tmp_path: Path) -> None:
    """The helper completes the pending function, then exits."""
    path = tmp_path / "file"
    assert alone(_leaves_a_function_running, str(path))[0] == -signal.SIGKILL
    for process in processes("asyncckpt.integrations.nvrx"):
        process.wait(100)
    assert path.exists()


def _functions_on_ranks(bad: int) -> str:
    def fail(rank: int) -> None:
        if rank == bad:
            raise ValueError("as the test wants")

    queue = nvrx.AsyncCallsQueue()
    queue.schedule_async_request(nvrx.AsyncRequest(fail, (dist.get_rank(),), [dist.barrier]))
    try:
        while not queue.maybe_finalize_async_calls(blocking=False, no_dist=False):
            time.sleep(0.01)  # a training step
    except CheckpointException as error:
        return str(list(error.failures))
    finally:
        queue.close()
    return "done"


@pytest.mark.parametrize(("bad", "outcome"), [(1, "[1]"), (2, "done")])
def test_functions_end_on_all_ranks_alike(tmp_path: Path, bad: int, outcome: str) -> None:
    assert run(2, _functions_on_ranks, bad, folder=tmp_path) == [outcome] * 2


def _with_a_child(path: str, dies: bool) -> None:
    """Simulate a function with a ``multiprocessing`` child that keeps writing to slow storage."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    Path(path + ".partial").write_text(str(child.pid))
    os.rename(path + ".partial", path)
    if dies:
        _die()
    time.sleep(600)


@pytest.mark.parametrize("how", ["died", "given up", "closed"])
def test_a_child_that_outlives_it_holds_nobody_up(queue: nvrx.AsyncCallsQueue, tmp_path: Path, how: str) -> None:
    path = tmp_path / "child"
    queue.schedule_async_request(nvrx.AsyncRequest(_with_a_child, (str(path), how == "died"), []))
    while not path.exists():
        time.sleep(0.01)

    def end() -> None:
        if how == "died":
            with pytest.raises(CheckpointException):
                queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        elif how == "given up":
            nvrx.AbortAsyncckpt()(None)
            queue.get_num_unfinalized_calls()
        else:
            queue.close(abort=True)

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(30)
    try:
        assert not ending.is_alive()
    finally:
        os.kill(int(path.read_text()), signal.SIGKILL)
        ending.join(30)
