"""A small GPT with dropout, which megatron-core trains on CPUs. It is saved as in Megatron-LM's training loop."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy
import torch
import torch.distributed as dist
from megatron_suite.cpu import OnCpu, patch_cuda, patch_tracker

_VOCABULARY, _LENGTH = 32, 8


_P = ParamSpec("_P")
_T = TypeVar("_T")


def on_cpu(function: Callable[_P, _T]) -> Callable[_P, _T]:
    @functools.wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        with OnCpu():
            return function(*arguments, **keywords)

    return call


def set_up(package: str, *, tensor_parallel: int) -> None:
    """On a rank: set up megatron-core from the folder ``package`` on CPUs, with asyncckpt installed."""
    sys.path.insert(0, package)
    patch_cuda()
    import asyncckpt.integrations.megatron

    asyncckpt.integrations.megatron.install()
    initialize(tensor_parallel)


def initialize(tensor_parallel: int) -> None:
    """On a rank: set up megatron-core, after ``patch_cuda``."""
    from megatron.core import parallel_state

    patch_tracker()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


class Training:
    """The model, its optimizer and the random number generators."""

    @on_cpu
    def __init__(self, *, distributed_optimizer: bool, seed: int = 5) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        self._distributed = distributed_optimizer
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            hidden_dropout=0.2,
            attention_dropout=0.2,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
        )
        model = GPTModel(config, get_gpt_layer_local_spec(), _VOCABULARY, _LENGTH)
        wrapping = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
        self.model = DistributedDataParallel(config, wrapping, model)
        rates = {"lr": 1e-2, "min_lr": 0.0}
        options = OptimizerConfig(optimizer="adam", use_distributed_optimizer=distributed_optimizer, **rates)
        self.optimizer = get_megatron_optimizer(options, [self.model])

    def _count_steps(self) -> None:
        """Give each parameter the step count that was loaded.

        Without Apex, all parameters of the distributed optimizer share one step tensor after a load. Each parameter
        advances the tensor, and the tensor has the count from before the load. Stock saves have the same fault.
        """
        (chained,) = self.optimizer.chained_optimizers
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                chained.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    @on_cpu
    def step(self, number: int) -> float:
        """Train on the tokens of a step. Return the loss."""
        data = torch.Generator().manual_seed(100 * number + _data_parallel_rank())
        tokens = torch.randint(_VOCABULARY, (2, _LENGTH), generator=data)
        positions = torch.arange(_LENGTH).expand(2, _LENGTH)
        mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1)[None, None]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return float(loss) + random.random() + numpy.random.random()

    @on_cpu
    def sharded_state_dict(self, number: int, *, is_loading: bool = False) -> dict[str, Any]:
        """Return the whole state after a step."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}  # the default of Megatron-LM
        model = self.model.module.sharded_state_dict(metadata=metadata)
        generators = {
            "random_rng_state": random.getstate(),
            "np_rng_state": numpy.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": get_cuda_rng_tracker().get_states(),
        }
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
            "rng_state": ShardedObject("rng_state", [generators], (1, size), (0, rank), _data_parallel_rank()),
            "iteration": number,
        }

    @on_cpu
    def load(self, folder: Path) -> int:
        """Resume from a checkpoint. Return its step."""
        from megatron.core import dist_checkpointing
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        if self._distributed:
            self.step(0)  # without Apex the optimizer has no state to load into before its first step
        state = dist_checkpointing.load(self.sharded_state_dict(0, is_loading=True), str(folder))
        self.model.module.load_state_dict(state["model"])
        with torch.no_grad():  # in single precision the optimizer copies into the model's own parameters
            self.optimizer.load_state_dict(state["optimizer"])
        if self._distributed:
            self._count_steps()
        (generators,) = state["rng_state"]
        random.setstate(generators["random_rng_state"])
        numpy.random.set_state(generators["np_rng_state"])
        torch.set_rng_state(generators["torch_rng_state"])
        get_cuda_rng_tracker().set_states(generators["rng_tracker_states"])
        return int(state["iteration"])


def train(training: Training, folder: Path, begin: int, end: int, save_every: int = 0) -> Iterator[tuple[int, float]]:
    """Train from step ``begin`` to ``end``. Yield each step with its loss.

    The file ``latest`` names the step of the last finalized save. The last save is left unfinalized.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue = AsyncCallsQueue(persistent=True)
    for number in range(begin, end):
        loss = training.step(number)
        if save_every and number % save_every == 0:
            queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
            path = folder / str(number)
            path.mkdir(parents=True, exist_ok=True)
            state = training.sharded_state_dict(number)
            request = dist_checkpointing.save(state, str(path), async_sharded_save=True)
            request.add_finalize_fn(_naming(folder / "latest", number))
            queue.schedule_async_request(request)
        yield number, loss


def _naming(file: Path, number: int) -> Callable[[], None]:
    def name() -> None:
        if dist.get_rank() == 0:
            partial = file.with_suffix(".new")
            partial.write_text(str(number))
            os.replace(partial, file)

    return name


def _data_parallel_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_rank())
