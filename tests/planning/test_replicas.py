"""Test the digests that ranks use to compare values under one name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.accelerators import busy

from asyncckpt.devices.kinds import ready_events
from asyncckpt.planning.replicas import Replicas, Sample


def _digests(values: dict[str, Any]) -> dict[str, int]:
    sample = Sample(values.items())
    return sample.digests(ready_events(sample.on_devices))


_KINDS = {
    "fp32": torch.randn(50, 7),
    "bf16": torch.randn(1000).bfloat16(),
    "fp8": torch.randn(64).to(torch.float8_e4m3fn),
    "complex": torch.randn(40, dtype=torch.complex64),
    "turned": torch.randn(30, 5).t(),
    "scalar": torch.tensor(3.0),
    "parameter": torch.nn.Parameter(torch.randn(9)),
    "many": torch.arange(100_000),
    "few": torch.arange(10),
    "text": "x",
    "dict": {"a": [1, 2.0, None]},
}


@pytest.mark.parametrize("name", _KINDS)
def test_equal_values_have_equal_digests_and_others_have_not(name: str) -> None:
    value = _KINDS[name]
    if not isinstance(value, torch.Tensor):
        assert _digests({"v": value}) == _digests({"v": eval(repr(value))}) != _digests({"v": [value]})
        return
    with torch.no_grad():
        other = value.detach().clone().flatten()
        other[0] = value.flatten()[0].float() + 1 if name == "fp8" else value.flatten()[0] + 1
    assert _digests({"v": value}) == _digests({"v": value.detach().clone()})
    assert _digests({"v": value}) != _digests({"v": other.view(value.shape)})
    assert _digests({"v": value}) != _digests({"v": value.reshape(-1, 1)})


def test_what_cannot_be_compared_is_left_out() -> None:
    freed = torch.ones(9)
    freed.untyped_storage().resize_(0)
    values = {
        "sparse": torch.eye(3).to_sparse(),
        "class": object(),
        "freed": freed,
        "meta": torch.ones(3, device="meta"),
    }
    assert _digests(values | {"empty": torch.empty(0), "w": torch.ones(3)}).keys() == {"empty", "w"}


def test_all_is_compared_at_first_and_later_some_in_turns() -> None:
    state = {"model": {f"w{number}": torch.ones(3) for number in range(1000)}}
    replicas = Replicas(state, [f"model.w{number}" for number in range(1000)], 3)

    def compared(number: int) -> set[str]:
        return {name for name, _ in replicas.values(lambda: state, number)}

    assert len(compared(3)) == len(compared(4)) == 1000  # no save is committed yet
    replicas.on_end(is_committed=True)
    assert 60 < len(compared(5)) < 200 and 60 < len(compared(6)) < 200
    assert not any(map(compared, (7, 8, 9)))
    later = [compared(number) for number in range(10, 200)]
    assert sum(map(bool, later)) == 19 and len(set().union(*later)) == 1000
    replicas.on_end(is_committed=False)
    assert len(compared(200)) == 1000
    del state["model"]["w7"]  # a user's planner may allow this
    assert len(compared(201)) == 999


@pytest.mark.device
def test_a_sample_of_a_device_has_the_values_of_its_moment(device_type: str) -> None:
    values = {
        "w": torch.randn(1000, device=device_type),
        "b": torch.randn(7, device=device_type).bfloat16(),
        "turned": torch.randn(30, 5, device=device_type).t(),
        "n": torch.arange(5, device=device_type),
        "host": torch.ones(3),
    }
    before = {name: value.clone() for name, value in values.items()}
    busy(0.2)  # the samples are not copied yet when the values change
    sample = Sample(values.items())
    ready = ready_events(sample.on_devices)
    for value in values.values():
        if value.device.type != "cpu":
            value.zero_()
    assert sample.digests(ready) == _digests(before) != _digests(values)
