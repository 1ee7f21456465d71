"""nvrx's names on our engine: what code that uses them meets, and none of the faults known of nvrx's own."""

from __future__ import annotations

import functools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import Faulty, same, small_state, zeros_like
from peers import NVRX, python
from ranks import alone, run, say, serve
from test_ranks import faulty, stock_load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt import nvrx
from asyncckpt.errors import UnsavableStateError, WorkerDiedError
from asyncckpt.nvrx import runtime
from asyncckpt.verify import verify
from asyncckpt.worker import client

State = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield from serve()


@pytest.fixture
def queue() -> Iterator[nvrx.AsyncCallsQueue]:
    queue = nvrx.AsyncCallsQueue(cpu_shm_mode=True)
    yield queue
    queue.close()


def plan(state: State, folder: Path | str, done: Callable[[], Any] = lambda: None) -> nvrx.AsyncRequest:
    """As Megatron-LM does it."""

    def finalize() -> None:
        nvrx.save_state_dict_async_finalize(*planned)

    os.makedirs(folder, exist_ok=True)
    writer = nvrx.FileSystemWriterAsync(
        folder, thread_count=2, use_cached_data_structure=True, use_cpu_shm_for_gpu_tensors=True
    )
    planned = nvrx.save_state_dict_async_plan(state, writer, None, 0, enable_cache=True)
    function, preload, arguments = writer.get_save_function_and_args()
    return nvrx.AsyncRequest(function, arguments, [finalize, done], preload_fn=preload)


def is_there(state: State, folder: Path | str) -> bool:
    """Whether stock DCP finds ``state`` in ``folder``."""
    into = zeros_like(state)
    stock_load(into, folder)
    return same(into, state)


# What they promise.


def test_a_save_joins_what_is_in_its_folder(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_text("of the caller")
    finalized: list[int] = []
    for number in range(3):
        state = small_state()
        done = functools.partial(finalized.append, number)
        assert queue.schedule_async_request(plan(state, tmp_path, done)) == number
        assert queue.get_num_unfinalized_calls() == 1 and finalized == list(range(number))
        assert queue.maybe_finalize_async_calls(blocking=True) == [number]
        assert is_there(state, tmp_path) and not verify(str(tmp_path)).damages
    assert finalized == [0, 1, 2] and (tmp_path / "common.pt").read_text() == "of the caller"
    assert [path.name for path in tmp_path.parent.iterdir() if "partial" in path.name] == []


def test_several_under_way_are_finalized_in_order(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    states = [small_state() for _ in range(5)]
    for number, state in enumerate(states):
        queue.schedule_async_request(plan(state, tmp_path / str(number)))
    assert queue.maybe_finalize_async_calls(blocking=True) == list(range(5))
    assert all(is_there(state, tmp_path / str(number)) for number, state in enumerate(states))


def test_it_can_be_done_at_once(tmp_path: Path) -> None:
    plan(state := small_state(), tmp_path).execute_sync()
    assert is_there(state, tmp_path)


def test_the_newest_metadata_is_read(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    """Also where a reader has read what was there before; upstream it keeps that."""
    for names in ("a", "ab", "c"):
        queue.schedule_async_request(plan({name: torch.ones(3) for name in names}, tmp_path))
        queue.maybe_finalize_async_calls(blocking=True)
        reader = nvrx.CachedMetadataFileSystemReader(tmp_path)
        assert set(reader.read_metadata().state_dict_metadata) == set(names)
        assert reader.read_metadata() is nvrx.CachedMetadataFileSystemReader(tmp_path).read_metadata()
    nvrx.CachedMetadataFileSystemReader.clear_metadata_cache()
    assert not nvrx.CachedMetadataFileSystemReader._cache


def test_it_does_not_overwrite_unless_it_may(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    (tmp_path / "common.pt").touch()
    for works in (True, False):
        writer = nvrx.FileSystemWriterAsync(tmp_path, overwrite=False)
        planned = nvrx.save_state_dict_async_plan({"w": torch.full((3,), float(works))}, writer)
        if works:
            nvrx.save_state_dict_async_finalize(*planned)
        else:
            with pytest.raises(CheckpointException, match="a checkpoint never replaces another by accident"):
                nvrx.save_state_dict_async_finalize(*planned)
    assert is_there({"w": torch.ones(3)}, tmp_path)


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    for option in ({"separation_hint": "model"}, {"use_msc": True}):
        with pytest.raises(ValueError, match=next(iter(option))):
            nvrx.FileSystemWriterAsync(tmp_path, **option)
    with pytest.raises(ValueError, match="io_priority"):
        nvrx.AsyncCallsQueue(io_priority=4)


def test_priorities_reach_the_worker(tmp_path: Path) -> None:
    nvrx.AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=17, io_priority=3, cpu_shm_mode=True)
    try:
        (worker,) = [each for each in psutil.Process().children() if "asyncckpt.worker" in " ".join(_cmdline(each))]
        assert worker.nice() == 17 and worker.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    finally:
        runtime.close()
        runtime._choice.clear()


# Any other function.


class OtherRequest(NamedTuple):
    """Of a class of somebody else's. Upstream drops it without a word, and waits for ever."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any
    async_fn_kwargs: Any = None
    preload_fn: Any = None


def test_any_function_runs_in_a_helper(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    """A closure too; the tensors among its arguments are those of the moment of the call."""
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
    """Upstream the next call of anything would wait for ever."""
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


def test_preloading_that_fails_is_raised_at_once(queue: nvrx.AsyncCallsQueue) -> None:
    with pytest.raises(OSError, match="as the test wants"):
        queue.schedule_async_request(nvrx.AsyncRequest(print, (1, 2), [], preload_fn=_raise))


def _leaves_a_function_running(path: str) -> None:
    def write() -> None:
        for _ in range(2000):
            if not psutil.pid_exists(trainer) or psutil.Process(trainer).status() == psutil.STATUS_ZOMBIE:
                break
        open(path, "w").close()

    trainer = os.getpid()
    nvrx.AsyncCallsQueue().schedule_async_request(nvrx.AsyncRequest(write, (), []))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_trainer_leaves_nobody_behind(tmp_path: Path) -> None:
    """What it had asked for is done all the same."""
    path = tmp_path / "file"
    assert alone(_leaves_a_function_running, str(path))[0] == -signal.SIGKILL
    for process in [each for each in psutil.process_iter() if "asyncckpt.nvrx" in " ".join(_cmdline(each))]:
        if str(os.environ["ASYNC_CKPT_RUNTIME_DIR"]) in _environ(process):
            process.wait(30)
    assert path.exists()


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environ(process: psutil.Process) -> str:
    try:
        return " ".join(process.environ().values())
    except psutil.Error:
        return ""


# None of nvrx's own faults. Their numbers are those of a study of nvrx 0.7.0; W6 and W10 are about its speed.


def test_w1_a_killed_worker_is_an_error(queue: nvrx.AsyncCallsQueue, tmp_path: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:kill")
    queue.schedule_async_request(plan(state := small_state(), tmp_path / "1"))
    with pytest.raises(CheckpointException) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert isinstance(caught.value.failures[0][0], WorkerDiedError) and not (tmp_path / "1/.metadata").exists()
    faulty_worker("")
    queue.schedule_async_request(plan(state, tmp_path / "2"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1] and is_there(state, tmp_path / "2")


def _some_have_nothing(root: str) -> None:
    rank = dist.get_rank()
    queue = nvrx.AsyncCallsQueue(cpu_shm_mode=True)
    for number in range(4):
        queue.schedule_async_request(
            plan({"w": torch.full((5,), float(number))} if rank == 1 else {}, f"{root}/{number}")
        )
        while number % 2 and queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
    # What else the ranks do meanwhile is no business of the queue, and the other way round.
    dist.barrier()
    queue.close()
    for number in range(4):
        into = {"w": torch.zeros(5)}
        stock_load(into, f"{root}/{number}")
        assert into["w"][0] == number


def test_w2_and_w4_a_rank_with_nothing_to_write(tmp_path: Path) -> None:
    run(2, _some_have_nothing, str(tmp_path), folder=tmp_path)


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


def _moved(root: str) -> None:
    """The same names, shapes and types in the job; what changes is which rank has which."""
    whole = torch.arange(8.0).reshape(4, 2)
    queue = nvrx.AsyncCallsQueue()
    for number in range(4):
        mine = dist.get_rank() if number < 2 else 1 - dist.get_rank()
        local = whole[2 * mine : 2 * mine + 2] + number
        queue.schedule_async_request(plan({f"part{mine}": local.clone()}, f"{root}/{number}"))
    queue.close()
    for number in range(4):
        into = {"part0": torch.zeros(2, 2), "part1": torch.zeros(2, 2)}
        stock_load(into, f"{root}/{number}")
        assert torch.equal(torch.cat([into["part0"], into["part1"]]), whole + number)


def _other_offsets(root: str) -> None:
    queue = nvrx.AsyncCallsQueue()
    mesh = init_device_mesh("cpu", (2,))
    turned = DeviceMesh("cpu", [1, 0])
    for number, each in enumerate([mesh, mesh, turned, turned, mesh]):
        (mine,) = each.get_coordinate() or [0]
        local = torch.arange(4.0) + 4 * mine + number
        state = {"w": DTensor.from_local(local, each, [Shard(0)])}
        queue.schedule_async_request(plan(state, f"{root}/{number}"))
    queue.close()
    for number in range(5):
        into = {"w": torch.zeros(8)}
        stock_load(into, f"{root}/{number}")
        assert torch.equal(into["w"], torch.arange(8.0) + number), number


def test_w5_other_offsets_are_another_structure(tmp_path: Path) -> None:
    run(2, _moved, str(tmp_path / "moved"), folder=tmp_path)
    run(2, _other_offsets, str(tmp_path / "offsets"), folder=tmp_path)


def test_w7_nothing_is_left_of_what_was_aborted(
    queue: nvrx.AsyncCallsQueue, tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("publish:hold")
    queue.schedule_async_request(plan({"a": torch.ones(3)}, tmp_path / "a"))
    nvrx.abort_nvrx_checkpoint()
    assert queue.get_num_unfinalized_calls() == 0 and not list(tmp_path.glob(".a*"))
    faulty_worker("")
    state = {"b": torch.zeros(4)}
    queue.schedule_async_request(plan(state, tmp_path / "b"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and is_there(state, tmp_path / "b")
    assert not (tmp_path / "a/.metadata").exists()


def test_w8_memory_is_taken_once(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    state = {f"w{number}": torch.zeros(1 << 16) for number in range(8)}
    sizes = []
    for number in range(3):
        queue.schedule_async_request(plan(state, tmp_path / str(number)))
        queue.maybe_finalize_async_calls(blocking=True)
        sizes.append([home.home.segment.nbytes for home in runtime.engine()._homes.known if home.home is not None])
    assert sizes[0] == sizes[1] == sizes[2] and len(sizes[0]) == 1
    assert sizes[0][0] < 2.5 * sum(tensor.nbytes for tensor in state.values())  # two images, and little else


def _many_tensors(root: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    state = {f"w{number}": torch.full((10,), float(number)) for number in range(2000)}
    queue = nvrx.AsyncCallsQueue(cpu_shm_mode=True)
    queue.schedule_async_request(plan(state, root))
    queue.close()
    say(is_there(state, root))


def test_w9_many_tensors_need_few_descriptors(tmp_path: Path) -> None:
    assert alone(_many_tensors, str(tmp_path / "it")) == (0, True)


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
    """And its worker leaves, as the fixture sees."""
    root = tmp_path / "it"
    assert alone(_save_and_be_killed, str(root))[0] == -signal.SIGKILL
    for process in [each for each in psutil.process_iter() if "asyncckpt.worker" in " ".join(_cmdline(each))]:
        if str(os.environ["ASYNC_CKPT_RUNTIME_DIR"]) in _environ(process):
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


def test_w16_what_failed_is_nowhere(queue: nvrx.AsyncCallsQueue, tmp_path: Path, faulty_worker: Faulty) -> None:
    faulty_worker("sync:eio")
    (tmp_path / "it").mkdir()
    (tmp_path / "it/common.pt").touch()
    queue.schedule_async_request(plan(small_state(), tmp_path / "it"))
    with pytest.raises(CheckpointException):
        queue.maybe_finalize_async_calls(blocking=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["it", "common.pt"]


def test_w17_a_request_of_another_class_is_served(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    request = plan(state := small_state(), tmp_path)
    queue.schedule_async_request(OtherRequest(*request[:5]))  # type: ignore[arg-type]
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and is_there(state, tmp_path)


def _a_worker_dies(root: str, bad: int) -> str:
    real = client.command
    if dist.get_rank() == bad:
        faulty("write:kill")
    queue = nvrx.AsyncCallsQueue()
    queue.schedule_async_request(plan({f"w{dist.get_rank()}": torch.ones(1000)}, f"{root}/1"))
    polls, outcome = 0, "saved"
    try:
        while queue.get_num_unfinalized_calls():
            polls += 1
            queue.maybe_finalize_async_calls(blocking=False)
    except CheckpointException as error:
        outcome = f"{list(error.failures)} {type(error.failures[bad][0]).__name__}"
    # They learned of it at the same call, and go on in step.
    client.command = real
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


def _warm_before_they_meet(root: str) -> None:
    """As Megatron-LM does: its worker is started before ``torch.distributed`` is initialised."""
    rank, world = dist.get_rank(), dist.get_world_size()
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


def _functions_on_ranks(bad: int) -> str:
    def fail(rank: int) -> None:
        if rank == bad:
            raise ValueError("as the test wants")

    queue = nvrx.AsyncCallsQueue()
    queue.schedule_async_request(nvrx.AsyncRequest(fail, (dist.get_rank(),), [dist.barrier]))
    try:
        while not queue.maybe_finalize_async_calls(blocking=False, no_dist=False):
            pass
    except CheckpointException as error:
        return str(list(error.failures))
    finally:
        queue.close()
    return "done"


@pytest.mark.parametrize(("bad", "outcome"), [(1, "[1]"), (2, "done")])
def test_functions_end_on_all_ranks_alike(tmp_path: Path, bad: int, outcome: str) -> None:
    assert run(2, _functions_on_ranks, bad, folder=tmp_path) == [outcome] * 2


# Which implementation serves.

_GUARD = """
import inspect, logging, sys, torch
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from asyncckpt import nvrx
mode = {"True": True, "False": False, "None": None}[sys.argv[1]]
found = [nvrx.family(mode) for _ in range(2)][0]
print("native" if found.native else "ours", found.cpu_shm)
"""


@pytest.mark.parametrize("version", NVRX)
def test_the_guard_looks_at_signatures(version: str) -> None:
    has_the_mode = version != "nvrx-0.4.1"
    asked = python(_GUARD, version, arguments=("True",))
    assert ("native True" if has_the_mode else "ours True") in asked
    assert asked.count("asyncckpt does it in its place") == (0 if has_the_mode else 1)
    assert "in its place" not in python(_GUARD, version, arguments=("None",))
    assert "native False" in python(_GUARD, version, arguments=("False",))


def test_without_nvrx_ours_serves() -> None:
    assert python(_GUARD, arguments=("True",)).split() == ["ours", "True"]
    with pytest.raises(pytest.fail.Exception, match=r"pip install\s+'asyncckpt\[nvrx\]'"):
        python(_GUARD, arguments=("False",))


# A job of one process: nvrx's own finalizing talks to a device, unless it is told of another.
_SAVE = """
import logging, os, sys, torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from asyncckpt import nvrx

def main():
    folder = sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}.meeting", rank=0, world_size=1)
    torch.cuda.current_device = lambda: "cpu"
    found = nvrx.family(True)
    queue = found.queue(persistent=True)
    found.warm_up(0)
    state = {f"w{number}": torch.full((1000,), float(number)) for number in range(20)} | {"step": 3}
    for number in range(3):
        path = f"{folder}/{number}"
        os.makedirs(path)
        writer = found.writer(path, thread_count=2)
        planned = found.save_state_dict_async_plan(state, writer, None, 0)
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = [lambda: found.save_state_dict_async_finalize(*planned)]
        queue.schedule_async_request(found.AsyncRequest(function, arguments, finalize, preload_fn=preload))
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        into = {f"w{number}": torch.zeros(1000) for number in range(20)} | {"step": 0}
        state_dict_loader.load(into, checkpoint_id=path)
        assert into.pop("step") == 3 and all(torch.equal(value, state[name]) for name, value in into.items())
    queue.close()
    dist.destroy_process_group()
    print("native" if found.native else "ours", "saved")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("version", [*NVRX, ""])
def test_with_every_nvrx_a_save_is_one_that_stock_dcp_reads(version: str, tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(_SAVE)
    code = f"import runpy, sys; sys.argv = ['', sys.argv[1]]; runpy.run_path({str(script)!r}, run_name='__main__')"
    native = version in ("nvrx-0.6.0", "nvrx-0.7.0")
    said = python(code, *filter(None, [version]), arguments=(str(tmp_path / "it"),))
    assert f"{'native' if native else 'ours'} saved" in said
