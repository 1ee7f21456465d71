"""Test the pickles of DCP's ``.metadata``."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support.states import pickle_enums_as_early_3_11
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from asyncckpt.planning.metadata import pickle_metadata


def test_equal_sizes_stand_once() -> None:
    """Mutable objects are not shared."""

    def tensor() -> TensorStorageMetadata:
        chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
        return TensorStorageMetadata(TensorProperties(), torch.Size([4, 3]), chunks)

    indices = [MetadataIndex(name, torch.Size([row, 0]), row // 2) for name in "ab" for row in (0, 2)]
    indices.append(MetadataIndex("step"))
    metadata = Metadata(
        {"a": tensor(), "b": tensor(), "step": BytesStorageMetadata()},
        storage_data={index: _StorageInfo("__0_0.distcp", at, 1) for at, index in enumerate(indices)},
    )
    found = pickle.loads(pickle_metadata(metadata))
    assert found == metadata and [index.index for index in found.storage_data] == [index.index for index in indices]
    a, b = (found.state_dict_metadata[name] for name in "ab")
    assert a.size is b.size and a.properties is not b.properties and a.chunks is not b.chunks
    for one, other, index in zip(a.chunks, b.chunks, found.storage_data, strict=False):
        assert one is not other and one.sizes is other.sizes and one.offsets is other.offsets is index.offset


def test_names_stand_once() -> None:
    """Names from other ranks are objects of their own, but are stored once too."""

    def other(text: str) -> str:
        return text.encode().decode()

    names = [f"model.layers.{number}.weight" for number in range(1000)]
    properties = TensorProperties(dtype=torch.bfloat16)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([5]))
    metadata = Metadata(
        {name: TensorStorageMetadata(properties, torch.Size([5]), [chunk]) for name in names},
        {other(name): tuple(map(other, name.split("."))) for name in names},
        {MetadataIndex(other(name), [0], 0): _StorageInfo("__0_0.distcp", 7, 9) for name in names},
    )
    data = pickle_metadata(metadata)
    assert pickle.loads(data) == metadata and all(data.count(name.encode() + b"q") <= 1 for name in names)
    assert data.count(b"layers") == 1001 and data.count(b"distcp") == 1
    assert len(data) < 150 * len(names) < 0.7 * len(pickle.dumps(metadata))


@pytest.mark.parametrize("data", [None, {"a": [1, 2]}, {"a": ("b", {"c": 1})}, [("a", 1)], {"a": ("x", 3)}])
def test_any_data_of_a_planner(data: Any) -> None:
    assert pickle.loads(pickle_metadata(Metadata({"a": BytesStorageMetadata()}, data))).planner_data == data


def test_without_anything() -> None:
    assert pickle.loads(pickle_metadata(Metadata({}))) == Metadata({})


def test_attributes_of_others_are_kept() -> None:
    """Megatron-LM stores the plans of all ranks there, and these plans share objects."""
    index = MetadataIndex("a", [0], 0)
    metadata = Metadata({"a": BytesStorageMetadata()}, storage_data={index: _StorageInfo("__0_0.distcp", 0, 9)})
    plans = [SavePlan([WriteItem(index, WriteItemType.BYTE_IO)] * 2, planner_data={"a": ("a",)})] * 2
    metadata.all_local_plans = plans  # type: ignore[attr-defined]
    found = pickle.loads(pickle_metadata(metadata))
    assert found == metadata and found.all_local_plans == plans
    assert found.all_local_plans[0] is found.all_local_plans[1]
    assert vars(metadata).keys() == vars(found).keys() and metadata.planner_data is None


def test_no_python_pickles_an_enum_as_a_call_of_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    pickle_enums_as_early_3_11(monkeypatch)
    about = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [])
    metadata = Metadata({"a": about, "b": BytesStorageMetadata()})
    index = MetadataIndex("b")
    metadata.all_local_plans = [SavePlan([WriteItem(index, WriteItemType.BYTE_IO)])]  # type: ignore[attr-defined]
    assert b"getattr" in pickle.dumps(metadata)
    data = pickle_metadata(metadata)
    assert b"getattr" not in data and pickle.loads(data) == metadata
