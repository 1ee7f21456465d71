"""Measure saves of several ranks under FSDP2, for a model with trained adapters and a frozen base.

The model is a stack of transformer layers, or a Llama of transformers with peft's adapters, with random weights on a
CPU. Forward and backward run once. From then on AdamW repeats its step with the same gradients. Each step changes all
adapters and their moments, and costs almost no time.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.limits import Limits
from bench.ranks import launch
from bench.states import GIB, State, local_of, tensors_of
from bench.turns import Pace
from bench.unchanged import (
    COPY_CHANGING,
    DIGESTS,
    MIB,
    WRITE_CHANGING,
    Row,
    Saver,
    configs,
    limits_of,
    results,
    take_turns,
)

WIDTH, SMALL_WIDTH = 1024, 256
HEADS = 8
TOKENS = 16
# Below this size the layers have the small width. Otherwise not even one layer would fit.
_SMALL_BYTES = 256 * MIB
_VOCABULARY = 8192
_STATES = 3  # the parameters and two moments of AdamW
_SUMS = ("memory", "trainer_cpu_s", "worker_cpu_s")


class Adapted(torch.nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width, bias=False)
        self.lora_a = torch.nn.Linear(width, rank, bias=False)
        self.lora_b = torch.nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return found


class Layer(torch.nn.Module):
    """Attention and two linear layers, with adapters for queries and values."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.q, self.v = Adapted(width, rank), Adapted(width, rank)
        self.k, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width, bias=False),
            torch.nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        within = self.norm(x)
        q, k, v = (each(within).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for each in (self.q, self.k, self.v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(-2, -3).flatten(-2))
        found: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return found


def _plain(nbytes: int, changing: int) -> tuple[torch.nn.Module, list[torch.nn.Module], torch.Tensor]:
    """Return a model on the meta device, its layers, and a training batch."""
    width = WIDTH if nbytes >= _SMALL_BYTES else SMALL_WIDTH
    count = max(1, round(nbytes / (4 * 12 * width**2)))
    rank = max(1, round(changing / (4 * _STATES * 4 * width * count)))
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Layer(width, rank) for _ in range(count)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model, list(model), torch.randn(1, TOKENS, width)


def _llama(nbytes: int, changing: int) -> tuple[torch.nn.Module, list[torch.nn.Module], torch.Tensor]:
    """Return the same as ``_plain``, built by transformers and peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    width = WIDTH if nbytes >= _SMALL_BYTES else SMALL_WIDTH
    vocabulary = _VOCABULARY * width // WIDTH
    count = max(1, round((nbytes - 8 * vocabulary * width) / (4 * (4 * width**2 + 3 * width * 11 * width // 4))))
    rank = max(1, round(changing / (4 * _STATES * 4 * width * count)))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=count,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=vocabulary,
    )
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
        # Build this on the CPU: the frequencies are not parameters, so nothing fills them in later.
        with torch.device("cpu"):
            rotary = type(llama.model.rotary_emb)(config)
        model = get_peft_model(llama, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
    llama.model.rotary_emb = rotary
    return model, list(llama.model.layers), torch.randint(vocabulary, (1, TOKENS))


class Training:
    """The training of one rank."""

    def __init__(self, nbytes: int, changing: int, *, peft: bool) -> None:
        torch.manual_seed(dist.get_rank())
        model, layers, batch = (_llama if peft else _plain)(nbytes, changing)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in [*layers, model]:
            fully_shard(each, mesh=mesh)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            for parameter in model.parameters():
                local = local_of(parameter)
                local.uniform_(-0.02, 0.02) if parameter.dim() > 1 else local.fill_(1.0)
        self._model = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)
        found = model(batch)
        (found.logits if peft else found).square().mean().backward()
        self.frozen = [f"model.{name}" for name, each in model.named_parameters() if not each.requires_grad]
        """The names of the frozen parameters in the state."""
        frozen = _nbytes(parameter for parameter in model.parameters() if not parameter.requires_grad)
        self.nbytes = _nbytes(tensors_of(self.train()))
        self.changing = self.nbytes - frozen

    def train(self) -> State:
        """Run a step of AdamW, and return the state to save."""
        self._optimizer.step()
        model, optimizer = self._model, self._optimizer
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's shards."""
    return sum(local_of(tensor).nbytes for tensor in tensors)


def _rank(
    rank: int, count: int, rendezvous: str, folder: str, nbytes: int, changing: int, pace: Pace, peft: bool
) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count, timeout=limit)
    training = Training(nbytes, changing, peft=peft)
    ours = training.nbytes, training.changing
    all_bytes, all_changing = (sum(each) for each in zip(*_all(ours), strict=True))
    with ExitStack() as opened:
        whole, part = (opened.enter_context(Limits(each, folder)) for each in ours)
        writer = opened.enter_context(Limits(all_changing, folder)) if rank == 0 else None
        limits: dict[str, Callable[[], float]] = whole.of_copies() | {DIGESTS: whole.digests_all_cores}
        limits[COPY_CHANGING] = part.memcpy
        limits[WRITE_CHANGING] = lambda: writer.direct_write() if writer is not None else 0.0
        savers = {}
        for name, config in configs(training.frozen).items():
            savers[name] = Saver(os.path.join(folder, name), config, training.train, dist.barrier)
            opened.callback(savers[name].close)
        taken = take_turns(savers, {name: _together(call) for name, call in limits.items()}, pace)
    every = _all((taken.found, taken.left_out))
    if rank == 0:
        left_out = {name: why for _, theirs in every for name, why in theirs.items()}
        rows = {name: _joined([found[name] for found, _ in every]) for name in taken.found if name not in left_out}
        facts = {"nbytes": all_bytes, "changing": all_changing, "left_out": left_out}
        facts |= {"limits": limits_of(rows), "results": results(rows)}
        Path(folder, "result.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def _all(mine: Any) -> list[Any]:
    """Gather a value from all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _together(call: Callable[[], float]) -> Callable[[], float]:
    """Return a function that calls ``call`` on all ranks at once."""

    def called() -> float:
        dist.barrier()
        return call()

    return called


def _joined(of_ranks: list[list[Row]]) -> list[Row]:
    """Merge the rows of all ranks into rows of the job: the sum for ``_SUMS``, otherwise the slowest rank's value."""
    return [
        {key: (sum if key in _SUMS else max)(row[key] for row in rows) for key in rows[0]}
        for rows in zip(*of_ranks, strict=True)
    ]


def missing() -> str | None:
    """Return the name of a missing package among transformers and peft, or None."""
    return next((name for name in ("peft", "transformers") if importlib.util.find_spec(name) is None), None)


def measure(gib: float, changing_mib: float, count: int, pace: Pace, folder: str, *, peft: bool) -> dict[str, Any]:
    """Measure a job of ``count`` ranks. ``peft``: train a Llama with peft's adapters."""
    found = launch(_rank, count, folder, int(gib * GIB), int(changing_mib * MIB), pace, peft)
    model = "a Llama with LoRA by peft" if peft else "a transformer with LoRA"
    changing, nbytes = found["changing"] / MIB, found["nbytes"] / GIB
    return {"title": f"{changing:.3g} MiB of {nbytes:.3g} GiB change, {model}, {count} ranks of FSDP2", **found}
