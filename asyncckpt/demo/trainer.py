"""The demo's training process: a small byte-level transformer on the source of Python's standard library.

Text, model, optimizer and batches are the same on every start, and a batch depends on its step alone. What happens is
reported on stdout, in lines of JSON: ``{"event": "step", ...}``. ``run.py`` starts this and reads them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.save_handle import Save

_KEEP = 3
_BYTES = 256
_TEXT_BYTES = 4_000_000
_SEED = 1234


class Size(NamedTuple):
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


class Transformer(nn.Module):
    """Bytes in, ``(batch, context)``; scores for each next byte out, ``(batch, context, 256)``."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        form: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.bytes = nn.Embedding(_BYTES, width)
        self.places = nn.Parameter(torch.randn(size.context, width) * 0.02)
        layers = [nn.TransformerEncoderLayer(width, size.heads, 4 * width, **form) for _ in range(size.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, _BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(len(self.places), device=x.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        scores: Tensor = self.scores(self.norm(x))
        return scores


def _text() -> Tensor:
    """The ``*.py`` of the standard library in the order of their names, up to some megabytes, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= _TEXT_BYTES:
            break
    if len(text) < 10_000:
        raise FileNotFoundError(f"the source of the standard library, the demo's text, is not in {folder}")
    return torch.frombuffer(text[:_TEXT_BYTES], dtype=torch.uint8)


class Training:
    """The model, its optimizer, and one step of the one with the other; the same on every start."""

    def __init__(self, size: Size, threads: int) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(threads)
        torch.manual_seed(_SEED)
        self.size = size
        has_accelerator = torch.accelerator.is_available()
        self.device = (torch.accelerator.current_accelerator() if has_accelerator else None) or torch.device("cpu")
        self.text = _text()
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

    def _batch(self) -> Tensor:
        """``(batch, context + 1)`` bytes, as int64, that depend on the step alone: a resumed run draws the same."""
        generator = torch.Generator().manual_seed(_SEED * 1_000_003 + self.step)
        size = self.size
        begins = torch.randint(len(self.text) - size.context - 1, (size.batch, 1), generator=generator)
        return self.text[begins + torch.arange(size.context + 1)].long().to(self.device)

    def train(self) -> float:
        """One step. Returns its loss."""
        self.step += 1
        batch = self._batch()
        scores = self.model(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss = loss.item()
        return self.loss

    def state(self) -> dict[str, Any]:
        """The state dict of everything that goes on from here."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "step": self.step, "loss": self.loss}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, as ``state()`` gave it and a checkpoint filled it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.loss = state["step"], state["loss"]

    def facts(self) -> dict[str, Any]:
        """How many parameters there are, how many bytes in all tensors of the state, and on which device."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        nbytes = sum(tensor.nbytes for tensor in [*self.model.state_dict().values(), *moments])
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": parameters, "state_bytes": nbytes, "device": str(self.device)}


class _NoSaves:
    """The run that is measured against."""

    prepare_s = 0.0

    def save(self) -> None:
        """Save the state; the training waits for this."""

    def poll(self) -> None:
        """Report saves that became durable; after each step."""

    def close(self) -> None:
        """After the last step."""


class _AsyncSaves(_NoSaves):
    """With asyncckpt; ``resume``: from the newest checkpoint, which the worker of a killed trainer may still hold."""

    def __init__(self, training: Training, folder: str, resume: bool) -> None:
        self.training = training
        self.checkpointer = Checkpointer(folder, Config(keep_last=_KEEP))
        self.under_way: list[tuple[Save, float]] = []
        begun = time.perf_counter()
        if resume:
            step = self.checkpointer.load(state := training.state())
            training.restore(state)
            source = self.checkpointer.loaded.source if self.checkpointer.loaded is not None else ""
            _report("resumed", step=step, load_s=time.perf_counter() - begun, source=source)
        begun = time.perf_counter()
        self.checkpointer.prepare(training.state())
        self.prepare_s = time.perf_counter() - begun

    def save(self) -> None:
        handle = self.checkpointer.save(self.training.step, self.training.state())
        self.under_way.append((handle, self.training.loss))

    def poll(self) -> None:
        while self.under_way and self.under_way[0][0].done():
            handle, loss = self.under_way.pop(0)
            handle.result()  # raises what went wrong
            _report("durable", step=handle.step, loss=loss, **handle.timings)

    def close(self) -> None:
        self.checkpointer.close()
        self.poll()


class _DcpSaves(_NoSaves):
    """With torch.distributed.checkpoint, as it comes: synchronous."""

    def __init__(self, training: Training, folder: str) -> None:
        self.training = training
        self.folder = Path(folder)

    def save(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process only
            save(self.training.state(), checkpoint_id=self.folder / f"step-{self.training.step:08d}")

    def poll(self) -> None:
        for old in sorted(self.folder.iterdir())[:-_KEEP]:
            shutil.rmtree(old)


def _report(event: str, /, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def main(job: dict[str, Any]) -> None:
    """All that a training process does, as ``job`` says."""
    training = Training(SIZES[job["size"]], job["threads"])
    _report("started", **training.facts())
    os.makedirs(job["folder"], exist_ok=True)
    saves = _NoSaves()
    if job["saves"] == "asyncckpt":
        saves = _AsyncSaves(training, job["folder"], job["resume"])
    elif job["saves"] == "dcp":
        saves = _DcpSaves(training, job["folder"])
    first = training.step
    while training.step < job["steps"]:
        begun = time.perf_counter()
        loss = training.train()
        trained = time.perf_counter()
        if saved := training.step % job["every"] == 0:
            saves.save()
        ended = time.perf_counter()
        if saved:
            _report("saved", step=training.step, pid=os.getpid())
        times = {"step_s": trained - begun, "waited_s": ended - trained, "wall_s": ended - begun}
        _report("step", step=training.step, loss=loss, timed=training.step - first > job["warm_up"], **times)
        saves.poll()
    saves.close()
    _report("ended", prepare_s=saves.prepare_s)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
