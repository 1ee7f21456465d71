"""Find the state in a checkpoint of this library: the indexes have the places, DCP's metadata has the nesting."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.exporting.source_files import SourceFiles
from asyncckpt.exporting.stored import StoredObject, StoredState
from asyncckpt.format.index import Item
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.loading.rank_files import RankFiles
from asyncckpt.loading.read_requests import dtype_named
from asyncckpt.loading.source import StorageSource
from asyncckpt.loading.unpickle import load_metadata
from asyncckpt.planning.boxes import Box, StoredTensor
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.planning.structure import Keys


def open_checkpoint(folder: SourceFiles, source: StorageSource | RankFiles) -> StoredState:
    """Return the state in a checkpoint.

    Args:
        folder: The folder of the checkpoint.
        source: Its files.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError, StorageError: There is no checkpoint, or it is damaged.
        MismatchError: This is a set of files without a state dict.
    """
    path = folder.folder
    metadata = load_metadata(source.metadata(), path, weights_only=True)
    files = {name: folder.open_from(source, name) for name in source.data_files()}
    items: dict[str, dict[tuple[int, ...], tuple[str, Item]]] = {}
    for name, file in files.items():
        for item in file.index.items:  # keep one item of each part
            items.setdefault(item.name, {}).setdefault(tuple(item.offsets), (name, item))
    state = StoredState(path, {}, {}, nesting(metadata), files)
    for name, known in metadata.state_dict_metadata.items():
        its = list(items.get(name, {}).values())
        kind, is_empty = ("tensor", 0 in known.size) if isinstance(known, TensorStorageMetadata) else ("object", False)
        if not (its or is_empty) or any(item.kind != kind for _, item in its):
            raise DamagedCheckpointError(
                f"{METADATA_NAME} has the {kind} {name!r}, and no index of a data file has it: they are not of one"
                " checkpoint",
                path=path,
            )
        if isinstance(known, TensorStorageMetadata):
            dtypes = {dtype_named(item.dtype) for _, item in its} or {known.properties.dtype}
            boxes = [box_of(file, item) for file, item in its]
            state.tensors[name] = whole(name, dtypes, tuple(known.size), boxes, path)
        else:
            ((file_name, item),) = its
            state.objects[name] = StoredObject(file_name, item.at, item.at + item.nbytes)
    return state


def nesting(metadata: Metadata) -> dict[str, Keys]:
    """Return the keys that lead to each value in the state dict, by name, in the order of DCP's metadata."""
    known = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    names = dict.fromkeys(
        [*(name for name in known if name in metadata.state_dict_metadata), *metadata.state_dict_metadata]
    )
    return {name: tuple(known.get(name) or (name,)) for name in names}


def whole(name: str, dtypes: set[torch.dtype], shape: tuple[int, ...], boxes: list[Box], path: str) -> StoredTensor:
    """Return a tensor with all its boxes. Raise ``DamagedCheckpointError`` if they do not form the whole tensor.

    Args:
        name: The name of the tensor.
        dtypes: The dtypes of its boxes.
        shape: The shape of the tensor.
        boxes: The stored parts.
        path: The checkpoint, for the error.
    """
    dtype, *others = sorted(dtypes, key=str)
    if others:
        raise DamagedCheckpointError(f"parts of {name!r} have different types: {sorted(map(str, dtypes))}", path=path)
    tensor = StoredTensor(name, dtype, shape, boxes)
    tensor.check(path)
    return tensor


def box_of(file: str, item: Item) -> Box:
    """Return the place of an item of the data file ``file``."""
    return Box(file, item.payload_at, tuple(item.offsets), tuple(item.shape), contiguous_strides(item.shape))
