"""Unchanged Megatron-LM on our engine: megatron-core itself, and the wiring of newer trees."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.peers import MEGATRON, NVRX, python

pytestmark = pytest.mark.usefixtures("forkserver")

# The ranks of a job, each with megatron-core's own save and load.
_RANKS = """
import multiprocessing, os, sys, time, traceback, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist

ROOT = sys.argv[1]

def state(step, rank, world):
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    return {
        "part": ShardedTensor.from_rank_offsets("part", torch.full((4, 6), float(step + rank)), (0, rank, world)),
        "replica": ShardedTensor.from_rank_offsets("replica", torch.full((5,), float(step)), replica_id=rank),
        # One that grows from save to save, as the states of random generators and data loaders do.
        "object": ShardedObject("object", {"rank": rank, "text": "x" * 40 * step}, (world,), (rank,)),
        "step": step,
    }

def check(step, rank, world, folder):
    from megatron.core import dist_checkpointing
    got = dist_checkpointing.load(state(0, rank, world), folder)
    assert torch.equal(got["part"], torch.full((4, 6), float(step + rank))), (step, rank, got)
    assert torch.equal(got["replica"], torch.full((5,), float(step))) and got["step"] == step
    assert got["object"] == {"rank": rank, "text": "x" * 40 * step}

def made(path, rank):
    if rank == 0:
        os.makedirs(path)
    dist.barrier()
    return path

def main(rank, world, function):
    try:
        dist.init_process_group("gloo", init_method=f"file://{ROOT}.meeting", rank=rank, world_size=world)
        function(rank, world)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)

def run(function, world=2):
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(rank, world, function)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    for rank in ranks:
        if rank.exitcode is None:
            rank.kill()
    codes = [rank.exitcode for rank in ranks]
    assert codes == [0] * world, codes
"""

_CORE = (
    _RANKS
    + """
def work(rank, world):
    import asyncckpt.integrations.megatron
    asyncckpt.integrations.megatron.install()
    asyncckpt.integrations.megatron.install()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from asyncckpt.integrations import nvrx
    assert issubclass(AsyncCallsQueue, nvrx.AsyncCallsQueue)
    queue = AsyncCallsQueue(persistent=True)
    for step in (1, 2, 3, 4):
        folder = made(f"{ROOT}/{step}", rank)
        request = dist_checkpointing.save(state(step, rank, world), folder, async_sharded_save=True)
        queue.schedule_async_request(request)
        while step != 2 and queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    for step in (1, 2, 3, 4):
        check(step, rank, world, f"{ROOT}/{step}")
        assert {"common.pt", "metadata.json", ".metadata"} <= set(os.listdir(f"{ROOT}/{step}"))
    # Not asynchronous: megatron-core goes the same way, and waits.
    dist_checkpointing.save(state(5, rank, world), made(f"{ROOT}/5", rank))
    check(5, rank, world, f"{ROOT}/5")
    # In the place of one that was not finished.
    dist_checkpointing.save(state(6, rank, world), f"{ROOT}/5")
    check(6, rank, world, f"{ROOT}/5")
    # With a structure that is said to be constant, stock code that resumes finds the plans of all ranks.
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
    from torch.distributed.checkpoint import FileSystemReader
    from asyncckpt.loading.unpickle import load_metadata
    planned = []
    create = MCoreSavePlanner.create_local_plan
    MCoreSavePlanner.create_local_plan = lambda self: planned.append(create(self)) or planned[-1]
    strategy = get_default_save_sharded_strategy("torch_dist", 1)
    for step, constant in ((7, True), (8, True), (9, False)):
        strategy.use_cached_ckpt_structure = constant
        folder = made(f"{ROOT}/{step}", rank)
        # Another structure than before: plans are kept.
        whole = state(step, rank, world)
        whole["replica"].key = f"replica where it is {constant}"
        dist_checkpointing.save(whole, folder, strategy)
        plans = getattr(FileSystemReader(folder).read_metadata(), "all_local_plans", None)
        with open(f"{folder}/.metadata", "rb") as file:
            trusted = load_metadata(file.read(), folder, weights_only=True)
        assert getattr(trusted, "all_local_plans", None) == plans
        assert (plans is not None) == constant and (not constant or plans[rank] == planned[-1])
    queue.close()

run(work)
"""
)

_WRAPPED = (
    _RANKS
    + """
def work(rank, world):
    import argparse
    from megatron.core import dist_checkpointing
    from asyncckpt import wrap_save
    # Its own writer asks for them, whether there is a device or not.
    torch.cuda.synchronize, torch.cuda.current_device = lambda: None, lambda: "cpu"
    off = wrap_save(dist_checkpointing.save, argparse.Namespace())
    saved = off(state(0, rank, world), made(f"{ROOT}/0", rank))
    assert saved.done() and str(saved.result()) == f"{ROOT}/0"
    check(0, rank, world, f"{ROOT}/0")
    save = wrap_save(dist_checkpointing.save, argparse.Namespace(async_ckpt_use_cpu_shm=True))
    handles = [save(state(step, rank, world), made(f"{ROOT}/{step}", rank)) for step in (1, 2)]
    while not handles[0].done():
        pass
    handles[1].result()
    assert handles[1].done()
    for step in (1, 2):
        check(step, rank, world, f"{ROOT}/{step}")

run(work)
"""
)


# Like megatron.training.async_utils, which makes a queue at import.
_LATE = (
    _RANKS
    + """
import types
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue as Queue
training = types.ModuleType("megatron.training.async_utils")
training.AsyncCallsQueue = Queue
training._async_calls_queue = Queue()
sys.modules[training.__name__] = training

def work(rank, world):
    import asyncckpt.integrations.megatron
    from asyncckpt.integrations import nvrx
    held = [Queue()]
    try:
        asyncckpt.integrations.megatron.install()
    except asyncckpt.integrations.megatron.MegatronWiringError as error:
        assert "an object holds it" in str(error), error
    else:
        raise AssertionError("a queue is left that saves by itself")
    assert type(training._async_calls_queue) is async_utils.AsyncCallsQueue is Queue
    held.clear()
    asyncckpt.integrations.megatron.install()
    queue = training._async_calls_queue
    assert isinstance(queue, nvrx.AsyncCallsQueue) and issubclass(Queue, nvrx.AsyncCallsQueue)
    asyncckpt.integrations.megatron.install()
    assert training._async_calls_queue is queue
    from megatron.core import dist_checkpointing
    request = dist_checkpointing.save(state(1, rank, world), made(f"{ROOT}/1", rank), async_sharded_save=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    check(1, rank, world, f"{ROOT}/1")
    assert os.path.exists(f"{ROOT}/1/asyncckpt.json")
    queue.close()

run(work)
"""
)


def test_queues_that_were_made_before_are_replaced_or_refused(tmp_path: Path) -> None:
    python(_LATE, MEGATRON, arguments=(str(tmp_path / "it"),))


@pytest.mark.parametrize("nvrx", ["", "nvrx-0.7.0"])
def test_megatron_core_saves_and_loads(tmp_path: Path, nvrx: str) -> None:
    python(_CORE, MEGATRON, *filter(None, [nvrx]), arguments=(str(tmp_path / "it"),))


def test_megatron_cores_save_wrapped(tmp_path: Path) -> None:
    python(_WRAPPED, MEGATRON, arguments=(str(tmp_path / "it"),))


# Stand-ins for newer trees: the modules that import and inspect nvrx.

_NEWER = {
    "nvrx.py": """
from importlib import import_module
from packaging.version import Version

def has_nvrx_async_support():
    try:
        modules = [
            import_module("nvidia_resiliency_ext.checkpointing.async_ckpt." + name)
            for name in ("core", "cached_metadata_filesystem_reader", "filesystem_async", "state_dict_saver")
        ]
    except ImportError:
        return False
    assert is_nvrx_min_version(), "too old"
    return hasattr(modules[2], "_results_queue")

def is_nvrx_min_version(version="0.6.0"):
    import nvidia_resiliency_ext
    return Version(str(nvidia_resiliency_ext.__version__)) >= Version(version)
""",
    "torch.py": """
from .nvrx import has_nvrx_async_support

HAVE_NVRX = has_nvrx_async_support()

def get_async_strategy(async_strategy="nvrx", module=None):
    from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
        CachedMetadataFileSystemReader,
    )
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
        FileSystemWriterAsync,
        _results_queue,
        get_write_results_queue,
    )
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        CheckpointMetadataCache,
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )

    imports = {name: value for name, value in locals().items() if name not in ("async_strategy", "module")}
    return async_strategy, (imports if module is None else imports[module])

class TorchDistSaveShardedStrategy:
    def save(self, sharded_state_dict, checkpoint_dir):
        self.async_save(sharded_state_dict, checkpoint_dir, async_strategy="mcore")

    def async_save(self, sharded_state_dict, checkpoint_dir, async_strategy="nvrx"):
        assert async_strategy == "nvrx", "asyncckpt has no part in it"
        modules = get_async_strategy(async_strategy)[1]
        writer = modules["FileSystemWriterAsync"](checkpoint_dir)
        planned = modules["save_state_dict_async_plan"](sharded_state_dict, writer)
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = [lambda: modules["save_state_dict_async_finalize"](*planned)]
        return modules["AsyncRequest"](function, arguments, finalize, preload_fn=preload)
""",
}

_USE = """
import inspect, os, sys, torch
import asyncckpt.integrations.megatron
from asyncckpt.integrations import nvrx
asyncckpt.integrations.megatron.install()
from megatron.core.dist_checkpointing.strategies.torch import HAVE_NVRX, get_async_strategy
from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support
_, modules = get_async_strategy("nvrx")
assert HAVE_NVRX and has_nvrx_async_support() and len(modules) == 9
# As initialize_megatron and the strategy for torch_dist go about it.
assert "cpu_shm_mode" in inspect.signature(modules["AsyncCallsQueue"].__init__).parameters
queue = modules["AsyncCallsQueue"](persistent=True, cpu_shm_mode=True)
assert "cpu_shm_mode" in inspect.signature(modules["AsyncCallsQueue"].warmup_persistent_caller).parameters
modules["AsyncCallsQueue"].warmup_persistent_caller(0, cpu_priority=10, io_priority=3, cpu_shm_mode=True)
assert "mp_mode" in inspect.signature(modules["get_write_results_queue"]).parameters
modules["get_write_results_queue"](mp_mode="fork")
assert "use_cpu_shm_for_gpu_tensors" in inspect.signature(modules["FileSystemWriterAsync"].__init__).parameters
folder = sys.argv[1]
os.makedirs(folder)
writer = modules["FileSystemWriterAsync"](
    folder, separation_hint=None, thread_count=1, use_msc=False, use_cached_data_structure=True,
    use_cpu_shm_for_gpu_tensors=True,
)
cache = modules["CheckpointMetadataCache"]()
planned = modules["save_state_dict_async_plan"](
    {"w": torch.ones(10)}, writer, None, 0, planner=None, enable_cache=True, metadata_cache=cache
)
function, preload, arguments = writer.get_save_function_and_args()
finalize = [lambda: modules["save_state_dict_async_finalize"](*planned)]
request = modules["AsyncRequest"](function, arguments, finalize, async_fn_kwargs={}, preload_fn=preload)
queue.schedule_async_request(request)
assert queue.maybe_finalize_async_calls(True, no_dist=False) == [0]
assert "w" in modules["CachedMetadataFileSystemReader"](folder, cache_metadata=True).read_metadata().state_dict_metadata
# Not asynchronous.
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
os.makedirs(folder + ".2")
TorchDistSaveShardedStrategy().save({"w": torch.ones(10)}, folder + ".2")
assert os.path.exists(folder + ".2/.metadata") and os.path.exists(folder + ".2/asyncckpt.json")
queue.close(abort=False)
print("version", sys.modules["nvidia_resiliency_ext"].__version__)
"""


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the ``strategies`` folder of a tree with the newer wiring."""
    strategies = tmp_path / "tree/megatron/core/dist_checkpointing/strategies"
    strategies.mkdir(parents=True)
    for name, code in _NEWER.items():
        (strategies / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "tree")
    yield strategies
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]


def _in(tree: Path, code: str) -> str:
    return f"import sys; sys.path.insert(0, {str(tree.parents[3])!r})\n{code}"


@pytest.mark.parametrize("version", ["", *NVRX])
def test_newer_trees(newer: Path, tmp_path: Path, version: str) -> None:
    said = python(_in(newer, _USE), *filter(None, [version]), arguments=(str(tmp_path / "it"),))
    # An installed nvrx keeps its own version. The stand-in for a missing nvrx reports 0.7.0.
    assert "version" in said and ("0.7.0" in said) == (version in ("", "nvrx-0.7.0"))


def test_a_script_is_run_with_its_arguments(newer: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 5")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\n"
        "from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy\n"
        "name = get_async_strategy()[1]['AsyncCallsQueue'].__module__\n"
        "print(__name__, sys.argv[1:], beside.value, name)\n"
    )
    code = f"from asyncckpt.integrations.megatron.__main__ import main; main([{str(script)!r}, '--flag', '3'])"
    assert "__main__ ['--flag', '3'] 5 asyncckpt.integrations.nvrx.queue" in python(_in(newer, code))


_INSTALL = """
import asyncckpt.integrations.megatron
try:
    asyncckpt.integrations.megatron.install()
except asyncckpt.integrations.megatron.MegatronWiringError as error:
    print("refused:", error)
"""


def test_a_name_that_has_moved_is_named(newer: Path) -> None:
    file = newer / "torch.py"
    known = file.read_text()
    file.write_text(known.replace("import AsyncCallsQueue, AsyncRequest", "import AsyncCallsQueue, NewRequest"))
    assert "refused: Megatron-LM wants a name" in (said := python(_in(newer, _INSTALL))) and "NewRequest" in said
    own = known.replace("    imports = {", "    from .nvrx import is_nvrx_min_version as AsyncRequest\n    imports = {")
    file.write_text(own)
    assert "refused: Megatron-LM takes AsyncRequest from another place" in python(_in(newer, _INSTALL))
    file.write_text(known.replace("class TorchDist", "class Dist"))
    assert "refused: this Megatron-LM has no TorchDistSaveShardedStrategy" in python(_in(newer, _INSTALL))
    file.write_text("")
    (newer / "async_utils.py").write_text("class AsyncCallsQueue: pass\n")
    assert "refused: this Megatron-LM has no FileSystemWriterAsync" in python(_in(newer, _INSTALL))


def test_without_megatron_it_says_so() -> None:
    assert "refused: Megatron-LM cannot be imported here" in python(_INSTALL)


def test_where_it_is_refused_nvrx_is_as_it_was(newer: Path) -> None:
    """After a refusal, nvrx's module names never lead to our classes, with nvrx installed or not."""
    file = newer / "torch.py"
    file.write_text(file.read_text().replace("import AsyncCallsQueue, AsyncRequest", "import AsyncCallsQueue, New"))
    find = "\nfrom importlib.util import find_spec\nprint(find_spec('nvidia_resiliency_ext'))"
    assert python(_in(newer, _INSTALL + find)).endswith("\nNone\n")
    names = "AsyncCallsQueue, AsyncRequest"
    theirs = f"\nfrom nvidia_resiliency_ext.checkpointing.async_ckpt.core import {names}\nprint(*map(str, [{names}]))"
    said = python(_in(newer, _INSTALL + theirs), "nvrx-0.7.0")
    assert "refused:" in said and said.count("<class 'nvidia_resiliency_ext.") == 2
