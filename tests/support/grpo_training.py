"""A training of TRL's GRPO on the CPU, as a process that can be killed.

    python -m support.grpo_training FOLDER [stock]

Each rank writes ``FOLDER/history_RANK``, with a line for each batch: its number from the start of the training, its
prompts and completions, and its loss. A step accumulates the gradients of one batch, or of two in a job of several
ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from transformers.trainer_utils import get_last_checkpoint

from asyncckpt.integrations import huggingface
from support import hf_ranks
from support.hf_training import model
from support.ranks import LIMIT_S, say
from support.workers import wait_for

BATCHES, SLICES, PROMPTS = 24, 4, 48
"""The number of batches of a rank, of batches in a generated block, and of prompts."""
USES, COMPLETIONS = 2, 2
"""How often a rank trains on each batch of a block, and the number of completions of a prompt."""


class Recorded(trl.GRPOTrainer):  # type: ignore[misc]
    """Notes the contents of each batch, and calls ``at_batch``."""

    history: Path
    at_batch: Callable[[int], object]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        accumulated = self.args.gradient_accumulation_steps
        number = self.state.global_step * accumulated + (self._step - 1) % accumulated + 1
        batch = self._buffered_inputs[(self._step - 1) % self.args.steps_per_generation]
        prompts = [30 * int(tens) + int(ones) - 30 for tens, ones in batch["prompt_ids"]]
        tokens = hashlib.sha256(batch["completion_ids"].numpy().tobytes()).hexdigest()[:12]
        with self.history.open("a") as file:
            file.write(json.dumps([number, prompts, tokens, float(loss)]) + "\n")
        self.at_batch(number)
        return loss


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(31)} | {"<eos>": 31}
    its = Tokenizer(models.WordLevel(words, unk_token="w0"))
    its.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=its, eos_token="<eos>", pad_token="<eos>")


def train(
    folder: Path, rank: int = 0, *, accumulated: int = 1, at_batch: Callable[[int], object] = id, is_stock: bool = False
) -> None:
    """Train, from the newest checkpoint on. Write the final parameters."""
    torch.set_num_threads(1)
    set_seed(3)
    run = folder / "run"
    arguments = trl.GRPOConfig(
        str(run),
        max_steps=BATCHES // accumulated,
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulated,
        num_generations=COMPLETIONS,
        steps_per_generation=SLICES,
        num_iterations=USES,
        max_completion_length=4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1000,
    )
    trainer = Recorded(
        model(),
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": f"w{1 + each // 30} w{each % 30}"} for each in range(PROMPTS)]),
        processing_class=tokenizer(),
    )
    trainer.history, trainer.at_batch = folder / f"history_{rank}", at_batch
    if not is_stock:
        huggingface.enable(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(run)) if run.is_dir() else None)
    torch.save({name: each.detach() for name, each in trainer.model.named_parameters()}, folder / f"end_{rank}.pt")


def rank(folder: str, stops_in: int | None = None) -> list[str]:
    """On a rank: train, and return the warnings of asyncckpt.

    With ``stops_in``, stop after the first batch of this step, when the checkpoint of the step before it is durable.
    """
    hf_ranks.set_up()
    log = BufferingHandler(100)
    logging.getLogger("asyncckpt").addHandler(log)

    def at_batch(number: int) -> None:
        if stops_in is not None and number == 2 * stops_in - 1:
            wait_for(Path(folder, "run", f"checkpoint-{stops_in - 1}").exists)
            say(number)
            time.sleep(LIMIT_S)

    train(Path(folder), dist.get_rank(), accumulated=2, at_batch=at_batch)
    return [each.getMessage() for each in log.buffer]


if __name__ == "__main__":
    train(Path(sys.argv[1]), is_stock=sys.argv[2:] == ["stock"])
