"""Background saves of Trainer features, and of classes derived from Hugging Face's Trainer."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import safetensors.torch
import transformers
import transformers.trainer
from support import hf_training
from support.hf_states import checkpoints, same_files
from support.workers import wait_for
from transformers import PreTrainedTokenizerFast, Trainer, modeling_utils

from asyncckpt.errors import UnsavableStateError
from asyncckpt.integrations import huggingface

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning", "default::DeprecationWarning"),
]


def both(folder: Path, **options: Any) -> None:
    """Train with and without our integration. Check that all files are equal."""
    for name in ("ours", "stock"):
        made = {key: value() if callable(value) and key == "what" else value for key, value in options.items()}
        hf_training.trainer(folder / name, enable=name == "ours", max_steps=2, **made).train()
    assert checkpoints(folder / "ours") == checkpoints(folder / "stock")
    for step in checkpoints(folder / "stock"):
        same_files(folder / f"ours/checkpoint-{step}", folder / f"stock/checkpoint-{step}")


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def what() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(hf_training.model(), config)

    both(tmp_path, what=what)
    assert (tmp_path / "ours/checkpoint-2/adapter_model.safetensors").exists()


class Plain(torch.nn.Module):
    """A model that is not a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(32, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.table(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_model_that_is_not_of_transformers(tmp_path: Path) -> None:
    both(tmp_path, what=Plain)


def test_a_model_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = modeling_utils.PreTrainedModel.save_pretrained
    monkeypatch.setattr(
        modeling_utils.PreTrainedModel,
        "save_pretrained",
        lambda self, *args, **options: stock(self, *args, **options, max_shard_size="8KB"),
    )
    both(tmp_path)
    assert (tmp_path / "ours/checkpoint-2/model.safetensors.index.json").exists()


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(31)} | {"<eos>": 31}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")


def test_a_trainer_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    for name in ("ours", "stock"):
        arguments = trl.SFTConfig(
            str(tmp_path / name), max_steps=2, save_steps=1, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True
        )
        trainer = trl.SFTTrainer(
            hf_training.model(),
            arguments,
            train_dataset=Dataset.from_list([{"input_ids": row["input_ids"]} for row in hf_training.data()]),
            processing_class=tokenizer(),
        )
        if name == "ours":
            huggingface.enable(trainer)
        trainer.train()
    for step in (1, 2):
        same_files(tmp_path / f"ours/checkpoint-{step}", tmp_path / f"stock/checkpoint-{step}")
    assert (tmp_path / "ours/checkpoint-1/tokenizer.json").exists()
    assert (tmp_path / "ours/README.md").exists()


class Special(Trainer):  # type: ignore[misc]
    """A Trainer that writes additional files, from its own thread and outside the checkpoint's folder too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pushed: list[tuple[int, bool]] = []

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        torch.save(torch.arange(3), folder / "more.pt")
        (folder / "deeper").mkdir()
        (folder / "deeper/notes.txt").write_text("more")
        with (folder / "stream.pt").open("wb") as file:
            torch.save([1, 2], file)
        elsewhere = threading.Thread(target=torch.save, args=([3], folder / "thread.pt"))
        elsewhere.start()
        elsewhere.join()
        torch.save([4], Path(self.args.output_dir, "outside.pt"))
        assert not (folder / "more.pt").exists() and (folder / "thread.pt").exists()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.pushed.append((self.state.global_step, os.path.exists(os.path.join(checkpoint_folder, "config.json"))))
        assert checkpoint_folder == os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")


def test_what_a_derived_trainer_writes_and_pushes(tmp_path: Path, gate: Path) -> None:
    run = tmp_path / "run"
    trainer = hf_training.trainer(run, of=Special, at_step=lambda step: gate.touch() if step == 5 else None)
    trainer.args.push_to_hub = True
    trainer.train()
    assert trainer.pushed == [(2, True), (4, True), (6, True)]
    saved = run / "checkpoint-2"
    assert torch.load(saved / "more.pt").equal(torch.arange(3))
    assert (saved / "deeper/notes.txt").read_text() == "more"
    assert torch.load(saved / "stream.pt") == [1, 2] and torch.load(saved / "thread.pt") == [3]
    assert torch.load(run / "outside.pt") == [4]


def test_functions_are_put_back(tmp_path: Path) -> None:
    def names() -> list[Any]:
        return [
            torch.save,
            vars(torch.distributed.checkpoint)["save"],
            safetensors.torch.save_file,
            modeling_utils.safe_save_file,
            transformers.trainer.rotate_checkpoints,
        ]

    class Breaks(Trainer):  # type: ignore[misc]
        def _save_rng_state(self, output_dir: str) -> None:
            assert not any(one is other for one, other in zip(names(), before, strict=True))
            raise KeyError("as the test wants")

    before = names()
    trainer = hf_training.trainer(tmp_path / "run", of=Breaks)
    with pytest.raises(KeyError):
        trainer.train()
    assert all(one is other for one, other in zip(names(), before, strict=True))
    assert trainer._get_output_dir(None) == str(tmp_path / "run")
    assert "_get_output_dir" not in vars(trainer)
    assert not checkpoints(tmp_path / "run")


def test_what_is_there_is_replaced_or_gets_another_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    hf_training.trainer(run, enable=False, max_steps=2).train()
    hf_training.trainer(run, max_steps=4).train()
    assert sorted(each.name for each in run.iterdir()) == ["checkpoint-2", "checkpoint-2.abandoned-1", "checkpoint-4"]
    hf_training.trainer(run, max_steps=4).train()
    assert sorted(each.name for each in run.iterdir()) == ["checkpoint-2", "checkpoint-2.abandoned-1", "checkpoint-4"]


def test_a_trial_has_a_folder_of_its_own(tmp_path: Path) -> None:
    trainer = hf_training.trainer(tmp_path, max_steps=2)
    trainer.hp_search_backend = transformers.trainer.HPSearchBackend.OPTUNA
    trainer.hp_name = None
    trainer.train()
    for number in range(2):
        trainer._save_checkpoint(trainer.model, SimpleNamespace(number=number))
        wait_for(lambda: checkpoints(tmp_path / f"run-{number}") == [2])  # noqa: B023
    assert checkpoints(tmp_path) == [2]


def test_a_checkpoint_before_a_kill_is_complete_when_it_returns(tmp_path: Path) -> None:
    from transformers.trainer_jit_checkpoint import CheckpointManager

    trainer = hf_training.trainer(tmp_path, save_strategy="no", at_step=lambda _: manager.execute_jit_checkpoint())
    manager = CheckpointManager(trainer)
    trainer.recorder.on_substep_end = None
    trainer.args.max_steps = 1
    trainer.train()
    assert (tmp_path / "checkpoint-1/trainer_state.json").exists()
    assert not (tmp_path / "checkpoint-1/checkpoint-is-incomplete.txt").exists()


def test_deepspeed_saves_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = hf_training.trainer(tmp_path)
    saved = []
    monkeypatch.setattr(Trainer, "is_deepspeed_enabled", True, raising=False)
    trainer._save_checkpoint.__self__._stock_save = lambda *_: saved.append(trainer.state.global_step)
    trainer.is_deepspeed_enabled = True
    for _ in range(2):
        trainer._save_checkpoint(trainer.model, None)
    assert (
        len(saved) == 2
        and [each.name for each in caplog.records].count("asyncckpt.integrations.huggingface.trainer") == 1
    )


def test_only_trainers_are_taken() -> None:
    with pytest.raises(TypeError, match="no Trainer of transformers 5"):
        huggingface.enable(object())


class Averages(Trainer):  # type: ignore[misc]
    """Saves averaged weights, and restores its own weights before the checkpoint is complete."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        weight, average = next(model.parameters()), 3.0
        before = weight.detach().clone()
        weight.data.fill_(average)
        super()._save_checkpoint(model, trial)
        weight.data.copy_(before)


def test_what_is_changed_while_it_is_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsavableStateError, match=r"model\.safetensors was changed"):
        hf_training.trainer(tmp_path, of=Averages).train()
    assert checkpoints(tmp_path) == []


class Merges(Trainer):  # type: ignore[misc]
    """Saves the model with merged adapters too, and unmerges before the checkpoint is complete."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.model.merge_adapter()
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        self.model.get_base_model().save_pretrained(folder / "merged")
        self.model.unmerge_adapter()


def test_one_kind_of_tensors_that_is_changed_is_seen(tmp_path: Path) -> None:
    """Each of 32 layers has 12 tensors. The adapters change one of them through ``.data``, without a version count."""
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(vocab_size=32, n_positions=32, n_embd=8, n_layer=32, n_head=2)
    base = transformers.GPT2LMHeadModel(config)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_fc"], fan_in_fan_out=True))
    with pytest.raises(UnsavableStateError, match=r"model\.safetensors was changed"):
        hf_training.trainer(tmp_path, of=Merges, what=model, max_steps=2, learning_rate=0.5).train()
