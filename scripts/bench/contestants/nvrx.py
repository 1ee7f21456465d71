"""nvrx as Megatron-LM uses it: a warm worker, cached plan and structure, and staging in CPU shared memory."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from asyncckpt.integrations.nvrx.queue import AsyncCall
from bench.contestants import dcp
from bench.contestants.contestant import LIMIT_S, Contestant, Pending, be_a_job
from bench.states import State

POLL_S = 0.001
MODULES = ("core", "filesystem_async", "state_dict_saver")


class Nvrx(Contestant):
    """The calls of nvrx, to its own classes and functions or to asyncckpt's replacements."""

    def __init__(self, root: str, names: Any, *, shm: bool = True) -> None:
        """Use the classes and functions of ``names``. Without ``shm`` the worker receives tensors by CUDA IPC."""
        super().__init__(root)
        self._names = names
        self._shm = shm
        self._queue = names.AsyncCallsQueue(persistent=True, cpu_shm_mode=shm)
        self._cache = names.CheckpointMetadataCache()

    @classmethod
    def own(cls, root: str, *, shm: bool = True) -> Nvrx:
        """Use nvrx 0.7.0."""
        folder = Path(sys.prefix, "peers", "nvrx-0.7.0")
        if folder.is_dir():
            sys.path.append(str(folder))
        elif importlib.util.find_spec("nvidia_resiliency_ext") is None:
            raise FileNotFoundError(f"it is not in {folder}; scripts/peers.sh unpacks it")
        if not torch.cuda.is_available():
            # nvrx asks for the current CUDA device, but any device that the process group knows is enough.
            torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        be_a_job()
        names: dict[str, Any] = {}
        for module in MODULES:
            names |= vars(importlib.import_module(f"nvidia_resiliency_ext.checkpointing.async_ckpt.{module}"))
        made = cls(root, SimpleNamespace(**names), shm=shm)
        made.shares_each = shm
        return made

    @classmethod
    def own_by_ipc(cls, root: str) -> Nvrx:
        """Use nvrx 0.7.0 without CPU shared memory."""
        if not torch.cuda.is_available():
            raise RuntimeError("its worker asks for a CUDA device, and ends without one")
        return cls.own(root, shm=False)

    @classmethod
    def ours(cls, root: str) -> Nvrx:
        """Use asyncckpt's replacements for nvrx."""
        from asyncckpt.integrations import nvrx

        return cls(root, nvrx)

    def prepare(self, state: State) -> None:
        self._names.AsyncCallsQueue.warmup_persistent_caller(0, cpu_shm_mode=self._shm)

    def save(self, number: int, state: State) -> Pending:
        names = self._names
        os.makedirs(self.path(number))
        writer = names.FileSystemWriterAsync(
            self.path(number), thread_count=2, use_cached_data_structure=True, use_cpu_shm_for_gpu_tensors=self._shm
        )
        planned = names.save_state_dict_async_plan(
            state, writer, None, 0, enable_cache=True, metadata_cache=self._cache
        )
        function, preload, arguments = writer.get_save_function_and_args()

        def finalize() -> None:
            names.save_state_dict_async_finalize(*planned)

        request = names.AsyncRequest(function, arguments, [finalize], preload_fn=preload)
        self._queue.schedule_async_request(request)
        return Pending(self._wait, lambda: self._queue.maybe_finalize_async_calls(blocking=True), self._poll)

    def _wait(self) -> None:
        call = self._queue.async_calls[0]
        if isinstance(call, AsyncCall):  # asyncckpt's
            futures.wait([call.future])
            return
        # For nvrx, wait for the worker's message in this queue. Finalizing takes the message from there.
        deadline = time.monotonic() + LIMIT_S
        while call.async_caller.comp_q.empty():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not written after {LIMIT_S:g} s")
            time.sleep(POLL_S)

    def _poll(self) -> bool:
        return bool(self._queue.maybe_finalize_async_calls(blocking=False))

    def load(self, number: int, state: State) -> State:
        return dcp.load(self.path(number), state)

    def close(self) -> None:
        self._queue.close()
