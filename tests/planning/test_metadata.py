"""DCP's ``.metadata``, as we pickle it."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncckpt.planning.metadata import pickle_metadata


def test_equal_sizes_stand_once() -> None:
    """And nothing else that somebody could change."""

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
