"""The prompts of verl's driver: torchdata's ``StatefulDataLoader``, and a buffer in place of TransferQueue.

verl saves the state of the loader in ``data.pt``. Asynchronous trainers also save the queue of the fetched prompts,
until a step is trained on them. The buffer has the functions of the queue for saves and loads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PROMPTS, BATCH, AHEAD = 128, 4, 12
"""The number of prompts, of prompts in a batch, and of waiting prompts in the buffer."""


def loader() -> Any:
    """Return a new loader of all prompts, in a fixed random order."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    sampler = RandomSampler(range(PROMPTS), generator=torch.Generator().manual_seed(1))
    return StatefulDataLoader(range(PROMPTS), batch_size=BATCH, sampler=sampler, collate_fn=list)


class Buffer:
    """The waiting prompts, with the functions of ``transfer_queue`` for saves and loads."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self._choice = random.Random()  # rollouts end in any order

    def save_checkpoint(self, folder: str, metadata: dict[str, Any]) -> None:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "queue.json").write_text(json.dumps(self.waiting))

    def load_checkpoint(self, folder: str) -> None:
        self.waiting = json.loads(Path(folder, "queue.json").read_text())

    def kv_list(self, partition: str) -> dict[str, Any]:
        return {partition: {str(each): {"is_prompt": True, "status": "pending"} for each in self.waiting}}

    def take(self, batches: Iterator[list[int]]) -> list[int]:
        """Return a batch of waiting prompts in random order, and fetch others."""
        while len(self.waiting) < BATCH + AHEAD:
            self.waiting += next(batches)
        taken = self._choice.sample(self.waiting, BATCH)
        self.waiting = [each for each in self.waiting if each not in taken]
        return taken


def check(steps: int, attempts: list[list[dict[str, Any]]]) -> list[str]:
    """Return the faults of the surviving history: lost prompts, and repeated prompts.

    Args:
        steps: The number of steps of the whole training.
        attempts: The log of the driver in each start. A step of a later start replaces all steps from it on.
    """
    history: dict[int, list[int]] = {}
    left: list[int] = []
    for said in attempts:
        trained = {each["trained"]: each["prompts"] for each in said if "trained" in each}
        history = {step: prompts for step, prompts in history.items() if not trained or step < min(trained)} | trained
        left = next((each["left"] for each in said if "left" in each), left)
    seen = [prompt for prompts in history.values() for prompt in prompts] + left
    order = [prompt for batch in loader() for prompt in batch]
    wrong = [f"the steps {sorted(history)} were trained"] if sorted(history) != list(range(1, steps + 1)) else []
    if twice := sorted({prompt for prompt in seen if seen.count(prompt) > 1}):
        wrong.append(f"the prompts {twice} came twice")
    if lost := sorted(set(order[: len(seen)]) - set(seen)):
        wrong.append(f"the prompts {lost} were lost")
    return wrong
