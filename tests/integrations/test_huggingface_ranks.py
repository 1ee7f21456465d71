"""Background saves by Hugging Face's Trainer on two ranks: DDP, and FSDP2 with full and with sharded states."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import hf_ranks
from support.hf_ranks import STEPS
from support.peers import peer
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
            assert died == {step: whole[step] for step in range(1, STEPS)}
            assert resumed == {STEPS: whole[STEPS]}
            assert found["saved"] == [(2, True)], "of the other one this is known at the next save only"
    whole_model = {"model.safetensors", "config.json", "generation_config.json", "training_args.bin"}
    for kind, names in {
        "ddp": whole_model | {"optimizer.pt"},
        "SHARDED_STATE_DICT": {"pytorch_model_fsdp_0", "optimizer_0"},
        "FULL_STATE_DICT": whole_model | {"pytorch_model_fsdp.bin", "optimizer.bin"},
    }.items():
        found = {each.name for each in (tmp_path / kind / "checkpoint-4").iterdir()}
        ours = {name for name in found if name == "asyncckpt.json" or name.endswith(".index.json")}
        assert found - ours == names | {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"}


@pytest.mark.parametrize(("what", "name"), [("scaler", "scaler.pt"), ("loader", "dl_state_dict.bin")])
def test_what_all_ranks_of_accelerate_write_is_saved_once(tmp_path: Path, what: str, name: str) -> None:
    if what == "loader":
        peer("torchdata-0.11.0")
    for names in run(2, hf_ranks.save_by_accelerate, str(tmp_path / "state"), what, folder=tmp_path):
        common = {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"}
        assert {each for each in names if "index" not in each} == common | {name, "asyncckpt.json"}
