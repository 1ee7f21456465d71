"""What the ``.metadata`` of stock DCP may say: whoever wrote it may not have meant well, or not have been DCP."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from asyncckpt.errors import DamagedCheckpointError, unless_interrupt
from asyncckpt.format.manifest import METADATA_NAME

_LARGEST = 1 << 63  # no size, and no offset, is as large


def check_metadata(metadata: Metadata, path: str) -> None:
    """Raise ``DamagedCheckpointError`` for what is of another type or size than DCP would write, of ``path``."""
    try:
        for name, about in metadata.state_dict_metadata.items():
            if not isinstance(name, str) or not _is_value(about):
                raise ValueError(f"what it says of {name!r}")
        for index, place in (metadata.storage_data or {}).items():
            name = index.fqn
            if not (isinstance(index, MetadataIndex) and isinstance(name, str) and _is_place(place)):
                raise ValueError(f"where it says that {name!r} is stored")
            its = metadata.state_dict_metadata.get(name)
            if isinstance(its, TensorStorageMetadata) and not _are_sizes(index.offset or its.size, len(its.size)):
                raise ValueError(f"which part of {name!r} it says is stored")
    except unless_interrupt(Exception) as error:  # attributes may be missing, or be anything, as they were unpickled
        raise DamagedCheckpointError(
            f"{METADATA_NAME} is damaged: {type(error).__name__}: {error}", path=path
        ) from error


def _is_value(about: Any) -> bool:
    if not isinstance(about, TensorStorageMetadata):
        return isinstance(about, BytesStorageMetadata)
    ndim = len(about.size)
    is_right = isinstance(about.properties.dtype, torch.dtype) and _are_sizes(about.size, ndim)
    return is_right and all(
        isinstance(each, ChunkStorageMetadata) and _are_sizes(each.offsets, ndim) and _are_sizes(each.sizes, ndim)
        for each in about.chunks
    )


def _is_place(place: Any) -> bool:
    return isinstance(place.relative_path, str) and _are_sizes((place.offset, place.length), 2)


def _are_sizes(numbers: Any, count: int) -> bool:
    """Whether these are so many sizes or offsets, none of them larger than can be."""
    return isinstance(numbers, tuple | list) and len(numbers) == count and all(map(_is_size, numbers))


def _is_size(number: Any) -> bool:
    return isinstance(number, Integral) and 0 <= int(number) < _LARGEST
