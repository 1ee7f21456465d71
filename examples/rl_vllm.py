#!/usr/bin/env python3
"""A small reinforcement learning loop with vLLM: a trainer, and an engine that writes text with its newest weights.

    examples/rl_vllm.py               # 60 steps on a CPU: about a minute on two cores; needs vllm and transformers

The policy is a tiny Llama with random weights. It is rewarded for each letter that follows the previous letter in the
alphabet. The trainer publishes its weights after every step, without vLLM. The process with the engine loads the newest
weights before it writes. The weights of a text are therefore some steps old (its staleness).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 16
TEXTS = 32


@dataclass(frozen=True)
class Experience:
    """Texts that the engine wrote with the weights of ``version``, and the seconds to load these weights."""

    version: int
    texts: list[list[int]]
    update_s: float


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )


def train(steps: int, address: str, experiences: Any, done: Event) -> None:
    """Run the trainer."""
    import torch
    from transformers import LlamaForCausalLM

    from asyncckpt.weights import WeightPublisher

    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = LlamaForCausalLM(config())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.004)
    published, updated, staleness = [], [], []
    with WeightPublisher(address) as publisher:
        for step in range(steps + 1):
            begun = time.perf_counter()
            publisher.publish(policy.state_dict(), step, dtype=torch.bfloat16)
            published.append(time.perf_counter() - begun)
            experience = experiences.get(timeout=150)
            updated.append(experience.update_s)
            staleness.append(step - experience.version)
            texts = torch.tensor(experience.texts)
            reward = ((texts[:, 1:] - texts[:, :-1]) % len(LETTERS) == 1).float()
            odds = policy(texts[:, :-1]).logits.log_softmax(-1)
            chosen = odds.gather(2, texts[:, 1:, None]).squeeze(2)
            entropy = -(odds.exp() * odds).sum(-1)
            loss = -((reward - reward.mean()) * chosen + 0.02 * entropy).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % max(1, steps // 10) == 0:
                text = "".join(LETTERS[letter] for letter in experience.texts[0])
                print(
                    f"step {step:4}: version {experience.version:4} wrote {text!r}, reward {reward.mean():.2f},"
                    f" {step - experience.version} steps old",
                    flush=True,
                )
        done.set()
    print(
        f"published {len(published)} versions in {1e3 * statistics.median(published[1:]):.2f} ms each;"
        f" the engine had one in {1e3 * statistics.median(updated):.2f} ms;"
        f" texts were {statistics.mean(staleness):.1f} steps old",
        flush=True,
    )


def roll_out(address: str, experiences: Any, done: Event, trainer: Any) -> None:
    """Run the engine, and write texts until the trainer ends."""
    from vllm import LLM, SamplingParams

    from asyncckpt.integrations.vllm.updater import EngineUpdater

    with tempfile.TemporaryDirectory() as folder:
        config().save_pretrained(folder)
        llm = LLM(
            folder,
            load_format="dummy",  # the weights come from the trainer
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config={"backend": "asyncckpt"},
        )
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    with EngineUpdater(llm, address) as updater:
        number = 0
        while not done.is_set() and trainer.is_alive():
            begun = time.perf_counter()
            version = updater.update(timeout=150)
            updated = time.perf_counter() - begun
            prompts = [[(number + text) % len(LETTERS)] for text in range(TEXTS)]
            answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
            texts = [
                prompt + list(answer.outputs[0].token_ids) for prompt, answer in zip(prompts, answers, strict=True)
            ]
            number += TEXTS
            while not done.is_set() and trainer.is_alive():
                try:
                    experiences.put(Experience(version, texts, updated), timeout=0.1)
                    break
                except queue.Full:  # the trainer is slower
                    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    context = multiprocessing.get_context("spawn")
    address = f"rl-vllm-{os.getpid()}"
    experiences, done = context.Queue(1), context.Event()
    trainer = context.Process(target=train, args=(options.steps, address, experiences, done), daemon=True)
    trainer.start()
    try:
        roll_out(address, experiences, done, trainer)
    finally:
        done.set()
        trainer.join(10)


if __name__ == "__main__":
    main()
