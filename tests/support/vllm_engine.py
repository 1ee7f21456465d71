"""vLLM engines with a tiny model. Each generated token encodes the version of the weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from support.peers import VLLM, python

there = pytest.mark.skipif(
    sys.version_info < (3, 11) or tuple(map(int, torch.__version__.split(".")[:2])) != (2, 13),
    reason="vLLM 0.32 is for Python 3.11, and for torch 2.13",
)

HIDDEN, FEED_FORWARD = 64, 128
VERSIONS = HIDDEN
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest size that vLLM's CPU attention supports
    "vocab_size": HIDDEN * VERSIONS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
}


def run(file: str, scenario: str, folder: Path, **environment: str) -> None:
    """Run the function ``scenario`` of a test file on ``folder``, in a process with vLLM on its path."""
    cores = sorted(os.sched_getaffinity(0))
    environment |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",  # otherwise each worker wants a NUMA node for itself
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    path = [str(Path(__file__).parents[1]), str(Path(file).parent)]
    code = f"import sys; sys.path[:0] = {path!r}; import {Path(file).stem} as here"
    with mock.patch.dict(os.environ, environment):
        python(f"{code}; from pathlib import Path; here.{scenario}(Path(sys.argv[1]))", VLLM, arguments=(str(folder),))


def model_folder(folder: Path) -> str:
    """Write the configuration of the model. Return its folder. The weights come later."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return str(folder)


def arguments(folder: Path, **others: Any) -> dict[str, Any]:
    """Return the arguments for ``LLM`` and ``AsyncEngineArgs``."""
    return {
        "model": model_folder(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 16 << 20,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "asyncckpt"},
        "worker_extension_cls": "asyncckpt.integrations.vllm.worker.LoadedVersion",
    } | others


def weights(version: int) -> dict[str, Tensor]:
    """Return the weights of a model that always generates the token of ``version``.

    Only the embedding and the head affect the token. The embedding encodes its version as the index of the only nonzero
    number of the hidden state. The head has a row for each pair of its own version and the embedding's version.
    """
    queries = torch.full((HIDDEN, HIDDEN), version / VERSIONS)
    gates = torch.full((FEED_FORWARD, HIDDEN), version / VERSIONS)
    embedding, head = torch.zeros(HIDDEN * VERSIONS, HIDDEN), torch.zeros(HIDDEN * VERSIONS, HIDDEN)
    embedding[:, version] = 1
    for said in range(HIDDEN):
        head[version * HIDDEN + said, said] = 1
    layer = "model.layers.0."
    state = {
        "model.embed_tokens.weight": embedding,
        f"{layer}input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}self_attn.q_proj.weight": queries,
        f"{layer}self_attn.k_proj.weight": queries,
        f"{layer}self_attn.v_proj.weight": queries,
        f"{layer}self_attn.o_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}mlp.gate_proj.weight": gates,
        f"{layer}mlp.up_proj.weight": gates,
        f"{layer}mlp.down_proj.weight": torch.zeros(HIDDEN, FEED_FORWARD),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    return {name: tensor.bfloat16() for name, tensor in state.items()}


def versions_of(token: int) -> set[int]:
    """Return the versions of the head and of the embedding that have made ``token``."""
    return set(divmod(token, HIDDEN))


class InProcessClient:
    """The counterpart of vLLM's ``VLLMWeightSyncClient`` for an ``LLM`` in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)


def publish_until_killed(address: str, version: int) -> None:
    """Publish ``version``, then kill this process. Run this in a separate process."""
    from asyncckpt.weights import WeightPublisher

    WeightPublisher(address).publish(weights(version), version)
    os.kill(os.getpid(), 9)
