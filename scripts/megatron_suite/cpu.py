"""megatron-core on CPUs and gloo, where it asks for CUDA and NCCL."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """What asks for a tensor on CUDA gets one on the CPU, which says that it is on CUDA."""

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
    """All work of a CPU is done at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """It has ended already."""

    def synchronize(self) -> None:
        """It has ended already."""


def patch_cuda() -> None:
    """Have ``torch.cuda`` say that its device is the CPU, before megatron-core is imported.

    Its tracker of generators swaps the state of the one that dropout draws from: that is the CPU's, and no other.
    """
    warnings.simplefilter("ignore")  # that Apex and others are not there
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
    """The same for a function of megatron-core's own, once it is imported."""
    from megatron.core.tensor_parallel import random as tracked

    tracked._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
