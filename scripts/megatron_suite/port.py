"""Run Megatron-LM's sources in this process and its forks on CPUs and gloo."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron_suite import fused
from megatron_suite.cpu import patch_cuda, patch_tracker

_GLOO_LIMIT = timedelta(seconds=60)


def prepare(checkout: Path, nvrx: Path | None, ranks: int) -> None:
    """Put Megatron-LM on the path of this process and its forks, and make it run on CPUs."""
    sys.path[:0] = [str(checkout), *([str(nvrx)] if nvrx else [])]
    os.chdir(checkout)
    _patch_torch(ranks)
    fused.stand_in()
    SpawnContext.Process = _SpawnedProcess
    dist.init_process_group = _on_gloo(dist.init_process_group)
    dist.new_group = _on_gloo(dist.new_group)
    own = "asyncckpt.integrations.megatron"  # the import alone changes nothing
    for module in ("megatron.training.checkpointing", "megatron.training.training", "pytest", own):
        importlib.import_module(module)
    patch_tracker()
    writers: Any = FileSystemWriter
    if not hasattr(writers, "metadata_path"):  # torch had this when core 0.16 was released
        writers.metadata_path = property(lambda writer: writer.fs.concat_path(writer.path, ".metadata"))
    # Tests expect no log output, and this logger of torch passes everything by default.
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.INFO)
    _do_without_transformer_engine()


def close_groups() -> None:
    """Close released process groups after a test has ended on all ranks, because each gloo group has threads.

    A test leaves dozens of groups. Groups that the test still holds are closed after a later test.
    """
    state: Any = importlib.import_module("megatron.core.parallel_state")
    if not dist.is_initialized() or state.model_parallel_is_initialized():
        return
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def _patch_torch(ranks: int) -> None:
    """Patch this process before it imports megatron-core, which imports triton and asks for a device."""
    torch.cuda.device_count = lambda: ranks
    patch_cuda()
    if find_spec("triton") is None:
        importlib.import_module("torch._inductor.compile_fx")  # before the stand-in, which it would take for triton
        for name in ("triton", "triton.language"):
            sys.modules[name] = _Anything(name)


class _SpawnedProcess(SpawnProcess):
    """A process that patches torch before it unpickles its target, because unpickling imports megatron-core."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _patched_process, (torch.cuda.device_count(),), self.__dict__


def _patched_process(ranks: int) -> _SpawnedProcess:
    """Return the process, still without its attributes, in the process itself."""
    _patch_torch(ranks)
    torch.set_num_threads(1)
    return _SpawnedProcess.__new__(_SpawnedProcess)


def _on_gloo(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        arguments = tuple("gloo" if argument == "nccl" else argument for argument in arguments)
        if "backend" in keywords:
            keywords["backend"] = "gloo"
        return function(*arguments, **keywords | {"timeout": _GLOO_LIMIT})

    return call


def _do_without_transformer_engine() -> None:
    """Replace TransformerEngine's GPU layers by Megatron-LM's own, and report a version without features."""
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    for kind in ("spec", "submodules"):  # core 0.16 has only "spec"
        if local := getattr(specs, f"get_gpt_layer_local_{kind}", None):
            setattr(specs, f"get_gpt_layer_with_transformer_engine_{kind}", _local_layers(local))
    specs.TENorm = specs.LNImpl
    specs = importlib.import_module("megatron.core.models.bert.bert_layer_specs")
    specs.bert_layer_with_transformer_engine_spec = specs.bert_layer_local_spec
    specs = importlib.import_module("megatron.core.models.T5.t5_spec")
    specs.encoder_model_with_transformer_engine_default_spec = specs.encoder_model_with_local_spec
    specs.decoder_model_with_transformer_engine_default_spec = specs.decoder_model_with_local_spec
    importlib.import_module("megatron.core.utils")._te_version = Version("0")  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(check_fp8_support=lambda: (False, "this is a CPU"), fp8_autocast=None)


def _local_layers(make: Any) -> Any:

    def spec(num_experts: Any = None, moe_grouped_gemm: Any = False, *_: Any, **options: Any) -> Any:
        known = {name: value for name, value in options.items() if name in ("qk_layernorm", "multi_latent_attention")}
        return make(num_experts=num_experts, moe_grouped_gemm=moe_grouped_gemm, **known)

    return spec


class _Anything(ModuleType):
    """A stand-in for triton. Tests here never run triton's kernels."""

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
