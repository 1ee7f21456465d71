"""Measure exports of a checkpoint to other forms, next to a copy of its bytes and to torch's own tool.

All ways take turns. Each turn starts with files out of the page cache, and ends when the result is on storage. The
suite syncs the files of torch's tool. Each result is loaded and compared.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import asyncckpt
from asyncckpt.exporting.export import export
from asyncckpt.shm.huge import huge_buffer
from asyncckpt.shm.segment import BLOCK, round_up
from asyncckpt.storage import step_folder
from asyncckpt.storage.local_file import LocalFile, LocalInputFile
from bench import files
from bench.figures import COPY_FILE as COPY
from bench.states import Request, State, make, same_tensors
from bench.turns import Pace, take

COPY_THREADS = 4
COPY_BYTES = 4 << 20
STEP = 1


def copy(source: str, out: str) -> None:
    """Copy a file past the page cache, in large pieces by a few threads, and sync it. This is the limit of exports."""
    into, outof = LocalFile(out, direct=True), LocalInputFile(source)
    nbytes = os.stat(source).st_size

    def some(number: int) -> None:
        buffer = huge_buffer(COPY_BYTES)
        for at in range(number * COPY_BYTES, nbytes, COPY_THREADS * COPY_BYTES):
            done = outof.read([buffer], at)
            into.write(buffer[: round_up(done, BLOCK)], at)

    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(some, range(COPY_THREADS)))
    into.truncate(nbytes)
    into.sync()
    into.close()
    outof.close()


def stock_to_torch(source: str, out: str) -> None:
    """Convert a DCP checkpoint to a file of torch by DCP's own tool."""
    dcp_to_torch_save(source, out)


Way = Callable[[str, str], object]
"""Exports a checkpoint from one path to another."""

WAYS: Mapping[str, tuple[str, Way]] = {
    "asyncckpt, to safetensors": ("ours", partial(export, to="hf")),
    "asyncckpt, to torch": ("ours", partial(export, to="torch")),
    "asyncckpt, to a checkpoint": ("ours", partial(export, to="dcp")),
    "asyncckpt, to safetensors in bf16": ("ours", partial(export, to="hf", dtype="bf16")),
    "asyncckpt, DCP's to torch": ("stock", partial(export, to="torch")),
    "DCP's dcp_to_torch_save": ("stock", stock_to_torch),
}
"""Each way to export, with the checkpoint that it reads."""


def measure(request: Request, pace: Pace, folder: str) -> dict[str, Any]:
    """Measure all ways to export, and the limit."""
    made = make(request)
    sources = {"ours": step_folder(f"{folder}/root", STEP), "stock": f"{folder}/stock"}
    with files.runtime_folder(f"{folder}/runtime"), asyncckpt.Checkpointer(f"{folder}/root") as checkpointer:
        checkpointer.save(STEP, made.state).result(600)
    state_dict_saver.save(made.state, checkpoint_id=sources["stock"])
    files.sync(folder)
    turns = {COPY: partial(_turn, copy, f"{sources['ours']}/__0_0.distcp", f"{folder}/out", None)}
    for name, (source, way) in WAYS.items():
        expected = None if "bf16" in name else made.state
        turns[name] = partial(_turn, way, sources[source], f"{folder}/out", expected)
    taken = take(turns, pace, f"export {request.label}")
    return {
        "state": made.facts(),
        "limits": {COPY: taken.found[COPY][1:]},
        "results": {name: {"export_s": seconds[1:]} for name, seconds in taken.found.items() if name != COPY},
        "left_out": taken.left_out,
    }


def _turn(way: Way, source: str, out: str, expected: State | None) -> float:
    """Export, compare and remove the result. Return the seconds of the export."""
    files.forget(source if os.path.isdir(source) else os.path.dirname(source))
    begun = time.perf_counter()
    way(source, out)
    is_folder = os.path.isdir(out)
    files.sync(out if is_folder else os.path.dirname(out))
    elapsed = time.perf_counter() - begun
    if expected is not None and not _has(out, expected):
        raise RuntimeError("it has written something else")
    shutil.rmtree(out) if is_folder else os.unlink(out)
    return elapsed


def _has(out: str, expected: State) -> bool:
    """Return whether the export in ``out`` has the tensors of a state."""
    if not os.path.isdir(out):
        return same_tensors(expected["model"], torch.load(out, mmap=True)["model"])
    found: dict[str, torch.Tensor] = {}
    if (Path(out) / "asyncckpt.json").exists():
        into = {name: torch.empty_like(tensor) for name, tensor in expected["model"].items()}
        asyncckpt.load({"model": into}, checkpoint_id=out)
        return same_tensors(expected["model"], into)
    from safetensors.torch import load_file

    for file in Path(out).glob("*.safetensors"):
        found |= load_file(file)
    model = {name.removeprefix("model."): each for name, each in found.items() if name != "step"}
    return same_tensors(expected["model"], model)
