#!/usr/bin/env python3
"""What a save costs, beside the limits of this machine's memory and disk, and beside other ways to save.

    scripts/bench_save.py --gib 1 --tensors 400 --saves 5 --peers dcp-thread,dcp-process,dcp-save,torch-save
    scripts/bench_save.py --tensors 8000 --tensor-kb 50 --objects 5000 --changing 50
    scripts/bench_save.py --peers nvrx,asyncckpt-nvrx          # nvrx 0.7.0, as scripts/peers.sh unpacks it

All take turns in one run: each round measures every limit and every contestant once. The first round is the cold one
and given apart. *Stall*: how long the trainer is blocked, by the call, and by what it has to do itself when the data is
written. *Durable*: from the call until data and metadata are synced.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

try:
    import asyncckpt
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import asyncckpt

from asyncckpt.nvrx.calls import _SaveCall
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.worker.storage import OutputFile

State = dict[str, Any]
PIECE_BYTES = 16 << 20


@dataclass
class Pending:
    """A save under way."""

    wait: Callable[[], object] = lambda: None
    """Waits until it is durable, or as far as it gets without the trainer."""
    finish: Callable[[], object] = lambda: None
    """What the trainer has left to do then; most have nothing."""


class Contestant(Protocol):
    """Something that saves."""

    def prepare(self, state: State) -> None:
        """Whatever it can do before its first save."""

    def save(self, folder: str, state: State) -> Pending:
        """Save into ``folder``; returns when the caller may change ``state``."""

    def close(self) -> None:
        """End all that it has started."""


class Ours:
    """One checkpointer a run, as in training."""

    def __init__(self, folder: str) -> None:
        self._checkpointer = asyncckpt.Checkpointer(folder)
        self._step = 0

    def prepare(self, state: State) -> None:
        self._checkpointer.prepare(state)

    def save(self, folder: str, state: State) -> Pending:
        self._step += 1
        return Pending(self._checkpointer.save(self._step, state).result)

    def close(self) -> None:
        self._checkpointer.close()


def be_a_job() -> None:
    """Some only save in a job of ranks: this is one of one rank."""
    if not dist.is_initialized():
        store = tempfile.mkdtemp()
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        atexit.register(shutil.rmtree, store, ignore_errors=True)
        atexit.register(dist.destroy_process_group)


class ThreadPlanner(DefaultSavePlanner):
    """DCP caches plans under the name of the planner's class: so that contestants do not share them."""


class ProcessPlanner(DefaultSavePlanner):
    """Likewise."""


class DcpAsync:
    """DCP's ``async_save`` with what makes it fast: a stager that the caller keeps, and cached plans."""

    def __init__(self, kind: str) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        process = kind == "process"
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._planner = ProcessPlanner if process else ThreadPlanner
        if process:
            os.environ.setdefault("LOCAL_RANK", "0")
            be_a_job()

    def prepare(self, state: State) -> None:
        """It has nothing of the kind."""

    def save(self, folder: str, state: State) -> Pending:
        answer: Any = async_save(
            state,
            storage_writer=FileSystemWriter(folder),
            planner=self._planner(enable_plan_caching=True),
            async_checkpointer_type=self._type,
            async_stager=self._stager,
            no_dist=not dist.is_initialized(),
        )
        return Pending(getattr(answer, "upload_completion", answer).result)

    def close(self) -> None:
        self._stager.close()


class DcpSave:
    """DCP's synchronous ``save``."""

    def prepare(self, state: State) -> None:
        """It has nothing of the kind."""

    def save(self, folder: str, state: State) -> Pending:
        save(state, storage_writer=FileSystemWriter(folder), no_dist=not dist.is_initialized())
        return Pending()

    def close(self) -> None:
        """Nothing is left."""


class TorchSave(DcpSave):
    """``torch.save`` into a file, synced."""

    def save(self, folder: str, state: State) -> Pending:
        os.makedirs(folder)
        with open(f"{folder}/state.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return Pending()


class Nvrx:
    """nvrx's way, as Megatron-LM goes it: a warm worker, plan and structure cached, staging in CPU shared memory."""

    def __init__(self, names: Any) -> None:
        """``names``: whose classes and functions to use."""
        self._names = names
        self._queue = names.AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
        self._cache = names.CheckpointMetadataCache()

    @classmethod
    def own(cls) -> Nvrx:
        """That of nvrx 0.7.0 itself."""
        folder = Path(sys.prefix, "peers", "nvrx-0.7.0")
        if not folder.is_dir():
            raise FileNotFoundError(f"it is not in {folder}; scripts/peers.sh unpacks it")
        sys.path.append(str(folder))
        # It asks for a device where all it needs is one that the process group knows.
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        be_a_job()
        homes = ("core", "filesystem_async", "state_dict_saver")
        names: dict[str, Any] = {}
        for home in homes:
            names |= vars(importlib.import_module(f"nvidia_resiliency_ext.checkpointing.async_ckpt.{home}"))
        return cls(SimpleNamespace(**names))

    @classmethod
    def ours(cls) -> Nvrx:
        """The same calls on our engine."""
        from asyncckpt import nvrx

        return cls(nvrx)

    def prepare(self, state: State) -> None:
        self._names.AsyncCallsQueue.warmup_persistent_caller(0, cpu_shm_mode=True)

    def save(self, folder: str, state: State) -> Pending:
        names = self._names
        os.makedirs(folder)
        writer = names.FileSystemWriterAsync(
            folder, thread_count=2, use_cached_data_structure=True, use_cpu_shm_for_gpu_tensors=True
        )
        planned = names.save_state_dict_async_plan(
            state, writer, None, 0, enable_cache=True, metadata_cache=self._cache
        )
        function, preload, arguments = writer.get_save_function_and_args()

        def finalize() -> None:
            names.save_state_dict_async_finalize(*planned)

        request = names.AsyncRequest(function, arguments, [finalize], preload_fn=preload)
        self._queue.schedule_async_request(request)
        return Pending(self._wait, lambda: self._queue.maybe_finalize_async_calls(blocking=True))

    def _wait(self) -> None:
        call = self._queue.async_calls[0]
        if isinstance(call[1], _SaveCall):
            call[1].failures(alone=True)  # ours
            return
        # nvrx's own: its worker says that it is done into this queue, from where finalizing takes it.
        while call.async_caller.comp_q.empty():
            time.sleep(0.001)

    def close(self) -> None:
        self._queue.close()


PEERS: dict[str, Callable[[], Contestant]] = {
    "dcp-thread": lambda: DcpAsync("thread"),
    "dcp-process": lambda: DcpAsync("process"),
    "dcp-save": DcpSave,
    "torch-save": TorchSave,
    "nvrx": Nvrx.own,
    "asyncckpt-nvrx": Nvrx.ours,
}
ASYNC_PEERS = ("dcp-thread", "dcp-process", "nvrx")


class Limits:
    """What no save can beat: one memcpy of the same bytes into warm shared memory, one direct write of them."""

    def __init__(self, nbytes: int, folder: str) -> None:
        self._nbytes = nbytes
        self._folder = folder
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._target = Segment.create("asyncckpt-bench", nbytes)
        self._target.touch()

    def memcpy(self) -> float:
        begun = time.perf_counter()
        ctypes.memmove(self._target.address, self._source.data_ptr(), self._nbytes)
        return time.perf_counter() - begun

    def direct_write(self) -> float:
        path = f"{self._folder}/limit"
        view = self._target.view[: self._nbytes // PAGE * PAGE]
        begun = time.perf_counter()
        file = OutputFile(path, direct=True)
        for offset in range(0, len(view), PIECE_BYTES):
            file.write(view[offset : offset + PIECE_BYTES], offset)
        file.sync()
        file.close()
        elapsed = time.perf_counter() - begun
        os.unlink(path)
        view.release()
        return elapsed

    def close(self) -> None:
        self._target.close()


def make_state(tensors: int, tensor_bytes: int, objects: int) -> State:
    state: State = {f"layer.{number}": torch.randn(tensor_bytes // 4) for number in range(tensors)}
    return state | {f"value.{number}": float(number) for number in range(objects)}


def change(state: State, changing: int, save_number: int) -> None:
    """What a training step would: here only enough that a stale copy would be another."""
    state["layer.0"].add_(1)
    for number in range(changing):
        state[f"value.{number}"] = save_number + number / (changing + 1)


def measure(contestant: Contestant, folder: str, state: State) -> tuple[float, float]:
    """Seconds of stall, and until durable."""
    begun = time.perf_counter()
    pending = contestant.save(folder, state)
    stall = time.perf_counter() - begun
    pending.wait()
    waited = time.perf_counter()
    pending.finish()
    ended = time.perf_counter()
    return stall + ended - waited, ended - begun


def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    tensor_bytes = args.tensor_kb * 1000 if args.tensor_kb else int(args.gib * (1 << 30)) // args.tensors
    tensor_bytes = max(4, tensor_bytes // 4 * 4)
    state = make_state(args.tensors, tensor_bytes, args.objects)
    limits = Limits(args.tensors * tensor_bytes, folder)
    makers: dict[str, Callable[[], Contestant]] = {"asyncckpt": lambda: Ours(f"{folder}/ours")}
    left_out: dict[str, str] = {}
    contestants: dict[str, Contestant] = {}
    for name, make in (makers | {name: PEERS[name] for name in args.peers}).items():
        try:
            contestants[name] = make()
            contestants[name].prepare(state)
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {error}"
            contestants.pop(name, None)
    memcpy: list[float] = []
    direct: list[float] = []
    stalls: dict[str, list[float]] = {name: [] for name in contestants}
    durables: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(args.saves + 1):
        time.sleep(args.pause)
        memcpy.append(limits.memcpy())
        direct.append(limits.direct_write())
        names = list(contestants)
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            change(state, args.changing, round_number)
            time.sleep(args.pause)
            target = f"{folder}/{name}-{round_number}"
            try:
                stall, durable = measure(contestants[name], target, state)
            except Exception as error:
                left_out[name] = f"{type(error).__name__}: {error}"
                del contestants[name]
                continue
            stalls[name].append(stall)
            durables[name].append(durable)
            shutil.rmtree(target, ignore_errors=True)
            for old in Path(folder, "ours").glob("step-*"):
                shutil.rmtree(old)
    for contestant in contestants.values():
        contestant.close()
    limits.close()
    return {
        "settings": {name: value for name, value in vars(args).items() if name not in ("json", "folder")}
        | {"bytes": args.tensors * tensor_bytes, "torch": torch.__version__},
        "limits": {"memcpy_s": memcpy[1:], "direct_write_s": direct[1:]},
        "results": {
            name: {
                "stall_s": stalls[name][1:],
                "durable_s": durables[name][1:],
                "first_stall_s": stalls[name][0],
                "first_durable_s": durables[name][0],
            }
            for name in contestants
        },
        "left_out": left_out,
    }


def report(found: dict[str, Any]) -> str:
    memcpy = statistics.median(found["limits"]["memcpy_s"])
    durable_limit = memcpy + statistics.median(found["limits"]["direct_write_s"])
    rows: list[tuple[Any, ...]] = [("the limits", memcpy * 1e3, 1, durable_limit, 1, None)]
    medians = {}
    for name, result in found["results"].items():
        stall, durable = statistics.median(result["stall_s"]), statistics.median(result["durable_s"])
        medians[name] = durable
        first = result["first_stall_s"] / stall
        rows.append((name, stall * 1e3, stall / memcpy, durable, durable / durable_limit, first))
    headers = ["", "stall ms", "/ memcpy", "durable s", "/ (memcpy + write)", "first stall / later"]
    lines = [tabulate(rows, headers=headers, floatfmt=("", ".1f", ".2f", ".3f", ".2f", ".2f"))]
    others = [(medians[name], name) for name in ASYNC_PEERS if name in medians]
    if {"nvrx", "asyncckpt-nvrx"} <= found["results"].keys():
        theirs, ours = (found["results"][name] for name in ("nvrx", "asyncckpt-nvrx"))
        ratios = [statistics.median(theirs[kind]) / statistics.median(ours[kind]) for kind in ("durable_s", "stall_s")]
        lines.append(f"in nvrx's place durable {ratios[0]:.1f} times sooner, and {ratios[1]:.1f} times less stall")
    if others:
        best, name = min(others)
        lines.append(f"durable {best / medians['asyncckpt']:.1f} times sooner than the best asynchronous peer ({name})")
    lines += [f"left out: {name}: {why}" for name, why in found["left_out"].items()]
    return "\n".join(lines)


@contextmanager
def working_folder(inside: str | None) -> Iterator[str]:
    if inside is not None:
        os.makedirs(inside, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=inside, prefix="bench-") as folder:
        yield folder


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of all tensors, in GiB")
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--tensor-kb", type=int, help="instead of --gib: the size of each tensor, in 1000 bytes")
    parser.add_argument("--objects", type=int, default=0, help="small Python values beside the tensors")
    parser.add_argument("--changing", type=int, default=0, help="how many of them change before each save")
    parser.add_argument("--saves", type=int, default=5, help="rounds, after a first one that is cold")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.5,
        help="seconds before each turn, so that none pays for what the one before left the kernel to do",
    )
    parser.add_argument(
        "--peers", type=lambda text: [name for name in text.split(",") if name], default=list(PEERS), metavar="A,B"
    )
    parser.add_argument("--folder", help="where to write, on the disk in question (default: the system's temporary)")
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args(argv)
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are: {', '.join(PEERS)}")
    with working_folder(args.folder) as folder:
        found = run(args, folder)
    print(report(found))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
