"""What the demo trains: a small byte-level transformer on the source of Python's standard library.

Text, model, optimizer and batches are the same on every start, and a batch depends on its step alone.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.engine.loads import Loaded

_TEXT_BYTES = 4_000_000
_SEED = 1234

# Width, layers and heads of the model; a batch is so many pieces of text of so many bytes.
_SIZES = {"small": (64, 2, 2, 4, 64), "default": (256, 4, 4, 2, 64)}


class _Transformer(nn.Module):
    """Bytes in, ``(batch, context)``; scores for each next byte out, ``(batch, context, 256)``."""

    def __init__(self, width: int, nlayers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, nlayers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(self.places), device=tokens.device)
        scores: Tensor = self.scores(self.layers(self.bytes(tokens) + self.places, mask, is_causal=True))
        return scores


def _text() -> Tensor:
    """The ``*.py`` of the standard library in the order of their names, up to some megabytes, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if len(text) < 10_000:
        raise FileNotFoundError(f"the source of the standard library, the demo's text, is not in {folder}")
    return torch.frombuffer(bytearray(text[:_TEXT_BYTES]), dtype=torch.uint8)


class Training:
    """The model, its optimizer, and one step of the one with the other; the same on every start."""

    def __init__(self, size: str) -> None:
        """Make both, and do step 0. ``size``: a key of ``_SIZES``."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or CUDA's matrix products differ each time
        torch.use_deterministic_algorithms(True)
        # Threads that compute together wait for each other at each operation. Where other processes want the cores, a
        # step with two threads takes ten times as long as with one, and the times of such steps say nothing.
        torch.set_num_threads(1)
        torch.manual_seed(_SEED)
        width, nlayers, heads, self.batch, self.context = _SIZES[size]
        has_accelerator = torch.accelerator.is_available()
        self.device = (torch.accelerator.current_accelerator() if has_accelerator else None) or torch.device("cpu")
        self.text = _text()
        self.model = _Transformer(width, nlayers, heads, self.context).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = -1
        self.train()  # step 0: AdamW makes its state, so that a state dict always has the same structure

    def train(self) -> float:
        """The next step. Returns its loss."""
        self.step += 1
        generator = torch.Generator().manual_seed(_SEED * 1_000_003 + self.step)
        begins = torch.randint(len(self.text) - self.context - 1, (self.batch, 1), generator=generator)
        batch = self.text[begins + torch.arange(self.context + 1)].long().to(self.device)
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """The state dict of everything that goes on from here."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def resume(self, checkpointer: Checkpointer) -> Loaded:
        """Go on from the newest checkpoint, which the worker of a killed trainer may still hold."""
        checkpointer.load(state := self.state())
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        if (loaded := checkpointer.loaded) is None:
            raise RuntimeError("a load did not say what it has loaded: please report this")
        return loaded

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(each.numel() for each in self.model.parameters())

    @property
    def state_bytes(self) -> int:
        """The size of a state: AdamW has two moments of each parameter."""
        return 3 * sum(each.nbytes for each in self.model.parameters())

    def digest(self) -> str:
        """A checksum of all bits of the model and of the optimizer."""
        digest = xxhash.xxh3_128()
        moments = [moment for state in self.optimizer.state.values() for moment in state.values()]
        for tensor in [*self.model.parameters(), *moments]:
            digest.update(tensor.detach().cpu().contiguous().numpy())
        return digest.hexdigest()
