"""verl's Megatron engine with a tiny model of megatron-core on CPUs.

The manager, the engine's ``initialize``, ``save_checkpoint`` and ``load_checkpoint``, and megatron-core are real. The
engine's own way to build the model, by mbridge and for GPUs, is replaced. Import ``verl_training`` before this module.
"""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron_suite.cpu import patch_cuda

from support import megatron_training, verl_training
from support.megatron_training import on_cpu
from support.verl_training import _config, _Processor

patch_cuda()
_impl: Any = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
_managers: Any = importlib.import_module("verl.utils.checkpoint.megatron_checkpoint_manager")
_impl.load_megatron_model_to_gpu = lambda *_, **__: None  # there is no GPU
_impl.get_megatron_module_device = lambda *_: "cpu"  # the one of 0.8 asks for the memory of a distributed optimizer

distributed_optimizer = False
"""Whether new engines use the distributed optimizer."""


class Config:
    """A configuration of a model of transformers, which saves itself."""

    name_or_path = ""

    def save_pretrained(self, folder: str) -> None:
        """Write a file."""
        _Processor().save_pretrained(folder)


class Engine(_impl.MegatronEngine):  # type: ignore[misc]  # verl has no types
    """verl's engine with its own way to build and train the model."""

    use, until_failed = verl_training.Engine.use, verl_training.Engine.until_failed

    def __init__(self, contents: list[str], lora: bool, seed: int) -> None:
        options = {"save_contents": contents, "load_contents": contents, "async_save": verl_training.async_save}
        self.checkpoint_config = _config.CheckpointConfig(**options)
        self.model_config = SimpleNamespace(
            get_processor=_Processor,
            hf_config=Config(),
            local_path="",
            architectures=["GPT"],
            mtp=SimpleNamespace(enable=False),
            share_embeddings_and_output_weights=True,
        )
        self.engine_config = SimpleNamespace(
            forward_only=False,
            dist_ckpt_optim_fully_reshardable=False,
            distrib_optim_fully_reshardable_mem_efficient=False,
            override_transformer_config={},
            use_distributed_optimizer=distributed_optimizer,
            use_dist_checkpointing=True,
            use_megatron_fsdp=False,
            dynamic_context_parallel=False,
        )
        self.optimizer_config = SimpleNamespace(use_checkpoint_opt_param_scheduler=True)
        self._is_offload_param = self._is_offload_optimizer = self._qat_enabled = False
        self.bridge = self.provider = self.peft_cls = None
        self._seed = seed
        megatron_training.initialize(1 if distributed_optimizer else dist.get_world_size())

    def _build_tf_config(self) -> None:
        self.is_value_model, self.param_dtype = False, torch.float32
        self.share_embeddings_and_output_weights = True
        self.training = megatron_training.Training(distributed_optimizer=distributed_optimizer, seed=self._seed)
        self.tf_config = self.training.model.config

    def _build_megatron_module(self) -> list[Any]:
        return [self.training.model]

    def _maybe_enable_fused_kernels(self) -> None:
        """Do nothing: the kernels are for GPUs."""

    def _build_optimizer(self) -> Any:
        return self.training.optimizer

    def _build_lr_scheduler(self) -> Any:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        rates = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 0.0, "lr_warmup_steps": 2, "lr_decay_steps": 20}
        decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 20, "wd_incr_style": "constant"}
        return OptimizerParamScheduler(self.optimizer, lr_decay_style="linear", **rates, **decay)

    def to(self, device: Any, **_: Any) -> None:
        """Do nothing: the model stays on the CPU."""

    @property
    def checkpoint_manager(self) -> Any:
        """The manager, by the name that the other engines use."""
        return self.checkpoint_mananager

    @on_cpu
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        super().save_checkpoint(*args, **options)

    @on_cpu
    def load_checkpoint(self, *args: Any, **options: Any) -> None:
        self.lr_scheduler.num_steps = 0  # a load adds to them
        if distributed_optimizer:
            self.training.step(0)  # without Apex the optimizer has no state to load into before its first step
        with torch.no_grad():  # in single precision the optimizer copies into the model's own parameters
            super().load_checkpoint(*args, **options)
        if distributed_optimizer:
            self.training._count_steps()

    def train(self, steps: int = 1) -> float:
        """Train. Return the last loss. The batches are random, and the same on all ranks of a tensor."""
        loss = 0.0
        for _ in range(steps):
            loss = self.training.step(int(torch.randint(1000, ())))
            self.lr_scheduler.step(1)
        return loss

    def state(self) -> dict[str, Any]:
        """Return the state of this rank."""
        model, optimizer = self.training.model.state_dict(), self.optimizer.state_dict()
        return copy.deepcopy({"model": model, "optimizer": optimizer, "schedule": self.lr_scheduler.state_dict()})

    def random(self) -> tuple[float, float]:
        """Draw and return the next random numbers of this rank."""
        return float(torch.rand(())), float(np.random.rand())

    def stock(self) -> None:
        """Use verl's own manager instead of asyncckpt's."""
        self.checkpoint_mananager.__class__ = _managers.MegatronCheckpointManager

    def wait(self) -> None:
        """Wait for all saves, if asyncckpt makes them."""
        if type(self.checkpoint_mananager) is not _managers.MegatronCheckpointManager:
            self.save_checkpoint(None)
