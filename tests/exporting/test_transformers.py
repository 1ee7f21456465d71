"""Test that ``from_pretrained`` loads exports for Hugging Face without a warning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import same

from asyncckpt import Checkpointer, export

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_loads(root: Path, tmp_path: Path, is_tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=is_tied,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(each.sum() for each in model.parameters()).backward()
    optimizer.step()
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state)
    config.save_pretrained(tmp_path / "config")
    done = export(root, tmp_path / "model", only="model", max_shard_size="10KB")
    shutil.copy(tmp_path / "config/config.json", tmp_path / "model")
    assert len(done.files) > 3
    assert done.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {})
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(told.values())
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    export(root, tmp_path / "half", only="model", dtype="bf16")
    shutil.copy(tmp_path / "config/config.json", tmp_path / "half")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="bfloat16")
    assert same(dict(half.state_dict()), {name: each.bfloat16() for name, each in model.state_dict().items()})
