"""Megatron-LM's sources in this process and its forks: on CPUs, and on gloo."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_suite import fused
from megatron_suite.cpu import patch_cuda, patch_tracker

_GLOO_LIMIT = timedelta(seconds=60)


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
