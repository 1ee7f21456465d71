"""torchtitan's own ``Trainer`` and command line on CPUs, without the packages that they import for GPUs.

Importing this module replaces Triton, TensorBoard, ``datasets`` and ``tokenizers`` with stand-ins that do nothing, and
stubs the device functions that ``Trainer`` calls. ``--module`` names this module. The model is a Llama of one layer.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._inductor.compile_fx  # and all modules of torch that look for Triton
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset


class _StandIn(types.ModuleType):
    __path__: list[str] = []
    __version__ = "3.4.0"

    @staticmethod
    def jit(function: Any = None, **_: Any) -> Any:
        return function or (lambda other: other)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, found := MagicMock(name=name))
        return found


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ("triton", "tensorboard", "datasets", "tokenizers"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_OF_THE_CPU: dict[str, Any] = {
    "current_device": lambda: 0,
    "device_count": lambda: 2,
    "empty_cache": lambda: None,
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda: None,
}


def _stand_in() -> None:
    sys.meta_path.insert(0, _StandIns())
    sys.modules["torch.utils.tensorboard"] = _StandIn("torch.utils.tensorboard")
    setattr(torch._utils, "_get_available_device_type", lambda: "cpu")  # noqa: B010
    for name, function in _OF_THE_CPU.items():
        setattr(torch.cpu, name, function)
    # gloo lacks this reduction. Below, its timeouts cannot change, and the pause at the end is skipped.
    setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)  # noqa: B010


_stand_in()

import torchtitan.models.llama3 as llama  # noqa: E402
import torchtitan.train  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

torchtitan.trainer.dist_utils.set_pg_timeouts = lambda **_: None
torchtitan.trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
llama.get_attention_config = lambda _: ScaledDotProductAttention.Config()

WORDS = 64


class Tokenizer(BaseTokenizer):  # type: ignore[misc]  # torchtitan has no types
    """Does nothing, because the data are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        return []

    def decode(self, *_: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class _Words(IterableDataset[Any]):
    def __init__(self, rank: int) -> None:
        self._rank, self._at = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._at += 1
            words = torch.arange(17) * (self._at + 100 * self._rank) % (WORDS - 3)
            yield {"input": words[:-1]}, words[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._at = state_dict["at"]


class Words(ParallelAwareDataloader):  # type: ignore[misc]
    """A loader with different data for each rank and each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(_Words(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)


def debug() -> Any:
    """Return the configuration that ``--config`` names."""
    model = llama._debugmodel("")
    shape: dict[str, Any] = {"n_layers": 1, "dim": 64, "n_heads": 4, "hidden_dim": 64, "attn_backend": ""}
    rope = llama.ComplexRoPE.Config(dim=16, max_seq_len=32, theta=500000, scaling="llama")
    model = dataclasses.replace(
        model,
        dim=64,
        vocab_size=WORDS,
        tok_embeddings=dataclasses.replace(model.tok_embeddings, num_embeddings=WORDS, embedding_dim=64),
        norm=dataclasses.replace(model.norm, normalized_shape=64),
        lm_head=dataclasses.replace(model.lm_head, in_features=64, out_features=WORDS),
        layers=llama._build_llama3_layers(fuse_qkv=True, rope=rope, **shape),
    )
    spec = {"model": model, "parallelize_fn": llama.parallelize_llama, "pipelining_fn": None}
    spec |= {"post_optimizer_build_fn": None, "state_dict_adapter": None}
    return Trainer.Config(
        model_spec=ModelSpec(name="llama3", flavor="tiny", **spec),
        loss=CrossEntropyLoss.Config(),
        tokenizer=Tokenizer.Config(),
        dataloader=Words.Config(),
        optimizer=dataclasses.replace(default_adamw(lr=0.01), implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=6),
        training=TrainingConfig(local_batch_size=2, seq_len=16, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False, keep_latest_k=2),
        activation_checkpoint=None,
        debug=DebugConfig(seed=1),
    )


def main(*arguments: str) -> None:
    """Run ``python -m torchtitan.train`` with these arguments."""
    sys.argv = ["torchtitan.train", *arguments]
    torchtitan.train.main()
