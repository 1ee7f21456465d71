"""A file set with files of all kinds."""

from __future__ import annotations

import json
from typing import Any

import torch

from asyncckpt import FileSet
from asyncckpt.planning.safetensors_plan import DTYPES

LARGE = 300_000  # elements: a torch file below 1 MiB is not staged


def weights(seed: float = 0.0) -> dict[str, torch.Tensor]:
    """Return tensors of each dtype of safetensors, empty tensors, and names that JSON has to escape."""
    torch.manual_seed(int(seed))
    tensors = {f"layer.{name}": torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    odd = {'a "quoted"\n\\name': torch.randn(0, 4), "größe": torch.tensor(float(seed)), "layer.10": torch.randn(LARGE)}
    return {**tensors, **odd}


def optimizer(seed: float = 0.0) -> dict[str, Any]:
    seed = float(seed)
    moment = torch.full((LARGE,), float(seed))
    its = {"step": torch.tensor(seed), "exp_avg": moment, "same": moment[5:]}
    return {"state": {0: its}, "lr": seed}


def make(seed: float = 0.0) -> FileSet:
    """Return a file set with files of all kinds."""
    files = FileSet()
    files.add_bytes("trainer_state.json", json.dumps({"history": [seed] * int(seed)}).encode())
    files.add_torch_file("optimizer.pt", optimizer(seed))
    files.add_torch_file("scheduler.pt", {"last": seed})
    files.add_safetensors("model.safetensors", weights(seed), {"format": "pt"})
    files.add_dcp_folder("dcp/model_0", {"model": {"w": torch.full((100,), float(seed))}, "n": seed})
    files.add_bytes("dcp/model_0/metadata.json", b"{}")
    files.add_bytes("tokenizer/deep/vocab.txt", b"")
    return files
