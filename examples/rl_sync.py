#!/usr/bin/env python3
"""A small reinforcement learning loop: a trainer, and rollout processes that write text with its newest weights.

    examples/rl_sync.py                               # 150 steps, two rollout processes: half a minute on two cores
    examples/rl_sync.py --checkpoints checkpoints     # also saves the published copies

The policy is a character model. It is rewarded for each letter that follows the previous letter in the alphabet. The
trainer publishes its weights after every step, and continues. Each rollout loads the newest weights before it begins a
text. The weights of a text are therefore some steps old (its staleness). The script prints the staleness, and the times
that publishing and loading take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

import torch
from torch import Tensor, nn

from asyncckpt import Checkpointer
from asyncckpt.weights import WeightPublisher, WeightSubscriber

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 32
TEXTS = 16


class Policy(nn.Module):
    """Predict the next letter of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 64)
        self.memory = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        hidden, _ = self.memory(self.embedding(letters))
        logits: Tensor = self.head(hidden)
        return logits

    @torch.no_grad()
    def write(self) -> Tensor:
        """Write texts from random first letters. Return the numbers of the letters."""
        letters = torch.randint(len(LETTERS), (TEXTS, 1))
        state = None
        for _ in range(LENGTH):
            hidden, state = self.memory(self.embedding(letters[:, -1:]), state)
            odds = self.head(hidden[:, -1]).softmax(-1)
            letters = torch.cat([letters, torch.multinomial(odds, 1)], 1)
        return letters


def rewards(letters: Tensor) -> Tensor:
    return ((letters[:, 1:] - letters[:, :-1]) % len(LETTERS) == 1).float()


@dataclass(frozen=True)
class Experience:
    """Texts that a rollout wrote with the weights of ``version``, and the seconds to acquire these weights."""

    version: int
    letters: list[list[int]]
    acquire_s: float


def roll_out(number: int, address: str, root: str | None, experiences: Any, stop: Event) -> None:
    """A rollout process: it needs no more of the trainer than its address."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    policy = Policy()
    subscriber = WeightSubscriber(address) if root is None else WeightSubscriber.of_checkpoints(root, prefix="model.")
    with subscriber:
        while not stop.is_set():
            begun = time.perf_counter()
            with subscriber.acquire() as weights:
                policy.load_state_dict(dict(weights))  # the only copy, into the engine's memory
                acquired = time.perf_counter() - begun
            texts = policy.write().tolist()
            while not stop.is_set():
                try:
                    experiences.put(Experience(weights.version, texts, acquired), timeout=0.1)
                    break
                except queue.Full:  # the trainer is slower
                    pass


def train(steps: int, address: str, root: str | None, experiences: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.004)
    published, acquired, staleness = [], [], []
    with ExitStack() as stack:
        publisher = stack.enter_context(WeightPublisher(address)) if root is None else None
        checkpointer = stack.enter_context(Checkpointer(root)) if root is not None else None
        for step in range(steps + 1):
            begun = time.perf_counter()
            if publisher is not None:
                publisher.publish(policy.state_dict(), step)
            elif checkpointer is not None:
                save = checkpointer.save(step, {"model": policy.state_dict(), "optimizer": optimizer.state_dict()})
                checkpointer.publish(save)
            published.append(time.perf_counter() - begun)
            experience = experiences.get(timeout=150)
            acquired.append(experience.acquire_s)
            staleness.append(step - experience.version)
            letters = torch.tensor(experience.letters)
            reward = rewards(letters)
            odds = policy(letters[:, :-1]).log_softmax(-1)
            chosen = odds.gather(2, letters[:, 1:, None]).squeeze(2)
            entropy = -(odds.exp() * odds).sum(-1)
            loss = -((reward - reward.mean()) * chosen + 0.03 * entropy).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % max(1, steps // 10) == 0:
                print(
                    f"step {step:4}: version {experience.version:4} wrote"
                    f" {''.join(LETTERS[letter] for letter in experience.letters[0])!r},"
                    f" reward {reward.mean():.2f}, {step - experience.version} steps old"
                )
    print(
        f"published {len(published)} versions in {1e3 * statistics.median(published[1:]):.2f} ms each;"
        f" a rollout had one in {1e3 * statistics.median(acquired):.2f} ms, loaded;"
        f" texts were {statistics.mean(staleness):.1f} steps old"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rollouts", type=int, default=2, help="processes")
    parser.add_argument("--checkpoints", help="folder: save after every step, and publish the staged copy")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    address = f"rl-sync-{os.getpid()}"
    experiences = context.Queue(options.rollouts)
    stop = context.Event()
    rollouts = [
        context.Process(target=roll_out, args=(number, address, options.checkpoints, experiences, stop), daemon=True)
        for number in range(options.rollouts)
    ]
    for process in rollouts:
        process.start()
    try:
        train(options.steps, address, options.checkpoints, experiences)
    finally:
        stop.set()
        for process in rollouts:
            process.join(10)


if __name__ == "__main__":
    main()
