"""One test as all ranks of a job run it: each in a fork of this process, which has imported what takes long."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import shutil
import socket
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_suite import fused
from megatron_suite.cpu import OnCpu, patch_cuda, patch_tracker

TESTS = "tests/unit_tests/dist_checkpointing"
_LIMIT_S = 180.0
_GRACE_S = 5.0
_GLOO_LIMIT = timedelta(seconds=60)
_fork = multiprocessing.get_context("fork")
# What pytest ends with, where no test failed.
_PASSED, _NOTHING_RAN = 0, 5


def prepare(checkout: Path, nvrx: Path | None, ranks: int) -> None:
    """Have this process, and its forks, find Megatron-LM and run it on CPUs."""
    sys.path[:0] = [str(checkout), *([str(nvrx)] if nvrx else [])]
    os.chdir(checkout)
    importlib.import_module("torch._inductor.compile_fx")  # which would take what follows for the real triton
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("triton")
    for name in ("triton", "triton.language"):
        sys.modules.setdefault(name, _Anything(name))
    patch_cuda()
    fused.stand_in()
    torch.cuda.device_count = lambda: ranks
    dist.init_process_group = _on_gloo(dist.init_process_group)
    dist.new_group = _on_gloo(dist.new_group)
    for module in ("megatron.training.checkpointing", "megatron.training.training", "pytest"):
        importlib.import_module(module)
    patch_tracker()
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    specs.get_gpt_layer_with_transformer_engine_spec = _local_layers(specs.get_gpt_layer_local_spec)


def collect(folder: Path, names: list[str]) -> list[str]:
    """The tests of the files ``names`` (all, if there are none)."""
    paths = [f"{TESTS}/{name}" for name in names] or [TESTS]
    process = _fork.Process(target=_collect, args=(folder / "tests", paths))
    process.start()
    process.join()
    return (folder / "tests").read_text().splitlines()


def run(test: str, folder: Path, ranks: int, *, ours: bool) -> str:
    """How ``test`` ends: "passed", "skipped", "failed" or "hung". What the ranks print is left in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    processes = [_fork.Process(target=_rank, args=(test, folder, rank, ranks, port, ours)) for rank in range(ranks)]
    for process in processes:
        process.start()
    waiting, codes = list(processes), set[int | None]()
    deadline = time.monotonic() + _LIMIT_S
    while waiting and time.monotonic() < deadline:
        wait([process.sentinel for process in waiting], timeout=1)
        codes |= {process.exitcode for process in waiting} - {None}
        waiting = [process for process in waiting if process.exitcode is None]
        if codes - {_PASSED, _NOTHING_RAN}:  # the others may be waiting for that one
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    for process in processes:
        process.kill()
        process.join()
    if codes - {_PASSED, _NOTHING_RAN}:
        return "failed"
    if waiting:
        return "hung"
    return "skipped" if _NOTHING_RAN in codes else "passed"


def _rank(test: str, folder: Path, rank: int, ranks: int, port: int, ours: bool) -> None:
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR="localhost")
    if ours:
        importlib.import_module("asyncckpt.integrations.megatron").install()
    with OnCpu():
        outcome = _Outcome()
        _pytest([test, f"--basetemp={folder / str(rank)}"], outcome)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(outcome.code())


class _Outcome:
    """A plugin that looks on."""

    def __init__(self) -> None:
        self._seen: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._seen.append(report.outcome)

    def code(self) -> int:
        """An exit code of pytest's."""
        if "failed" in self._seen or not self._seen:
            return 1
        return _PASSED if "passed" in self._seen else _NOTHING_RAN


class _Collected:
    """A plugin that writes down what there is."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_finish(self, session: Any) -> None:
        self._file.write_text("\n".join(item.nodeid for item in session.items))


def _collect(file: Path, paths: list[str]) -> None:
    file.touch()
    with OnCpu():
        _pytest([*paths, "--collect-only", "-qq", "--continue-on-collection-errors"], _Collected(file))


def _pytest(arguments: list[str], *plugins: object) -> None:
    import pytest

    from megatron_suite import plugin

    options = ["-q", "--noconftest", "-c", os.devnull, f"--rootdir={os.getcwd()}", "-p", "no:cacheprovider"]
    pytest.main([*options, *arguments], plugins=[plugin, *plugins])


def _on_gloo(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        arguments = tuple("gloo" if argument == "nccl" else argument for argument in arguments)
        if "backend" in keywords:
            keywords["backend"] = "gloo"
        return function(*arguments, **keywords | {"timeout": _GLOO_LIMIT})

    return call


def _local_layers(make: Any) -> Any:
    """TransformerEngine's layers are for GPUs."""

    def spec(num_experts: Any = None, moe_grouped_gemm: Any = False, *_: Any, **options: Any) -> Any:
        known = {name: value for name, value in options.items() if name in ("qk_layernorm", "multi_latent_attention")}
        return make(num_experts=num_experts, moe_grouped_gemm=moe_grouped_gemm, **known)

    return spec


class _Anything(ModuleType):
    """Stands for triton, whose kernels are never run here."""

    __path__: list[str] = []
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = _Anything(f"{self.__name__}.{name}")
        sys.modules[child.__name__] = child
        return child

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else lambda function: function
