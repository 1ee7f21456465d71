"""The demo's trainer: a small byte-level transformer on the source of Python's own standard library, with saves or not.

Text, model, optimizer and batches are the same on every start, and a batch depends on its step alone.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.handle import Save

# Steps before the clock starts: the first ones take longer in any run.
WARM_UP = 2

_KEEP = 3
_BYTES = 256
_TEXT_BYTES = 4_000_000
_SEED = 1234


class Tell(Protocol):
    """Reports an event to whoever started the trainer."""

    def __call__(self, event: str, /, **facts: object) -> None: ...


@dataclass(frozen=True)
class Size:
    """The shape of the model, and of a batch: ``batch`` pieces of text of ``context`` bytes."""

    width: int
    layers: int
    heads: int
    batch: int
    context: int


SIZES = {
    "small": Size(width=64, layers=2, heads=2, batch=4, context=64),
    "default": Size(width=320, layers=8, heads=5, batch=8, context=128),
}


class _Block(nn.Module):
    """Causal self-attention and a two-layer network, each on a normalised copy of the stream and added to it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.mix = nn.Linear(size.width, size.width)
        self.norm_network = nn.LayerNorm(size.width)
        self.network = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.network(self.norm_network(x))
        return out


class Transformer(nn.Module):
    """Bytes in, ``(batch, context)``; scores for each next byte out, ``(batch, context, 256)``."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, size.width)
        self.places = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.Sequential(*[_Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.scores = nn.Linear(size.width, _BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.norm(self.blocks(self.bytes(tokens) + self.places)))
        return scores


class Text:
    """The text, as one tensor of bytes. A batch depends on its step alone, so that a resumed run draws the same."""

    def __init__(self) -> None:
        """Reads the ``*.py`` of the standard library in the order of their names, up to some megabytes.

        Raises ``FileNotFoundError`` where Python has come without them.
        """
        folder = Path(sysconfig.get_path("stdlib"))
        text = bytearray()
        for file in sorted(folder.glob("*.py")):
            text += file.read_bytes()
            if len(text) >= _TEXT_BYTES:
                break
        if len(text) < 10_000:
            raise FileNotFoundError(f"the source of the standard library, the demo's text, is not in {folder}")
        self.bytes = torch.frombuffer(text[:_TEXT_BYTES], dtype=torch.uint8)

    def batch(self, step: int, size: Size) -> Tensor:
        """``(batch, context + 1)`` bytes, as int64, for the step ``step``."""
        generator = torch.Generator().manual_seed(_SEED * 1_000_003 + step)
        begins = torch.randint(len(self.bytes) - size.context - 1, (size.batch, 1), generator=generator)
        return self.bytes[begins + torch.arange(size.context + 1)].long()


class Training:
    """The model, its optimizer, and one step of the one with the other; the same on every start."""

    def __init__(self, size: Size, threads: int) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(threads)
        torch.manual_seed(_SEED)
        self.size = size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.text = Text()
        self.model = Transformer(size).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0
        self.loss = 0.0
        self._fill_optimizer()

    def _fill_optimizer(self) -> None:
        """AdamW makes its state at its first step. Make it now, so that a state dict always has the same structure."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            rate, group["lr"] = group["lr"], 0.0  # so the step changes no parameter, not even by weight decay
            self.optimizer.step()
            group["lr"] = rate
        for state in self.optimizer.state.values():
            state["step"].zero_()
        self.optimizer.zero_grad()

    def train(self) -> float:
        """One step. Returns its loss."""
        self.step += 1
        batch = self.text.batch(self.step, self.size).to(self.device)
        scores = self.model(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss = loss.item()
        return self.loss

    def state(self) -> dict[str, object]:
        """The state dict of everything that goes on from here."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "loss": self.loss,
        }

    def restore(self, state: dict[str, object]) -> None:
        """Go on from ``state``, as ``state()`` gave it and a checkpoint filled it."""
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        self.step = int(state["step"])  # type: ignore[call-overload]
        self.loss = float(state["loss"])  # type: ignore[arg-type]

    def state_bytes(self) -> int:
        """The bytes of all tensors of the state."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.state_dict().values(), *moments]
        return sum(tensor.nbytes for tensor in tensors)


class _NoSaves:
    """The run that is measured against."""

    def __init__(self, training: Training, tell: Tell) -> None:
        self.training = training
        self.tell = tell

    def prepare(self) -> None:
        """Before the first step."""

    def save(self) -> float:
        """Save the state. Returns the seconds the training waited for it."""
        return 0.0

    def poll(self) -> None:
        """Tell of saves that became durable; after each step."""

    def close(self) -> None:
        """After the last step."""


class _AsyncSaves(_NoSaves):
    """With asyncckpt."""

    def __init__(self, training: Training, tell: Tell, folder: str) -> None:
        super().__init__(training, tell)
        self.checkpointer = Checkpointer(folder, Config(keep_last=_KEEP))
        self.under_way: list[tuple[Save, float]] = []

    def prepare(self) -> None:
        self.checkpointer.prepare(self.training.state())

    def resume(self) -> None:
        """Go on from the newest checkpoint, which the worker of a killed trainer may still have in memory."""
        begun = time.perf_counter()
        state = self.training.state()
        step = self.checkpointer.load(state)
        self.training.restore(state)
        loaded = self.checkpointer.loaded
        source = loaded.source if loaded is not None else ""
        self.tell("resumed", step=step, load_s=time.perf_counter() - begun, source=source)

    def save(self) -> float:
        begun = time.perf_counter()
        handle = self.checkpointer.save(self.training.step, self.training.state())
        waited_s = time.perf_counter() - begun
        self.under_way.append((handle, self.training.loss))
        self.tell("staged", step=handle.step, pid=os.getpid())
        return waited_s

    def poll(self) -> None:
        while self.under_way and self.under_way[0][0].done():
            handle, loss = self.under_way.pop(0)
            handle.result()  # raises what went wrong
            self.tell("durable", step=handle.step, loss=loss, **handle.timings)

    def close(self) -> None:
        self.checkpointer.close()
        self.poll()


class _DcpSaves(_NoSaves):
    """With torch.distributed.checkpoint, as it comes: synchronous."""

    def __init__(self, training: Training, tell: Tell, folder: str) -> None:
        super().__init__(training, tell)
        self.folder = folder

    def save(self) -> float:
        begun = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process only
            save(self.training.state(), checkpoint_id=os.path.join(self.folder, f"step-{self.training.step:08d}"))
        return time.perf_counter() - begun

    def poll(self) -> None:
        for old in sorted(Path(self.folder).iterdir())[:-_KEEP]:
            shutil.rmtree(old)


def run_trainer(job: dict[str, Any], tell: Tell) -> None:
    """All that a training process does. ``job`` is made, and what it tells is read, by ``demo.py``."""
    training = Training(SIZES[job["size"]], job["threads"])
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    tell("started", parameters=parameters, state_bytes=training.state_bytes(), device=str(training.device))
    os.makedirs(job["folder"], exist_ok=True)
    saves: _NoSaves
    if job["saves"] == "asyncckpt":
        saves = _AsyncSaves(training, tell, job["folder"])
        if job["resume"]:
            saves.resume()
    else:
        saves = _NoSaves(training, tell) if job["saves"] == "none" else _DcpSaves(training, tell, job["folder"])
    first, begun = training.step, time.perf_counter()
    saves.prepare()
    prepare_s = time.perf_counter() - begun
    while training.step < job["steps"]:
        begun = time.perf_counter()
        loss = training.train()
        step_s, waited_s, saved = time.perf_counter() - begun, 0.0, training.step % job["every"] == 0
        if saved:
            waited_s = saves.save()
        wall_s = time.perf_counter() - begun
        timed = training.step - first > WARM_UP
        tell("step", step=training.step, loss=loss, step_s=step_s, waited_s=waited_s, wall_s=wall_s, timed=timed)
        saves.poll()
    saves.close()
    tell("ended", prepare_s=prepare_s)
