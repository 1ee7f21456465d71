"""A tiny model, trained by transformers' Trainer on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from asyncckpt.config import Config
from asyncckpt.integrations import huggingface

STEPS = 6


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Records the losses and the saves by step, and calls ``at_step`` at the end of each step."""

    def __init__(self, folder: Path, at_step: Callable[[int], object]) -> None:
        self.losses: dict[int, float] = {}
        self.saved: list[tuple[int, bool]] = []
        """For each ``on_save``: the step, and whether its checkpoint existed at that time."""
        self._folder, self._at_step = folder, at_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._at_step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        there = (self._folder / f"checkpoint-{state.global_step}" / "trainer_state.json").exists()
        self.saved.append((state.global_step, there))


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.2,
    )
    return LlamaForCausalLM(config)


def data() -> list[dict[str, list[int]]]:
    rows = [[number % 32, number * 3 % 32, 5, number * number % 32] for number in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(
    folder: Path,
    *,
    enable: bool = True,
    config: Config | None = None,
    at_step: Callable[[int], object] = lambda _: None,
    listens: bool = True,
    of: type[Any] = Trainer,
    what: Any = None,
    **options: Any,
) -> Any:
    """Return a Trainer that saves every second step. ``trainer.recorder`` is its ``Recorder``."""
    arguments = {
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    } | options
    recorder = Recorder(folder, at_step)
    if not listens:
        recorder.on_save = None  # type: ignore[assignment]
    made = of(
        model() if what is None else what,
        TrainingArguments(str(folder), **arguments),
        train_dataset=data(),
        eval_dataset=data()[:4],
        callbacks=[recorder],
    )
    made.recorder = recorder
    if enable:
        huggingface.enable(made, config)
    return made
