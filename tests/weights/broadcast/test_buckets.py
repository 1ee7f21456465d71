"""Buckets hold all bytes, whatever lies where, and copy no more than they have to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.states import same

from asyncckpt.errors import UnsavableStateError
from asyncckpt.weights.broadcast import buckets
from asyncckpt.weights.broadcast.buckets import (
    BucketTensor,
    describe,
    fill,
    read_description,
    view,
    views,
)
from asyncckpt.weights.broadcast.transport import Buffers, buffer_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool, torch.int16]


tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.integers(0, 700), st.booleans(), st.booleans()), min_size=0, max_size=20
)


@settings(max_examples=200, deadline=None)
@given(tensors, st.integers(256, 2000), st.booleans())
def test_buckets_hold_all_bytes(
    kinds: list[tuple[torch.dtype, int, bool, bool]], bucket_bytes: int, stays: bool
) -> None:
    """What is filled at one end and read at the other is the same, whatever lies where; no bucket is too large."""
    side_by_side = torch.arange(20_000, dtype=torch.int64).view(torch.uint8).clone()
    expected: dict[str, torch.Tensor] = {}
    at = 0
    for number, (dtype, elements, joins, turned) in enumerate(kinds):
        nbytes = elements * dtype.itemsize
        if joins:
            at += -at % dtype.itemsize
            raw = side_by_side[at : at + nbytes]
            at += nbytes
        else:
            raw = torch.arange(nbytes).to(torch.uint8)
        if dtype is torch.bool:
            raw %= 2
        tensor = raw.view(dtype)
        expected[str(number)] = tensor.view(-1, 2).T if turned and elements % 2 == 0 else tensor
    pair = [torch.zeros(buffer_bytes(bucket_bytes), dtype=torch.uint8) for _ in range(2)]
    entries = [BucketTensor(name, tensor, stays) for name, tensor in expected.items()]
    found: dict[str, torch.Tensor] = {}
    merged = torch.empty(0, dtype=torch.uint8)
    for bucket in fill(entries, bucket_bytes, Buffers(pair)):
        assert 0 <= bucket.data.numel() <= bucket_bytes
        there = torch.zeros(buffer_bytes(bucket_bytes), dtype=torch.uint8)
        there[bucket.skew : bucket.skew + bucket.data.numel()] = bucket.data
        items = read_description(describe(bucket.items))
        assert items == list(bucket.items)
        if items[0].is_piece:
            merged = torch.empty(items[0].total, dtype=torch.uint8) if items[0].begin == 0 else merged
            merged[items[0].begin :][: items[0].nbytes] = bucket.data
            if items[0].is_last_piece:
                found[items[0].name] = view(items[0], merged)
            continue
        found.update(views(items, there))
    assert list(found) == list(expected)
    assert same(found, expected)


def test_side_by_side_is_not_copied() -> None:
    image = torch.arange(1000, dtype=torch.float32)
    weights = {str(number): image[number * 100 : (number + 1) * 100] for number in range(10)}
    made = list(fill(buckets.tensors_of(weights), 2000, Buffers([torch.zeros(0)] * 2)))
    assert made[0].data.data_ptr() == image.data_ptr() and all(bucket.keep for bucket in made)


class Wrapper(torch.Tensor):
    """As those of quantized weights: a tensor that has its data in others."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Wrapper:  # type: ignore[override]
        return cls(args[0])  # nothing but detach is called


def offloaded() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_what_has_no_memory_is_refused() -> None:
    ones = torch.ones(3)
    for tensor in (Wrapper(ones), offloaded(), ones.to_sparse(), ones.to("meta")):
        with pytest.raises(UnsavableStateError, match="'w' has no plain memory"):
            list(buckets.tensors_of({"w": tensor}))


def test_the_sum_of_a_device_finds_what_changes() -> None:
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 100_003, np.uint8))
    right = buckets.sum_on_device(data)
    assert right == buckets.sum_on_device(data.clone())
    for place in (0, 7, 8, 40_000, 99_999, 100_002):
        other = data.clone()
        other[place] ^= 1
        assert buckets.sum_on_device(other) != right
    swapped = data.clone()
    swapped[0:8], swapped[8:16] = data[8:16], data[0:8]
    assert buckets.sum_on_device(swapped) != right
    assert buckets.sum_on_device(data[:-1]) != right
    for nbytes in (0, 1, 7, 8, 9):
        buckets.sum_on_device(data[:nbytes])
    for begin in range(1, 9):  # a receiver's bucket begins anywhere in its buffer
        there = torch.zeros(100_100, dtype=torch.uint8)[begin : begin + data.numel()].copy_(data)
        assert buckets.sum_on_device(there) == right
