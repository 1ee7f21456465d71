"""What is stored in files of safetensors: in one, or in all of a folder, also in shards as DCP's writer makes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.errors import DamagedCheckpointError, UnsavableStateError
from asyncckpt.exporting.checkpoint_source import whole
from asyncckpt.exporting.source_files import SourceFiles
from asyncckpt.exporting.stored import Box, StoredState
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.planning.safetensors_plan import DTYPES, METADATA, PREFIX_BYTES
from asyncckpt.shm.segment import PAGE

SUFFIX = ".safetensors"
INDEX_NAME = f"model{SUFFIX}.index.json"
# Where DCP's HuggingFaceStorageWriter says which part of a tensor each file has.
_SHARDS = "DCP_SHARDING_INFO"
# The names that its files have, and those of transformers.
_NUMBERED = re.compile(rf"(shard-\d+-)?(.+)-(\d+)-of-(\d{{1,9}}){re.escape(SUFFIX)}")
_LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes


def open_safetensors_folder(folder: SourceFiles) -> StoredState | None:
    """The tensors in the files of a folder: those that an index there names, or else all; None: there are none.

    Raises as ``open_safetensors``, and ``DamagedCheckpointError`` where a file is missing that the index, or the names
    of the others, are about.
    """
    present, path = folder.names(), folder.path(INDEX_NAME)
    names = [name for name in present if name.endswith(SUFFIX)]
    if INDEX_NAME not in present:
        _check_numbers(names, folder)
        return open_safetensors(folder, names) if names else None
    try:
        weight_map = dict(json.loads(folder.read(INDEX_NAME))["weight_map"])
        known = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"this is no index of safetensors: {type(error).__name__}", path=path) from error
    if missing := known.difference(names):
        raise DamagedCheckpointError(f"the index names {min(missing, key=str)!r}, which is missing", path=path)
    state = open_safetensors(folder, sorted(known))
    for name, file in weight_map.items():
        if name not in state.tensors or all(box.file != file for box in state.tensors[name].boxes):
            raise DamagedCheckpointError(f"the index says that {name!r} is in {file}, where it is not", path=path)
    return state


def _check_numbers(names: list[str], folder: SourceFiles) -> None:
    """Of files that are numbered as so many of so many, each has to be there.

    The numbers of ranks, which DCP's writer puts before those, have gaps: one with nothing to write leaves no file.
    """
    found: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if numbered := _NUMBERED.fullmatch(name):
            rank, stem, number, count = numbered.groups()
            found.setdefault((f"shard-*-{stem}" if rank else stem, count), set()).add(int(number))
    for (stem, count), numbers in found.items():
        for number in range(1, int(count) + 1):
            if number not in numbers:
                missing = f"{stem}-{number:0{len(count)}d}-of-{count}{SUFFIX}"
                raise DamagedCheckpointError(
                    f"{missing!r} is missing, as the names of the others say, and no {INDEX_NAME} says otherwise: bring"
                    " it here, or such an index",
                    path=folder.path(missing),
                )


def open_safetensors(folder: SourceFiles, names: list[str]) -> StoredState:
    """The tensors in some files.

    Args:
        folder: Where they stand.
        names: The files in it.

    Raises:
        DamagedCheckpointError, StorageError: A file is none of safetensors, or cannot be read.
    """
    path = folder.folder
    state = StoredState(path, {}, {}, {}, files := {})
    found: dict[str, list[tuple[torch.dtype, Box]]] = {}
    for name in sorted(names):
        fields, begin = _header(folder, name)
        try:
            shards = json.loads((fields.pop(METADATA, None) or {}).get(_SHARDS, "{}"))
            boxes = {each: _box(name, facts, begin, shards.get(each)) for each, facts in fields.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"this is no header of safetensors: {type(error).__name__}: {error}", path=folder.path(name)
            ) from error
        sizes = [(each, box.begin, math.prod(box.shape) * dtype.itemsize) for each, (dtype, box, _) in boxes.items()]
        files[name] = folder.open(name, sizes)
        for each, (dtype, box, is_shard) in boxes.items():
            if each in found and not is_shard:
                raise DamagedCheckpointError(
                    f"{each!r} is in {found[each][0][1].file} and in {name}: take one of them away", path=path
                )
            found.setdefault(each, []).append((dtype, box))
    for each, its in found.items():
        if len({len(box.shape) for _, box in its}) > 1:
            raise DamagedCheckpointError(f"the shards of {each!r} have different numbers of dimensions", path=path)
        ends = ([at + n for at, n in zip(box.offsets, box.shape, strict=True)] for _, box in its)
        shape = tuple(map(max, zip(*ends, strict=True)))
        state.tensors[each] = whole(each, {dtype for dtype, _ in its}, shape, [box for _, box in its], path)
        state.keys[each] = (each,)
    return state


def _box(
    file: str, facts: Mapping[str, Any], begin: int, shard: Mapping[str, Any] | None
) -> tuple[torch.dtype, Box, bool]:
    """What a header says of a tensor: its type, where it is, and whether that is a part of a larger one."""
    if facts["dtype"] not in DTYPES:
        raise UnsavableStateError(
            f"a tensor is of the type {facts['dtype']}, which this torch does not have", path=file
        )
    dtype, shape, (first, end) = DTYPES[facts["dtype"]], tuple(facts["shape"]), facts["data_offsets"]
    offsets = tuple(shard["saved_offsets"]) if shard is not None else (0,) * len(shape)
    numbers = [*shape, *offsets, first, end]
    is_right = all(type(number) is int and number >= 0 for number in numbers) and len(offsets) == len(shape)
    if not is_right or end - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{facts} are not the facts of a tensor")
    return dtype, Box(file, begin + first, offsets, shape, contiguous_strides(shape)), shard is not None


def _header(folder: SourceFiles, name: str) -> tuple[dict[str, Any], int]:
    """The header of a file, and where the bytes of the tensors begin."""
    path = folder.path(name)
    # Of a file with checksums no more than is needed: the first tensors may be damaged, and not be asked for.
    head = folder.head(name, PAGE if folder.checked(name) is None else PREFIX_BYTES)
    end = PREFIX_BYTES + int.from_bytes(head[:PREFIX_BYTES], "little")
    if len(head) < PREFIX_BYTES or end > _LONGEST_HEADER:
        raise DamagedCheckpointError("this is no file of safetensors", path=path)
    if end > len(head):
        head = folder.head(name, end)
    try:
        fields = json.loads(head[PREFIX_BYTES:end])
        if not isinstance(fields, dict):
            raise ValueError("it is not a dict")
    except ValueError as error:
        raise DamagedCheckpointError(f"this is no header of safetensors: {error}", path=path) from error
    return fields, end
