"""Hugging Face's Trainer with a small Llama. It resumes by ``resume_from_checkpoint=True``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from asyncckpt.integrations import huggingface
from torture.frameworks.kind import EVERY, STEPS, Kind, Options
from torture.frameworks.log import Log

_WORDS = 24_000


def _train(folder: Path, log: Log, options: Options | None) -> None:
    class Logged(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **others: Any) -> Any:
            loss = super().training_step(*args, **others)
            log.add_loss(self.state.global_step + 1, loss.item())
            return loss

    logging.disable_progress_bar()
    arguments: dict[str, Any] = {
        "max_steps": STEPS,
        "save_steps": EVERY,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    if os.environ.get("WORLD_SIZE", "1") != "1":
        arguments |= {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
    folder.mkdir(exist_ok=True)
    newest = get_last_checkpoint(folder)
    if newest is not None and newest.endswith(f"-{STEPS}"):
        return  # transformers would train one more step after a resume from the last step in the middle of an epoch
    trainer = Logged(_model(), TrainingArguments(str(folder), **arguments, **(options or {})), train_dataset=_data())
    if options is not None:
        huggingface.enable(trainer)
    trainer.train(resume_from_checkpoint=newest is not None)
    log.add_end([trainer.model.state_dict(), trainer.optimizer.state_dict()])


def _model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.2,  # so that the state of the random generators matters
    )
    return LlamaForCausalLM(config)


def _data() -> list[dict[str, list[int]]]:
    rows = [[number * 7 % _WORDS, number * 301 % _WORDS, 5, number**3 % _WORDS] for number in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _checkpoints(folder: Path) -> dict[str, int | None]:
    named = [(re.fullmatch(r"checkpoint-(\d+)", each.name), each) for each in folder.glob("checkpoint-*")]
    return {str(path): int(name[1]) for name, path in named if name}


def _candidates(folder: Path) -> list[str]:
    newest = get_last_checkpoint(folder) if folder.exists() else None
    return [] if newest is None else [newest]


def _read(path: str) -> tuple[int, Any]:
    state = json.loads(Path(path, "trainer_state.json").read_text())
    torch.load(os.path.join(path, "training_args.bin"), weights_only=False)
    parts = ("optimizer.pt", "scheduler.pt", "rng_state*.pth")
    files = [file for part in parts for file in sorted(Path(path).glob(part))]
    loaded = [torch.load(file, weights_only=False) for file in files]
    return state["global_step"], [load_file(os.path.join(path, "model.safetensors")), *loaded]


KIND, TWO_RANKS = (
    Kind(
        world_size=world_size,
        options=({"save_total_limit": 1}, {"save_total_limit": 2}, {}),
        train=_train,
        checkpoints=_checkpoints,
        candidates=_candidates,
        read=_read,
    )
    for world_size in (1, 2)
)
