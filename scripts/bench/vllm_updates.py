"""Measure weight updates of a vLLM engine: how long the trainer is held, and how long the engine serves nothing.

The engine is real and runs on the CPU, with its worker in a process of its own. The model is a Llama with random
weights. vLLM's own transfers between processes need CUDA. On a CPU vLLM has only ``reload_weights``, from files that
the trainer writes, on disk without a sync or in memory. All ways take turns with the same two states. After each
update the engine's answer must match the state.

The measurement runs in a process of its own, because vLLM changes its process. ``scripts/peers.sh`` must have unpacked
vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncckpt.integrations.vllm.updater import EngineUpdater
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from bench.states import GIB
from bench.turns import Pace, take

PEER = "vllm-0.32.0"
OURS, OURS_BY_FILE = "asyncckpt", "asyncckpt, and reload_weights of its image"
FILE, MEMORY = "reload_weights of a file", "reload_weights of a file in /dev/shm"
WAYS = (OURS, OURS_BY_FILE, FILE, MEMORY)
_ADDRESS = "bench-vllm"
_HIDDEN, _FEED_FORWARD, _VOCABULARY = 1024, 2816, 8192
_LAYER_BYTES = 2 * (4 * _HIDDEN**2 + 3 * _HIDDEN * _FEED_FORWARD + 2 * _HIDDEN)


def measure(gib: float, pace: Pace, folder: str) -> dict[str, Any]:
    """Measure all ways in turns. Raises ``FileNotFoundError`` if vLLM is not unpacked."""
    peer = Path(sys.prefix, "peers", PEER)
    if not peer.is_dir():
        raise FileNotFoundError(f"there is no {peer}; scripts/peers.sh unpacks it, for Python 3.11 and later")
    out = Path(folder, "vllm.json")
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([here, str(peer), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # Otherwise vLLM reserves one core and binds each process to one memory node.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "ASYNC_CKPT_RUNTIME_DIR": f"{folder}/runtime",
    }
    layers = max(1, round(gib * GIB / _LAYER_BYTES))
    given = [str(layers), str(pace.rounds), str(pace.pause), folder, str(out)]
    code = "from bench.vllm_updates import main; import sys; main(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, *given], env=environment, check=True, timeout=pace.patience)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main(layers: str, rounds: str, pause: str, folder: str, out: str) -> None:
    """Run the measurement in a process that can import vLLM."""
    states = [_state(int(layers), seed) for seed in (1, 2)]
    nbytes = sum(tensor.nbytes for tensor in states[0].values())
    in_memory = tempfile.mkdtemp(prefix="asyncckpt-bench-", dir="/dev/shm")
    try:
        with _Bench(int(layers), states, Path(folder, "model"), Path(folder, "file"), Path(in_memory)) as bench:
            turns = {
                OURS: bench.turn(bench.publish, bench.update),
                OURS_BY_FILE: bench.turn(bench.publish, bench.reload_image),
                FILE: bench.turn(lambda: bench.save(bench.file), lambda: bench.reload(bench.file)),
                MEMORY: bench.turn(lambda: bench.save(bench.memory), lambda: bench.reload(bench.memory)),
                "one copy": bench.copy,
            }
            taken = take(turns, Pace(rounds=int(rounds), pause=float(pause)), "update vLLM")
    finally:
        shutil.rmtree(in_memory, ignore_errors=True)
    copies = [held for held, _ in taken.found.pop("one copy")]
    found = {
        "title": f"A Llama of {layers} layers, {nbytes / GIB:.3g} GiB, on a CPU",
        "limits": {"one copy": copies[1:]},
        "results": {
            name: {"held_s": [held for held, _ in each[1:]], "update_s": [update for _, update in each[1:]]}
            for name, each in taken.found.items()
        },
        "left_out": taken.left_out,
    }
    Path(out).write_text(json.dumps(found))


class _Bench:
    """An engine, and two states of the trainer."""

    def __init__(self, layers: int, states: list[dict[str, Tensor]], model: Path, file: Path, memory: Path) -> None:
        from vllm import LLM

        self.file, self.memory = file, memory
        self._states, self._version = states, 0
        self._answers: dict[int, list[int]] = {}
        self._target = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
        for each in (model, file):
            each.mkdir()
        (model / "config.json").write_text(json.dumps(_config(layers)))
        self.save(model)
        self._llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=1,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=True,
            weight_transfer_config={"backend": "asyncckpt"},
        )
        self._publisher = WeightPublisher(_ADDRESS, slots=2)
        self._publisher.prepare(states[0])
        self._updater = EngineUpdater(self._llm, _ADDRESS)
        self._subscriber = WeightSubscriber(_ADDRESS)

    def turn(self, hand_over: Callable[[], None], load: Callable[[], None]) -> Callable[[], tuple[float, float]]:
        """Return a turn that returns the seconds of ``hand_over`` and of ``load``."""

        def taken() -> tuple[float, float]:
            self._version += 1
            begun = time.perf_counter()
            hand_over()
            there = time.perf_counter()
            load()
            done = time.perf_counter()
            self._check()
            return there - begun, done - there

        return taken

    def copy(self) -> tuple[float, float]:
        """Copy the bytes once, by torch, into existing memory."""
        begun = time.perf_counter()
        for name, tensor in self._state.items():
            self._target[name].copy_(tensor)
        return time.perf_counter() - begun, 0.0

    def publish(self) -> None:
        if self._publisher.publish(self._state, self._version).skipped:
            raise RuntimeError("a reader still has the version before")

    def update(self) -> None:
        self._updater.update(self._version)

    def reload_image(self) -> None:
        folder = self.file.parent / "image"
        folder.mkdir(exist_ok=True)
        with self._subscriber.acquire(self._version) as weights, weights.safetensors(folder):
            self.reload(folder)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self._state, folder / "model.safetensors")

    def reload(self, folder: Path) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    @property
    def _state(self) -> dict[str, Tensor]:
        return self._states[self._version % 2]

    def _check(self) -> None:
        """Check that the engine has the current weights: its answer repeats for a state, and differs between states."""
        from vllm import SamplingParams

        self._llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        answer = self._llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)[0].outputs[0]
        answers = self._answers
        answers.setdefault(self._version % 2, list(answer.token_ids))
        if answers[self._version % 2] != list(answer.token_ids) or answers.get(0) == answers.get(1):
            raise RuntimeError(f"the engine has other weights than those of version {self._version}")

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._subscriber.close()
        self._updater.close()
        self._publisher.close()
        self._llm.llm_engine.engine_core.shutdown()


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "hidden_act": "silu",
    }


def _state(layers: int, seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice, dtype=torch.bfloat16).div_(shape[-1] ** 0.5)

    ones = torch.ones(_HIDDEN, dtype=torch.bfloat16)
    state = {"model.embed_tokens.weight": some(_VOCABULARY, _HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name in "qkvo":
            state[f"{at}.self_attn.{name}_proj.weight"] = some(_HIDDEN, _HIDDEN)
        for name in ("gate", "up"):
            state[f"{at}.mlp.{name}_proj.weight"] = some(_FEED_FORWARD, _HIDDEN)
        state[f"{at}.mlp.down_proj.weight"] = some(_HIDDEN, _FEED_FORWARD)
        for name in ("input", "post_attention"):
            state[f"{at}.{name}_layernorm.weight"] = ones.clone()
    return state | {"model.norm.weight": ones.clone(), "lm_head.weight": some(_VOCABULARY, _HIDDEN)}
