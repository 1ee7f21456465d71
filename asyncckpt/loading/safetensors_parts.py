"""Find the tensors of a safetensors file, and their places in sharded tensors, without reading them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import IO, Any

from asyncckpt.errors import FormatError
from asyncckpt.loading.unpickled_tensors import Division, ReadBytes, StoredPart
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.planning.safetensors_plan import DTYPES, METADATA, PREFIX_BYTES

_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def parts_in(stream: IO[bytes], nbytes: int, read_bytes: ReadBytes) -> dict[str, StoredPart]:
    """Return notes of the tensors in a safetensors file, by name.

    Args:
        stream: The file, at its start.
        nbytes: The size of the file.
        read_bytes: Reads bytes of the file.

    Raises:
        FormatError: This torch has no such dtype.
        Exception: The header does not describe the file. Invalid headers fail in many ways.
    """
    length = int.from_bytes(stream.read(PREFIX_BYTES), "little")
    begin = end = PREFIX_BYTES + length
    if length > _MOST_HEADER_BYTES or begin > nbytes:
        raise ValueError(f"the header would have {length:,} bytes, in a file of {nbytes:,}")
    fields = json.loads(stream.read(length))
    fields.pop(METADATA, None)
    found = {}
    for name, about in sorted(fields.items(), key=lambda field: field[1]["data_offsets"]):
        if (dtype := DTYPES.get(about["dtype"])) is None:
            raise FormatError(f"{name!r} is of the type {about['dtype']!r}, and this torch has none")
        shape = tuple(about["shape"])
        size = math.prod(shape) * dtype.itemsize
        if any(type(each) is not int or each < 0 for each in shape):
            raise ValueError(f"{name!r} has the shape {shape}")
        if about["data_offsets"] != [end - begin, end - begin + size]:
            raise ValueError(f"{name!r} has {size:,} bytes from {end - begin:,} on, and not {about['data_offsets']}")
        strides = tuple(contiguous_strides(shape))
        found[name] = StoredPart((end, size), dtype, read_bytes, shape=shape, strides=strides)
        end += size
    if end != nbytes:
        raise ValueError(f"the tensors end at {end:,}, and the file has {nbytes:,} bytes")
    return found


def shards_of(part: StoredPart, about: Mapping[str, Any], rank: int) -> Iterator[StoredPart]:
    """Yield the shards in the local tensor ``part`` of a rank, as torch_checkpointing's metadata describes them.

    Args:
        part: A tensor of the rank's file.
        about: The sharding metadata of the tensor.
        rank: The rank.

    Raises:
        FormatError: The kind of metadata is not known.
        Exception: The metadata does not describe the tensor. Invalid metadata fails in many ways.
    """
    its, whole = about["data"], tuple(about["data"]["global_shape"])
    if about["type"] == "default_tensor_v1":
        boxes = zip(its["global_offsets"], its["local_offsets"], its["local_sizes"], strict=True)
        for offsets, begins, lengths in boxes:
            _check_inside(begins, lengths, part.shape)
            _check_inside(offsets, lengths, whole)
            first = sum(at * stride for at, stride in zip(begins, part.strides, strict=True))
            yield replace(part, first=first, shape=tuple(lengths), whole=whole, offsets=tuple(offsets))
        return
    if about["type"] != "DTensorShardingMetadata":
        raise FormatError(f"a tensor is sharded as {about['type']!r} describes, which is not known")
    ranks, number = its["mesh_spec"]["mesh_data"], its["mesh_spec"]["mesh_data"].index(rank)
    divisions: list[Division] = []
    for size, placement in zip(its["mesh_spec"]["mesh_shape"][::-1], its["placements"][::-1], strict=True):
        number, coordinate = divmod(number, size)
        if placement["type"] != "Replicate":
            divisions.insert(0, (size, coordinate, placement["dim"], placement.get("split_factor", 1)))
    placed = part.within(whole, divisions, ranks)
    yield placed if divisions else part  # each rank may have a plain tensor of its own


def _check_inside(begins: list[int], lengths: list[int], shape: tuple[int, ...]) -> None:
    if any(not 0 <= at <= at + n <= size for at, n, size in zip(begins, lengths, shape, strict=True)):
        raise ValueError(f"a shard of {lengths} at {begins} lies outside of a tensor of {shape}")
