"""Run megatron-core on CPUs and gloo although it asks for CUDA and NCCL."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """A mode that creates CPU tensors in place of CUDA tensors. They claim to be on CUDA."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = dict(keywords or {})
        if function is torch.Tensor.cuda:
            return arguments[0]
        if function is torch.Tensor.type and len(arguments) == 1:
            return "torch.cuda." + arguments[0].type().rpartition(".")[2]
        if str(keywords.get("device")).startswith("cuda"):
            keywords["device"] = "cpu"
        if function is torch.Tensor.to and len(arguments) > 1 and str(arguments[1]).startswith("cuda"):
            arguments = (arguments[0], "cpu", *arguments[2:])
        return function(*arguments, **keywords)


class _Stream:
    """A stand-in for a CUDA stream. A CPU finishes all work at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Do nothing, because all work has ended."""

    def synchronize(self) -> None:
        """Do nothing, because all work has ended."""


def patch_cuda() -> None:
    """Make ``torch.cuda`` report the CPU as its device. Must run before megatron-core is imported.

    Megatron's tracker of random generators swaps the state of the generator for dropout, which is the CPU's here.
    """
    warnings.simplefilter("ignore")  # Apex and other packages are missing
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.Stream = cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = contextlib.nullcontext
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)


def patch_tracker() -> None:
    """Patch a function of megatron-core in the same way, after the import."""
    from megatron.core.tensor_parallel import random as tracked

    tracked._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
