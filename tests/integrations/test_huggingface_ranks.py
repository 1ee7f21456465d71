"""Hugging Face's Trainer on two ranks, saving in the background: DDP, FSDP2 with whole states, and with its shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import hf_ranks
from support.ranks import run

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("forkserver")


def test_stock_transformers_goes_on_where_it_was(tmp_path: Path) -> None:
    kinds = ["ddp", "SHARDED_STATE_DICT", "FULL_STATE_DICT"]
    for ended in run(2, hf_ranks.rank, str(tmp_path), kinds, folder=tmp_path):
        for kind in kinds:
            found = ended[kind]
            whole, died, resumed = found["losses"]
            assert found["type"] == ("MULTI_CPU" if kind == "ddp" else "FSDP")
            assert found["same"], kind
            assert died == {step: whole[step] for step in range(1, 5)}
            assert resumed == {step: whole[step] for step in (5, 6)}
            assert found["saved"] == [(2, True)], "this is known of the other one at the next save only"
    for kind, names in {
        "ddp": {"model.safetensors", "optimizer.pt", "training_args.bin"},
        "SHARDED_STATE_DICT": {"pytorch_model_fsdp_0", "optimizer_0"},
        "FULL_STATE_DICT": {"model.safetensors", "pytorch_model_fsdp.bin", "optimizer.bin", "training_args.bin"},
    }.items():
        stock, ours = (
            {each.name for each in (tmp_path / kind / name / "checkpoint-4").iterdir()} for name in ("whole", "run")
        )
        assert names <= ours
        assert {name for name in ours if not name.endswith(".index.json")} - {"asyncckpt.json"} == stock
