"""Weights as readers see them: tensors by name, buckets, and safetensors files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from support.states import same
from support.weights import model

from asyncckpt.errors import (
    UnsavableStateError,
)
from asyncckpt.planning import safetensors_plan
from asyncckpt.weights import WeightPublisher, WeightSubscriber


def test_every_kind_of_tensor_comes_as_it_is(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    torch.manual_seed(0)
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    weights = {str(dtype): torch.randint(0, 255, (3, 5, 7)).to(torch.uint8).to(dtype) for dtype in kinds}
    weights |= {
        "large": torch.randn(300, 4001),
        "large, not contiguous": torch.randn(4001, 300).t(),
        "some rows": torch.randn(900, 40)[::3],
        "a negative view": torch.randn(6, dtype=torch.complex64).conj().imag,
        "expanded": torch.randn(1, 40).expand(60, 40),
        "a number": torch.tensor(3.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 4),
        "a parameter": torch.nn.Parameter(torch.randn(11)),
    }
    publisher.publish(weights, 0)
    with subscriber.acquire() as acquired:
        assert set(acquired) == set(weights) and len(acquired) == len(weights)
        assert all(same(acquired[name], tensor.detach()) for name, tensor in weights.items())
        assert acquired.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        assert acquired.version == 0


def test_buckets_have_all_tensors_in_pieces(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    weights = {f"layer.{number}": torch.full((100,), float(number)) for number in range(10)}
    publisher.publish(weights | {"large": torch.zeros(1000)}, 1)
    with subscriber.acquire() as acquired:
        buckets = list(acquired.buckets(1000))
        assert [len(bucket) for bucket in buckets] == [2, 2, 2, 2, 2, 1]
        assert dict(pair for bucket in buckets for pair in bucket).keys() == acquired.keys()
        assert all(tensor.data_ptr() == acquired[name].data_ptr() for bucket in buckets for name, tensor in bucket)
        assert len(list(acquired.buckets(1 << 20))) == 1
        del buckets


def test_it_is_a_safetensors_file(publisher: WeightPublisher, subscriber: WeightSubscriber, tmp_path: Path) -> None:
    weights = model(3) | {"flags": torch.tensor([True, False, True]), "empty": torch.empty(0, 2)}
    publisher.publish(weights, 1)
    with subscriber.acquire() as acquired:
        with acquired.safetensors(tmp_path) as (path,):
            assert Path(path).parent == tmp_path and path.endswith(".safetensors")
            assert same(dict(sorted(safetensors.torch.load_file(path).items())), dict(sorted(weights.items())))
            with safetensors.safe_open(path, "pt") as file:
                assert set(file.keys()) == set(weights)
            # As MoonshotAI's checkpoint-engine does: map the file as one shared tensor to pin, then remove the file.
            whole = torch.from_file(path, shared=True, size=Path(path).stat().st_size, dtype=torch.uint8)
            header = 8 + int.from_bytes(bytes(whole[:8].tolist()), "little")
            assert header % 64 == 0 and whole.numel() == header + acquired.nbytes
            os.unlink(path)
            del whole
        with acquired.safetensors() as (path,):
            assert os.path.exists(path)
        assert not os.path.exists(path) and not os.path.exists(os.path.dirname(path))


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


def _of_bytes(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors in which each byte is 0 or 1."""
    ones = torch.arange(60_000 * dtype.itemsize).remainder(7).eq(3).byte().view(dtype)
    some = ones[:60].view(5, 12)
    tensors = {"small": some.view(torch.uint8).clone().view(dtype), "large": ones, "scalar": ones[3], "none": ones[:0]}
    return tensors | {"turned": some.t(), "every other": ones[::2], "large, turned": ones.view(200, 300).t()}


def _bytes_of(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor. The tensor is viewed as integers, because torch cannot copy all dtypes."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.itemsize]
    return tensor.view(integer).contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whatever_torch_views_as_bytes_is_published(
    publisher: WeightPublisher, subscriber: WeightSubscriber, tmp_path: Path, dtype: torch.dtype
) -> None:
    weights = _of_bytes(dtype) | {"wide": torch.ones(3, dtype=torch.float64), "narrow": torch.ones(3).bool()}
    version = 0
    for given in (weights, weights, weights | {"more": weights["small"]}, weights):
        for one_by_one in (True, False):
            version += 1
            publisher.publish(list(given.items()) if one_by_one else given, version, dtype=torch.bfloat16)
            with subscriber.acquire(version) as acquired:
                assert acquired.keys() == given.keys()
                for name, tensor in given.items():
                    converts = tensor.is_floating_point() and tensor.itemsize > 1
                    expected = tensor.to(torch.bfloat16) if converts else tensor
                    assert acquired[name].dtype == expected.dtype and acquired[name].shape == expected.shape
                    assert _bytes_of(acquired[name]) == _bytes_of(expected), (version, name)
                if dtype in safetensors_plan.DTYPES.values():
                    with acquired.safetensors() as (path,):
                        assert safetensors.torch.load_file(path).keys() == given.keys()
                else:
                    with pytest.raises(ValueError, match=f"is {dtype}, which the format"), acquired.safetensors():
                        pass


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_what_is_quantized_is_refused(publisher: WeightPublisher) -> None:
    """The bytes of torch's quantized tensors are not their whole value."""
    kinds = [dtype for dtype in DTYPES if str(dtype).startswith("torch.q")]
    assert len(kinds) == 5
    for dtype in kinds:
        with pytest.raises(UnsavableStateError, match="'odd'"):
            publisher.publish({"odd": torch.empty(8, 8, dtype=dtype)}, 1)


def test_names_that_safetensors_cannot_have(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    odd = {name: torch.full((2,), float(number)) for number, name in enumerate(['é"\n\\', "", "a\x00b", "{}", " "])}
    publisher.publish(odd, 1)
    with subscriber.acquire() as weights:
        assert same(dict(weights), odd)
    for name in ("__metadata__", 3):
        for bad in ({name: torch.ones(3)}, [(name, torch.ones(3))]):
            with pytest.raises(UnsavableStateError, match="cannot be the name"):
                publisher.publish(bad, 2)  # type: ignore[arg-type]


def test_a_default_device_is_not_looked_at(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    weights = model(1) | {"empty": torch.empty(0, 2)}
    with torch.device("meta"):
        publisher.publish(weights, 1)
        with subscriber.acquire() as acquired:
            assert {tensor.device.type for tensor in acquired.values()} == {"cpu"}
