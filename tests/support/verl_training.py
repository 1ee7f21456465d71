"""verl's FSDP engine and trainers with a tiny model on a few ranks. The workers are plain processes without Ray.

Call ``verl_stand_ins.install`` before the import. The driver calls its workers over pipes, which pickle as Ray does.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import time
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from asyncckpt.engine import shared as engines
from asyncckpt.integrations.capture import replaced
from support.ranks import faulty
from support.states import same
from support.verl_stand_ins import tree

LIMIT_S = 60.0
WORDS = 32
"""The vocabulary size of the model. Most of its parameters depend on it."""

_impl: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
_managers = importlib.import_module("verl.utils.checkpoint.fsdp_checkpoint_manager")
_config = importlib.import_module("verl.trainer.config")
trainers = [importlib.import_module("verl.trainer.ppo.ray_trainer").RayPPOTrainer]
with contextlib.suppress(ImportError):  # only newer releases have it
    trainers.append(importlib.import_module("verl.trainer.ppo.v1.trainer_base").PPOTrainer)
handlers = importlib.import_module("verl.utils.checkpoint.checkpoint_handler")

_impl.load_fsdp_model_to_gpu = lambda model: None  # there is no GPU


class _Processor:
    """A processor that saves itself as tokenizers do."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


class Engine(_impl.FSDPEngine):  # type: ignore[misc]
    """verl's engine with its own way to build and train the model."""

    def __init__(self, contents: list[str], lora: bool, seed: int) -> None:
        self.checkpoint_config = _config.CheckpointConfig(save_contents=contents, load_contents=contents)
        if lora:
            object.__setattr__(self.checkpoint_config, "save_lora_only", True)
        self.model_config = SimpleNamespace(get_processor=_Processor, trust_remote_code=False)
        self._is_offload_param = self._is_offload_optimizer = False
        self._lora, self._seed = lora, seed

    def _build_model_optimizer(self) -> None:
        torch.manual_seed(self._seed)
        np.random.seed(self._seed + dist.get_rank())
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": WORDS}
        config = LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"], **sizes)
        model: Any = LlamaForCausalLM(config)
        if self._lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        for layer in model.get_base_model().model.layers if self._lora else model.model.layers:
            fully_shard(layer, mesh=mesh)
        self.module = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        torch.manual_seed(self._seed + dist.get_rank())

    def to(self, device: Any, **_: Any) -> None:
        """Do nothing: the model stays on the CPU."""

    def train(self, steps: int = 1) -> float:
        """Train. Return the last loss. The batches are random, and the same on all ranks."""
        loss = torch.zeros(())
        for _ in range(steps):
            batch = torch.randint(0, 32, (2, 8))
            dist.broadcast(batch, 0)
            loss = self.module(input_ids=batch, labels=batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.lr_scheduler.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Return the whole state with full tensors, for any number of ranks."""
        whole = StateDictOptions(full_state_dict=True)
        model = get_model_state_dict(self.module, options=whole)
        optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=whole) if self.optimizer.state else {}
        # Copy the tensors, because a pipe of multiprocessing would share their memory.
        return copy.deepcopy({"model": model, "optimizer": optimizer, "schedule": self.lr_scheduler.state_dict()})

    def random(self) -> tuple[float, float]:
        """Draw and return the next random numbers of this rank."""
        return float(torch.rand(())), float(np.random.rand())

    def use(self, name: str, value: Any, method: str, *args: Any) -> None:
        """Call ``method`` of this engine while the manager's attribute ``name`` has another value."""
        with replaced(self.checkpoint_manager, name, value):
            getattr(self, method)(*args)

    def stock(self) -> None:
        """Use verl's own manager instead of asyncckpt's."""
        self.checkpoint_manager.__class__ = _managers.FSDPCheckpointManager

    def wait(self) -> None:
        """Wait for all saves."""
        self.save_checkpoint(None)

    def until_failed(self) -> None:
        """Wait until a save has failed."""
        deadline = time.monotonic() + LIMIT_S
        while not engines.shared.get().failures and time.monotonic() < deadline:
            time.sleep(0.01)

    def handle(self, folder: str, method: str, *args: Any) -> Any:
        """Call verl's ``CheckpointHandler`` as verl's trainer for supervised training does."""
        self.is_mp_src_rank_with_outputs = lambda: True
        self.get_data_parallel_rank = dist.get_rank
        handler = handlers.CheckpointHandler(self, Loader(3), default_local_dir=folder, max_ckpt_to_keep=1)
        return getattr(handler, method)(*args), handler.train_dataloader.position


class Loader:
    """A data loader with a position."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __len__(self) -> int:
        return 100

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def serve(engine: Engine, pipe: Connection) -> None:
    """Run the driver's calls from the pipe until the driver is gone."""
    with contextlib.suppress(EOFError):
        while True:
            method, args, named = pipe.recv()
            try:
                answer = getattr(engine, method)(*args, **named)
            except Exception as error:
                traceback.print_exc()
                answer = error
            pipe.send(answer)


engine_class: Any = Engine
"""The class of the engine in new workers."""

_ends_here: list[Connection] = []  # the driver's ends of the pipes to all workers


def _work(pipe: Connection, rank: int, world: int, meeting: str, options: dict[str, Any]) -> None:
    for end in _ends_here:  # otherwise no worker would see that the driver is gone
        end.close()
    try:
        if fault := options.pop("fault", None):
            faulty(fault)
        os.environ |= options.pop("environment", {})
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        engine = engine_class(**options)
        engine.initialize()
        serve(engine, pipe)
        engines.shared.close()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class Workers:
    """The workers of a model, one rank each. Each method runs on all workers, as in verl's worker groups."""

    def __init__(self, pipes: list[Connection]) -> None:
        """``pipes``: one pipe to each worker."""
        self.pipes = pipes

    def call(self, method: str, *args: Any, **named: Any) -> list[Any]:
        """Call a method on all ranks. Return the results. Raise the first error at once, as Ray does."""
        for pipe in self.pipes:
            pipe.send((method, args, named))
        answers: dict[Connection, Any] = {}
        while missing := [pipe for pipe in self.pipes if pipe not in answers]:
            ready = wait(missing, LIMIT_S)
            if not ready:
                raise TimeoutError(f"{len(missing)} ranks do not return from {method}")
            for pipe in missing:
                if pipe in ready:
                    answers[pipe] = pipe.recv()
                    if isinstance(answers[pipe], Exception):
                        raise answers[pipe]
        return [answers[pipe] for pipe in self.pipes]

    def save_checkpoint(self, *args: Any, **named: Any) -> None:
        self.call("save_checkpoint", *args, **named)

    def load_checkpoint(self, *args: Any, **named: Any) -> None:
        self.call("load_checkpoint", *args, **named)


class Group(Workers):
    """Workers in processes that this object starts."""

    def __init__(
        self,
        world: int,
        folder: Path,
        contents: tuple[str, ...] = ("model", "optimizer", "extra"),
        lora: bool = False,
        seed: int = 0,
        **faults: Any,
    ) -> None:
        context = get_context("fork")
        meeting = str(folder / f"meeting-{os.urandom(4).hex()}")
        options = {"contents": list(contents), "lora": lora, "seed": seed, **faults}
        super().__init__([])
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            _ends_here.append(ours)
            process = context.Process(target=_work, args=(theirs, rank, world, meeting, options))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)

    def kill(self) -> None:
        """Kill all workers at once."""
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        for pipe in self.pipes:
            _ends_here.remove(pipe)
            pipe.close()
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.join(LIMIT_S)
            if process.exitcode is None:
                process.kill()
                process.join()


@contextlib.contextmanager
def group(*args: Any, **options: Any) -> Iterator[Group]:
    """Yield a group. Close it at the end, and kill it after an exception."""
    new = Group(*args, **options)
    try:
        yield new
    except BaseException:
        new.kill()
        raise
    new.close()


strategy = "fsdp2"
"""The engine in the configuration of the drivers."""
async_save = False
"""The option of verl in that configuration."""


def driver(kind: Any, folder: Path, actor: Any, critic: Any = None, keep: int | None = None, steps: int = 100) -> Any:
    """Return a trainer of this ``kind`` with these workers, which can only save and load."""
    own: Any = type("Trainer", (kind,), {"__init__": lambda self: None})
    own.__abstractmethods__ = frozenset()
    trainer: Any = own()
    trainer.config = tree(
        {
            "trainer": {
                "default_local_dir": str(folder),
                "default_hdfs_dir": None,
                "max_actor_ckpt_to_keep": keep,
                "max_critic_ckpt_to_keep": keep,
                "resume_mode": "auto",
                "del_local_ckpt_after_load": False,
            },
            "actor_rollout_ref": {"actor": {"strategy": strategy, "checkpoint": {"async_save": async_save}}},
            "critic": {"strategy": strategy},
        }
    )
    trainer.actor_rollout_wg, trainer.critic_wg, trainer.use_critic = actor, critic, critic is not None
    trainer.train_dataloader, trainer.total_training_steps, trainer.global_steps = Loader(0), steps, 0
    trainer.trainer_mode = "sync"
    trainer.told = []
    trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **told: trainer.told.append(told["async_save"]))
    return trainer


def save(trainer: Any, step: int) -> None:
    """Save a step with the trainer."""
    trainer.global_steps = trainer.train_dataloader.position = step
    trainer._save_checkpoint()


def settle(trainer: Any) -> None:
    """Wait until all saves have ended, so that the tracker file is up to date."""
    for group in (trainer.actor_rollout_wg, *([trainer.critic_wg] if trainer.use_critic else [])):
        group.call("wait")


def check_same(one: Any, other: Any) -> None:
    """Assert that two states are equal, and their tensors to the bit."""
    differing = list(_differing(one, other, ""))
    assert not differing, differing[:8]


def _differing(one: Any, other: Any, name: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _differing(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from _differing(*pair, f"{name}.{number}")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not same(one, other):
            yield name
    elif one != other:
        yield f"{name}: {one!r}, {other!r}"
