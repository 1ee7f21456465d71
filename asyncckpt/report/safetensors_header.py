"""What the header of a file of safetensors says, without torch: also of one that has parts of larger tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.loading.data_file import read_plain
from asyncckpt.worker.storage import storage_for

_PREFIX_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes
_LARGEST = 1 << 63  # no size, and no offset, is as large
_METADATA = "__metadata__"
# Where DCP's HuggingFaceStorageWriter says which part of a tensor each file has.
_SHARDS = "DCP_SHARDING_INFO"
# The types of the format, by the names that torch has for them, and the bytes of an element.
_TYPES = {
    **{"U64": ("uint64", 8), "I64": ("int64", 8), "F64": ("float64", 8), "C64": ("complex64", 8)},
    **{"F32": ("float32", 4), "U32": ("uint32", 4), "I32": ("int32", 4)},
    **{"BF16": ("bfloat16", 2), "F16": ("float16", 2), "U16": ("uint16", 2), "I16": ("int16", 2)},
    **{"F8_E5M2FNUZ": ("float8_e5m2fnuz", 1), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1)},
    **{"F8_E8M0": ("float8_e8m0fnu", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1)},
    **{"I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1)},
}


class TensorInFile(NamedTuple):
    """A tensor of a file, or the part of one that begins at ``offsets``; ``begin`` and ``end`` are of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    end: int


def tensors_in(path: str) -> list[TensorInFile]:
    """The tensors in the file at ``path``, in the order of their bytes, which fill it without a gap.

    Types that are not known here keep the name that the file has for them.

    Raises:
        DamagedCheckpointError: It is none of safetensors, or its tensors do not fill it.
        StorageError: It cannot be read.
    """
    storage = storage_for(path)
    size = storage.size(path) or 0
    with closing(storage.open(path)) as file:
        prefix = read_plain(file, 0, min(_PREFIX_BYTES, size))
        begin = _PREFIX_BYTES + int.from_bytes(prefix, "little")
        if len(prefix) < _PREFIX_BYTES or begin > min(size, _LONGEST_HEADER):
            raise DamagedCheckpointError("this is no file of safetensors", path=path)
        header = read_plain(file, _PREFIX_BYTES, begin)
    try:
        fields = json.loads(header, object_pairs_hook=_without_doubles)
        shards = json.loads((fields.pop(_METADATA, None) or {}).get(_SHARDS, "{}"))
        found = [_tensor(name, facts, begin, shards.get(name)) for name, facts in fields.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"this is no header of safetensors: {type(error).__name__}: {error}", path=path
        ) from error
    found.sort(key=lambda each: (each.begin, each.end))
    ends = [(begin, begin), *((each.begin, each.end) for each in found), (size, size)]
    if any(end != after for (_, end), (after, _) in pairwise(ends)):
        raise DamagedCheckpointError("its tensors do not fill the file: bytes are missing, or too many", path=path)
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _tensor(name: str, facts: Mapping[str, Any], begin: int, shard: Mapping[str, Any] | None) -> TensorInFile:
    """What a header, after which the bytes begin, says of a tensor. Raises ``ValueError``, ``TypeError``, ..."""
    shape, (first, end) = tuple(facts["shape"]), facts["data_offsets"]
    offsets = (0,) * len(shape) if shard is None else tuple(shard["saved_offsets"])
    numbers = [*shape, *offsets, first, end]
    dtype, item_bytes = _TYPES.get(facts["dtype"], (facts["dtype"], None))
    is_right = all(type(number) is int and 0 <= number < _LARGEST for number in numbers)
    is_right = is_right and len(offsets) == len(shape) and first <= end and isinstance(dtype, str)
    if not is_right or (item_bytes is not None and end - first != math.prod(shape) * item_bytes):
        raise ValueError(f"what it says of {name!r}")
    return TensorInFile(name, dtype, shape, offsets, begin + first, begin + end)
