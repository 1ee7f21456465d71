"""The model that the parts ``train`` and ``crash`` train: a decoder, by default of 1.3 billion parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpu_check.device import Device

_LAYERS, _TOKENS, _VOCABULARY, _HEAD_WIDTH = 24, 1024, 32_000, 128


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
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        width = max(64, int(width * scale**0.5) // 64 * 64)
        self.vocabulary, self.tokens = max(256, int(_VOCABULARY * scale)), max(16, int(_TOKENS * scale))
        layers, heads = max(2, int(_LAYERS * scale**0.5)), max(1, width // _HEAD_WIDTH)
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, self.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return out


class Training:
    """The model with AdamW, in mixed precision: weights and moments in float32, 12 bytes a parameter."""

    def __init__(self, device: Device, scale: float, width: int = 2048, batch: int = 16) -> None:
        """Make the model, the same with each call.

        Args:
            device: The device to train on.
            scale: Scales the width and the depth by its root, the tokens and the vocabulary by itself.
            width: The width of the model at scale 1; 2048 makes 1.3 billion parameters.
            batch: Sequences a step, of 1,024 tokens each at scale 1.
        """
        torch.manual_seed(1)
        self._device = device
        with device.device:
            self.model = _Model(width, scale) if device.is_real else _Model(width, scale).cpu()
        self.model.to(device.device)
        # The simulated device has no fused kernels.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.is_real or None)
        self._shape = (batch if device.is_real else 2, self.model.tokens)

    @property
    def nbytes(self) -> int:
        """Return the bytes of weights and moments."""
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())

    def state(self) -> dict[str, Any]:
        """Return the state to save, as plain dicts that all peers take."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def backward(self, number: int) -> torch.Tensor:
        """Compute the gradients of step ``number``, return the loss. The tokens of a step are the same in each run."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, self.model.vocabulary, self._shape, generator=generator).to(self._device.device)
        with self._precision():
            logits = self.model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        torch.autograd.backward(loss)
        return loss.detach()

    def update(self) -> None:
        """Change the weights by the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def _precision(self) -> Iterator[None]:
        # The simulated device has no mixed precision.
        with torch.autocast(self._device.type, torch.bfloat16) if self._device.is_real else contextlib.nullcontext():
            yield
