"""Read values of two checkpoints, and count the elements that differ. This part of ``diff`` needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncckpt.exporting.checkpoint_source import whole
from asyncckpt.exporting.stored import Box, fetch
from asyncckpt.format.index import Item
from asyncckpt.loading.data_file import ChecksummedFile
from asyncckpt.loading.read_requests import dtype_named
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.shm.memcpy import address_of

_CONVERTED = 1 << 20  # elements that are converted to float64 at once


def read_object(file: ChecksummedFile, item: Item, pool: ThreadPoolExecutor) -> bytes:
    """Read the bytes of an item that is no tensor. Raises ``DamagedCheckpointError``, ``StorageError``."""
    data = memoryview(bytearray(item.payload_bytes))
    fetch(file, [(item.payload_at, item.payload_at + len(data), address_of(data))] if data else [], pool)
    return bytes(data)


def read_tensor(
    parts: Sequence[tuple[ChecksummedFile, Item]], shape: tuple[int, ...], path: str, pool: ThreadPoolExecutor
) -> torch.Tensor:
    """Read a whole tensor, and compare its checksums.

    Args:
        parts: The items of its shards, each with the open file of the item.
        shape: The shape of the whole tensor.
        path: The checkpoint, for errors.
        pool: The threads that read.

    Raises:
        DamagedCheckpointError: Bytes are damaged, or a shard is missing.
        StorageError: A file cannot be read.
    """
    boxes = [
        Box("", item.payload_at, (*item.offsets,), (*item.shape,), contiguous_strides(item.shape)) for _, item in parts
    ]
    dtype = whole(parts[0][1].name, {dtype_named(item.dtype) for _, item in parts}, shape, boxes, path).dtype
    found = torch.empty(shape, dtype=dtype, device="cpu")
    for (file, item), box in zip(parts, boxes, strict=True):
        shard = found if box.shape == shape else torch.empty(box.shape, dtype=dtype, device="cpu")
        fetch(file, [(item.payload_at, item.payload_at + item.payload_bytes, shard.data_ptr())], pool)
        if shard is not found:
            found[tuple(slice(at, at + n) for at, n in zip(box.offsets, box.shape, strict=True))] = shard
    return found


def measure(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float | None]:
    """Count the elements that differ between two tensors of one shape.

    Elements of one dtype differ if their bytes do, others if their values in float64 do.

    Returns:
        The count, and the largest absolute difference of two finite elements in float64. The difference is None if no
            two elements are finite, or torch cannot convert the dtype.
    """
    count, largest = 0, None
    for a, b in zip(*(torch.split(each.reshape(-1), _CONVERTED) for each in (one, other)), strict=True):
        try:
            wide = [each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (a, b)]
        except (RuntimeError, NotImplementedError, TypeError):  # torch only knows the bytes of some dtypes
            wide = []
        if a.dtype == b.dtype:
            a, b = (each.view(torch.uint8).view(len(each), each.itemsize) for each in (a, b))
            count += int((a != b).any(dim=1).sum())
        elif wide:
            count += int((wide[0] != wide[1]).sum())
        if wide:
            differences = (wide[0] - wide[1]).abs()
            finite = differences[differences.isfinite()]
            largest = max(largest or 0.0, float(finite.max())) if len(finite) else largest
    return count, largest
