"""Helpers for the tests of nvrx's names: requests as in Megatron-LM, and checks of their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from asyncckpt.integrations import nvrx
from support.states import same, stock_load, zeros_like

State = dict[str, Any]


def plan(state: State, folder: Path | str, done: Callable[[], Any] = lambda: None) -> nvrx.AsyncRequest:
    """Plan a save and return its request, as Megatron-LM does."""

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
    """Return whether stock DCP loads ``state`` from ``folder``."""
    into = zeros_like(state)
    stock_load(into, folder)
    return same(into, state)


class OtherRequest(NamedTuple):
    """A request of a foreign class. Upstream drops it silently, and then waits forever."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any
    async_fn_kwargs: Any = None
    preload_fn: Any = None


def processes(module: str) -> list[psutil.Process]:
    """Return the processes that run ``module`` in this test's runtime folder."""
    return [process for process in psutil.process_iter() if _runs(process, module)]


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        here = os.environ["ASYNC_CKPT_RUNTIME_DIR"] in process.environ().values()
        return here and module in " ".join(process.cmdline())
    except psutil.Error:
        return False
