"""Folders of versions, from which engines reload their weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.weights import model, whole

from asyncckpt import Checkpointer
from asyncckpt.errors import ClosedError, UnsavableStateError
from asyncckpt.weights import WeightFolders, WeightPublisher, WeightSubscriber

ADDRESS = "policy"


@pytest.fixture
def publisher(runtime: Path) -> Iterator[WeightPublisher]:
    with WeightPublisher(ADDRESS) as publisher:
        yield publisher


def test_the_newest_versions_are_folders(publisher: WeightPublisher, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "like" / name).write_text(name)
    updates = tmp_path / "updates"
    (updates / "weight_v000001").mkdir(parents=True)  # left by a killed process
    with WeightSubscriber(ADDRESS) as reader, WeightFolders(reader, updates, like=tmp_path / "like") as folders:
        for version in range(2, 6):
            publisher.publish(model(version), version)
            path = Path(folders.update(version))
            assert path == updates / f"weight_v{version:06d}" == folders_now(updates)["latest"]
            assert sorted(os.listdir(path)) == ["config.json", "model.safetensors", "tokenizer.json"]
            loaded = load_file(path / "model.safetensors")
            assert all(torch.equal(loaded[name], tensor) for name, tensor in model(version).items())
            assert folders.update() == str(path)  # the folder exists already
        assert sorted(os.listdir(updates)) == ["latest", "weight_v000004", "weight_v000005"]
        assert torch.equal(
            load_file(updates / "weight_v000004" / "model.safetensors")["steps"], torch.tensor(4)
        )  # the older version is still there
    assert not os.listdir(updates)
    with pytest.raises(ClosedError):
        folders.update()


def folders_now(updates: Path) -> dict[str, Path]:
    return {"latest": (updates / "latest").resolve()}


def test_an_older_version_whose_lease_has_ended_is_used_again(publisher: WeightPublisher, tmp_path: Path) -> None:
    with WeightSubscriber(ADDRESS) as reader, WeightFolders(reader, tmp_path / "updates", keep=1) as folders:
        for version in range(1, 10):
            assert not publisher.publish(model(version), version).skipped
            folders.update(version)


def test_a_trainer_that_goes_back(publisher: WeightPublisher, tmp_path: Path) -> None:
    with WeightSubscriber(ADDRESS) as reader, WeightFolders(reader, tmp_path / "updates") as folders:
        for _ in range(2):
            for version in (1, 2):
                state = {"at": torch.randn(3)}
                publisher.publish(state, version, roll_back=True)
                loaded = load_file(Path(folders.update(version)) / "model.safetensors")
                assert torch.equal(loaded["at"], state["at"])


def test_a_version_that_cannot_be_a_folder_replaces_none(publisher: WeightPublisher, tmp_path: Path) -> None:
    with WeightSubscriber(ADDRESS) as reader, WeightFolders(reader, tmp_path / "updates") as folders:
        publisher.publish({"at": torch.ones(3)}, 1)
        path = folders.update(1)
        publisher.publish({"at": torch.ones(3, dtype=torch.complex128)}, 1, roll_back=True)
        with pytest.raises(UnsavableStateError, match="which the format of safetensors lacks"):
            folders.update(1)
        assert torch.equal(load_file(Path(path) / "model.safetensors")["at"], torch.ones(3))
        assert sorted(os.listdir(tmp_path / "updates")) == ["latest", "weight_v000001"]


def test_a_model_of_transformers_is_loaded_from_there(publisher: WeightPublisher, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=16)
    trained = transformers.GPT2LMHeadModel(config)
    trained.save_pretrained(tmp_path / "like")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1)
    publisher.publish({name: each for name, each in trained.state_dict().items() if name != "lm_head.weight"}, 1)
    with WeightSubscriber(ADDRESS) as reader, WeightFolders(reader, tmp_path / "up", like=tmp_path / "like") as folders:
        loaded = transformers.GPT2LMHeadModel.from_pretrained(folders.update())
        assert all(torch.equal(loaded.state_dict()[name], each) for name, each in trained.state_dict().items())
        del loaded


def test_what_cannot_be_a_folder(publisher: WeightPublisher, tmp_path: Path, root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.publish(checkpointer.save(1, whole(1)))
        with WeightSubscriber.of_checkpoints(root) as reader, WeightFolders(reader, tmp_path / "updates") as folders:
            with pytest.raises(UnsavableStateError, match="checkpoint"):
                folders.update()
            assert not os.listdir(tmp_path / "updates")
