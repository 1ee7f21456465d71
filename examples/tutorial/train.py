"""Train a small GPT on the source of a Python module: python train.py ROOT"""

import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import asyncckpt

WIDTH, HEADS, LAYERS, CONTEXT, BATCH, STEPS = 64, 4, 2, 64, 16, 60
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.drop = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(WIDTH, 3 * WIDTH), "c_proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attn["c_attn"](self.ln_1(x)).unflatten(2, (HEADS, -1)).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        x = x + self.drop(self.attn["c_proj"](attended.flatten(2)))
        return x.add(self.drop(self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = {"wte": nn.Embedding(256, WIDTH), "wpe": nn.Embedding(CONTEXT, WIDTH), "ln_f": nn.LayerNorm(WIDTH)}
        self.transformer = nn.ModuleDict({**layers, "h": nn.Sequential(*(Block() for _ in range(LAYERS)))})
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.transformer["wte"](inputs) + self.transformer["wpe"](positions)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](self.transformer["h"](x)))
        return logits


class Batches:
    """Random pieces of the text. ``position`` counts the batches that the whole job has taken."""

    text = np.fromfile(random.__file__, np.uint8)
    position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def take(self, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        begins = np.random.default_rng(self.position).integers(len(self.text) - CONTEXT, size=(BATCH, 1))
        self.position += 1
        batch = self.text[begins[rank::ranks] + np.arange(CONTEXT + 1)].astype(np.int64)
        inputs, targets = batch[:, :-1].copy(), batch[:, 1:]
        inputs[np.random.rand(*inputs.shape) < 0.02] = random.randrange(256)  # noise
        return torch.from_numpy(inputs), torch.from_numpy(targets.flatten())


def train(root: str, model: nn.Module, rank: int = 0, ranks: int = 1) -> None:
    torch.set_num_threads(1)  # enough for a model of this size
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler(DEVICE, growth_interval=20)
    batches = Batches()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "batches": batches}
    state["rng"] = asyncckpt.RngState()
    with asyncckpt.Checkpointer(root) as ckpt:
        first = ckpt.load(state) + 1 if ckpt.latest() is not None else 0
        if ckpt.loaded and rank == 0:
            print(f"resumed after step {ckpt.loaded.step}, from {ckpt.loaded.source}")
        ckpt.watch_signals()
        for step in range(first, STEPS):
            inputs, targets = batches.take(rank, ranks)
            with torch.autocast(DEVICE, torch.float16, enabled=DEVICE == "cuda"):
                logits = model(inputs.to(DEVICE))
            loss = nn.CrossEntropyLoss()(logits.float().flatten(0, 1), targets.to(DEVICE))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            is_last = step == STEPS - 1 or ckpt.terminating()
            if step % 10 == 0 or is_last:
                ckpt.save(step, state)
            if rank == 0:
                print(f"step {step} loss {loss.item()}", flush=True)
            if is_last:
                break


if __name__ == "__main__":
    torch.manual_seed(0)
    train(sys.argv[1], GPT().to(DEVICE))
