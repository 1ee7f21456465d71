"""The part ``train``: what saves cost the steps of a model of 1.3 billion parameters."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from gpu_check.device import Device
from gpu_check.figures import Figure

_WIDTH, _LAYERS, _HEADS, _TOKENS, _VOCABULARY, _BATCH = 2048, 24, 16, 1024, 32_000, 16
_STEPS, _EVERY = 24, 8
_LIMIT_S = 300.0


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out


class _Model(nn.Module):
    """A decoder; ``scale`` shrinks its width and its depth."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.width = max(64, int(_WIDTH * scale**0.5) // 64 * 64)
        self.vocabulary, self.tokens = max(256, int(_VOCABULARY * scale)), max(16, int(_TOKENS * scale))
        heads = max(1, _HEADS * self.width // _WIDTH)
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        self.blocks = nn.Sequential(*(_Block(self.width, heads) for _ in range(max(2, int(_LAYERS * scale**0.5)))))
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return out


@dataclass
class _Steps:
    """Seconds: of whole steps, of the optimizer's call in each, and in ``save``."""

    whole: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    staged: list[float] = field(default_factory=list)


class _Training:
    def __init__(self, device: Device, scale: float) -> None:
        torch.manual_seed(1)
        self.device = device
        self.model = _Model(scale).to(device.device)
        # The simulated device has no fused kernels.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.is_real or None)
        shape = (_BATCH if device.is_real else 2, self.model.tokens)
        self.batch = torch.randint(0, self.model.vocabulary, shape).to(device.device)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, into: _Steps) -> None:
        begun = time.perf_counter()
        is_real = self.device.is_real  # the simulated device has no mixed precision
        with torch.autocast(self.device.type, torch.bfloat16) if is_real else contextlib.nullcontext():
            logits = self.model(self.batch)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.batch.flatten())
        torch.autograd.backward(loss)
        before = time.perf_counter()
        self.optimizer.step()
        into.optimizer.append(time.perf_counter() - before)
        self.optimizer.zero_grad()
        self.device.synchronize()
        into.whole.append(time.perf_counter() - begun)

    def run(self, checkpointer: Checkpointer | None, *, saves: bool) -> _Steps:
        """Some steps; with ``saves`` one each so many, which is durable before the next one begins."""
        found = _Steps()
        for number in range(_STEPS):
            if checkpointer is not None and saves and number % _EVERY == 0:
                checkpointer.wait(_LIMIT_S)
                begun = time.perf_counter()
                save = checkpointer.save((checkpointer.latest() or 0) + 1, self.state)
                found.save.append(time.perf_counter() - begun)
                self.step(found)
                save.wait_staged(_LIMIT_S)
                found.staged.append(time.perf_counter() - begun)
                continue
            self.step(found)
        return found


def measure(device: Device, scale: float) -> Iterator[Figure]:
    """Steps without saves, guarded ones, and those with saves, overlapped and not."""
    training = _Training(device, scale)
    training.run(None, saves=False)
    nbytes = 3 * sum(parameter.nbytes for parameter in training.model.parameters())
    yield Figure("state", nbytes / 1e9, "GB")
    plain = training.run(None, saves=False)
    usual, usual_optimizer = statistics.median(plain.whole), statistics.median(plain.optimizer)
    yield Figure("a step", usual * 1e3, "ms")
    with tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-") as root:
        for overlap in (True, False):
            with Checkpointer(root, Config(overlap=overlap, keep_last=1, linger=0)) as checkpointer:
                checkpointer.guard(training.optimizer)
                checkpointer.prepare(training.state)
                if overlap:
                    guarded = training.run(checkpointer, saves=False)
                    by = statistics.median(guarded.whole) / usual
                    yield Figure("guarded steps without saves, by others", by, at_most=1.005)
                found = training.run(checkpointer, saves=True)
            yield from _figures(found, usual, usual_optimizer, overlap=overlap)


def _figures(found: _Steps, usual: float, usual_optimizer: float, *, overlap: bool) -> Iterator[Figure]:
    what = "overlapped" if overlap else "plain"
    held, staged = statistics.median(found.save), statistics.median(found.staged)
    # The step that follows a save, with the save, less one without.
    with_save = [save + step for save, step in zip(found.save, found.whole[::_EVERY], strict=True)]
    cost = statistics.median(with_save) - usual
    yield Figure(f"{what} save holds the caller", held * 1e3, "ms", at_most=10 if overlap else None)
    yield Figure(f"{what} save, until all is copied", staged * 1e3, "ms")
    if overlap:
        longest = max(found.optimizer) - usual_optimizer
        yield Figure("longest call of the optimizer over the usual", longest * 1e3, "ms", at_most=10)
        yield Figure("cost of an overlapped save, by a step", cost / usual, at_most=0.02)
    else:
        yield Figure("cost of a plain save, by the copy", cost / held, at_most=1.1)
