"""nvrx's queue on our engine, without the known faults of nvrx's own queue.

The faults (``w1`` ...) have their numbers from a study of nvrx 0.7.0. Faults W6 and W10 are about its speed.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import verify
from support.nvrx_saves import OtherRequest, is_there, plan, processes
from support.ranks import alone, faulty, run
from support.states import small_state, stock_load
from support.workers import Faulty
from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt.errors import WorkerDiedError
from asyncckpt.integrations import nvrx
from asyncckpt.integrations.megatron import MegatronSave
from asyncckpt.integrations.nvrx import filesystem
from asyncckpt.link import process as worker_process

pytestmark = pytest.mark.usefixtures("forkserver")


def test_several_under_way_are_finalized_in_order(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    states = [small_state() for _ in range(5)]
    for number, state in enumerate(states):
        queue.schedule_async_request(plan(state, tmp_path / str(number)))
    assert queue.maybe_finalize_async_calls(blocking=True) == list(range(5))
    assert all(is_there(state, tmp_path / str(number)) for number, state in enumerate(states))


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("asked", [0, 1])
def test_what_a_finalize_function_raises_comes_from_the_handle_of_its_save(
    queue: nvrx.AsyncCallsQueue, tmp_path: Path, bad: int, asked: int
) -> None:
    """The handle of the incomplete save raises, in whichever order the handles are asked."""

    def write_metadata() -> None:
        raise OSError("as the test wants")

    requests = [plan(small_state(), tmp_path / str(number)) for number in range(2)]
    requests[bad].finalize_fns.append(write_metadata)
    handles = [MegatronSave(queue, request) for request in requests]
    for number in (asked, 1 - asked, asked):
        if number == bad:
            with pytest.raises(OSError, match="as the test wants"):
                handles[number].result()
        else:
            handles[number].result()
        assert handles[number].done()


def test_it_can_be_done_at_once(tmp_path: Path) -> None:
    plan(state := small_state(), tmp_path).execute_sync()
    assert is_there(state, tmp_path)


def test_priorities_reach_the_worker(tmp_path: Path) -> None:
    nvrx.AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=17, io_priority=3, cpu_shm_mode=True)
    try:
        (worker,) = processes("asyncckpt.worker")
        assert worker.nice() == 17 and worker.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    finally:
        filesystem.engines.close()
        filesystem.configure(None)


def test_w1_a_killed_worker_is_an_error(queue: nvrx.AsyncCallsQueue, tmp_path: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:kill")
    queue.schedule_async_request(plan(state := small_state(), tmp_path / "1"))
    faulty_worker("")
    with pytest.raises(CheckpointException) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert isinstance(caught.value.failures[0][0], WorkerDiedError) and not (tmp_path / "1/.metadata").exists()
    queue.schedule_async_request(plan(state, tmp_path / "2"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1] and is_there(state, tmp_path / "2")


def test_w3_and_w13_queues_do_not_know_of_each_other(tmp_path: Path) -> None:
    first, second = nvrx.AsyncCallsQueue(cpu_shm_mode=True), nvrx.AsyncCallsQueue(cpu_shm_mode=False)
    state = {"w": torch.zeros(1 << 20)}
    for number, queue in enumerate([first, second, first, second, first]):
        state["w"].fill_(number)
        queue.schedule_async_request(plan(state, tmp_path / str(number)))
    second.close()
    state["w"].fill_(5)
    first.schedule_async_request(plan(state, tmp_path / "5"))
    first.close()
    for number in range(6):
        assert is_there({"w": torch.full((1 << 20,), float(number))}, tmp_path / str(number))


def test_w7_nothing_is_left_of_what_was_aborted(
    queue: nvrx.AsyncCallsQueue, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("finalize:hold")
    queue.schedule_async_request(plan({"a": torch.ones(3)}, tmp_path / "a"))
    nvrx.abort_nvrx_checkpoint()
    assert queue.get_num_unfinalized_calls() == 0 and not list(tmp_path.glob(".a*"))
    faulty_worker("")
    state = {"b": torch.zeros(4)}
    queue.schedule_async_request(plan(state, tmp_path / "b"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and is_there(state, tmp_path / "b")
    assert not (tmp_path / "a/.metadata").exists()


def test_an_abort_ends_the_workers_of_all_queues_and_all_go_on(
    queue: nvrx.AsyncCallsQueue, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = nvrx.TorchAsyncCheckpoint()
    callers = [queue._get_async_caller(), saved._get_async_calls_queue()._get_async_caller()]
    state = {"w": torch.ones(5)}
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    for round_, behaviour in enumerate(("finalize:hold", "")):
        faulty_worker(behaviour)
        folder = tmp_path / str(round_)
        queue.schedule_async_request(plan(state, folder / "folder"))
        file = saved.async_save(state, folder / "file.pt")
        assert all(caller._debug_is_async_process_running() for caller in callers)
        if behaviour:
            nvrx.abort_nvrx_checkpoint()
            assert isinstance(file.failure, WorkerDiedError)
            assert not any(caller._debug_is_async_process_running() for caller in callers)
            shutil.rmtree(folder)  # no process writes there any more
    queue.maybe_finalize_async_calls(blocking=True)
    saved.finalize_async_save(blocking=True, terminate=True)
    assert is_there(state, folder / "folder") and torch.load(folder / "file.pt")["w"].all()
    saved.save(state, tmp_path / "now.pt")
    assert (tmp_path / "now.pt").exists()


def _raise() -> None:
    raise OSError("as the test wants")


def test_w10_and_w14_no_device_is_asked_for_anything(
    queue: nvrx.AsyncCallsQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("synchronize", "current_device", "device_count", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, _raise)
    queue.schedule_async_request(plan(state := small_state(), tmp_path))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and is_there(state, tmp_path)


def _save_and_be_killed(root: str) -> None:
    nvrx.AsyncCallsQueue().schedule_async_request(plan({"w": torch.ones(1 << 20)}, root))
    os.kill(os.getpid(), signal.SIGKILL)


def test_w11_a_killed_trainers_save_is_written(tmp_path: Path) -> None:
    """The worker exits too. The fixture checks that."""
    root = tmp_path / "it"
    assert alone(_save_and_be_killed, str(root))[0] == -signal.SIGKILL
    for process in processes("asyncckpt.worker"):
        process.wait(30)
    assert is_there({"w": torch.ones(1 << 20)}, root) and not verify(str(root)).damages


def test_w12_tensors_may_be_changed_after_the_call(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    state = {"w": torch.zeros(1 << 20)}
    saved = nvrx.TorchAsyncCheckpoint()
    queue.schedule_async_request(plan(state, tmp_path / "folder"))
    saved.async_save(state, tmp_path / "file.pt")
    queue.schedule_async_request(nvrx.AsyncRequest(torch.save, (state, tmp_path / "other.pt"), []))
    state["w"].fill_(7)
    queue.maybe_finalize_async_calls(blocking=True)
    saved.finalize_async_save(blocking=True, terminate=True)
    assert is_there({"w": torch.zeros(1 << 20)}, tmp_path / "folder")
    assert not torch.load(tmp_path / "file.pt")["w"].any() and not torch.load(tmp_path / "other.pt")["w"].any()


def test_w15_there_is_one_process_and_it_is_small(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    queue.schedule_async_request(plan({"w": torch.ones(1 << 20)}, tmp_path))
    (worker,) = set(psutil.Process().children(recursive=True)) - before
    assert worker.memory_full_info().uss < 60 << 20
    assert nvrx.get_write_results_queue(mp_mode="fork") is None  # type: ignore[func-returns-value]


def test_w17_a_request_of_another_class_is_served(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    request = plan(state := small_state(), tmp_path)
    queue.schedule_async_request(OtherRequest(*request[:5]))  # type: ignore[arg-type]
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and is_there(state, tmp_path)


def _a_worker_dies(root: str, bad: int) -> str:
    real = worker_process.command
    if dist.get_rank() == bad:
        faulty("write:kill")
    queue = nvrx.AsyncCallsQueue()
    queue.schedule_async_request(plan({f"w{dist.get_rank()}": torch.ones(1000)}, f"{root}/1"))
    worker_process.command = real
    polls, outcome = 0, "saved"
    try:
        while queue.get_num_unfinalized_calls():
            polls += 1
            queue.maybe_finalize_async_calls(blocking=False)
    except CheckpointException as error:
        outcome = f"{list(error.failures)} {type(error.failures[bad][0]).__name__}"
    # Both ranks get the error at the same call, and stay in step.
    queue.schedule_async_request(plan(state := {f"w{dist.get_rank()}": torch.ones(1000)}, f"{root}/2"))
    while queue.get_num_unfinalized_calls():
        polls += 1
        queue.maybe_finalize_async_calls(blocking=False)
    queue.close()
    assert is_there(state, f"{root}/2")
    return f"{outcome} {polls}"


@pytest.mark.parametrize("bad", [0, 1])
def test_all_ranks_learn_of_a_killed_worker(tmp_path: Path, bad: int) -> None:
    one, other = run(2, _a_worker_dies, str(tmp_path / "it"), bad, folder=tmp_path)
    assert one == other and one.startswith(f"[{bad}] WorkerDiedError ")


def _poll_without_a_device(root: str) -> list[int]:
    """Poll in a job with a process group that sends only device tensors, like NCCL's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{root}.meeting", rank=rank, world_size=world)
    groups = []
    for number in range(2):
        queue = nvrx.AsyncCallsQueue()
        queue.schedule_async_request(plan({f"w{rank}": torch.ones(1000)}, f"{root}/{number}"))
        while queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=False)
        queue.close()
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return groups


def test_no_poll_waits_for_a_device(tmp_path: Path) -> None:
    """The queue makes one extra group. Polls over the job's group would wait for all pending device work."""
    assert run(2, _poll_without_a_device, str(tmp_path / "it"), folder=tmp_path) == [[2, 2], [2, 2]]


def _warm_before_they_meet(root: str) -> None:
    """Start the worker before ``torch.distributed`` is initialised, as Megatron-LM does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # wait until the other rank has joined this group too
    dist.destroy_process_group()
    nvrx.AsyncCallsQueue.warmup_persistent_caller(rank, cpu_shm_mode=True)
    dist.init_process_group("gloo", init_method=f"file://{root}.meeting", rank=rank, world_size=world)
    queue = nvrx.AsyncCallsQueue(cpu_shm_mode=True)
    queue.schedule_async_request(plan({f"w{rank}": torch.full((10,), float(rank))}, root))
    queue.close()
    into = {"w0": torch.ones(10), "w1": torch.zeros(10)}
    stock_load(into, root)
    assert not into["w0"].any() and into["w1"].all()


def test_warmed_up_before_the_ranks_meet(tmp_path: Path) -> None:
    run(2, _warm_before_they_meet, str(tmp_path / "it"), folder=tmp_path)
