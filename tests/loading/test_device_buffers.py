"""The buffers of loads to a device: which buffer is next, and which transfer is waited for."""

from __future__ import annotations

import pytest
import torch
from support.devices import TYPE, MadeUpDevices

from asyncckpt.loading.device_buffers import BUFFERS, DeviceBuffer, DeviceBuffers

DEVICE = torch.device(TYPE, 0)


def _sent(kind: MadeUpDevices, buffer: DeviceBuffer, done: list[str], name: str) -> None:
    """Queue a transfer from ``buffer`` that is not complete yet."""
    stream = kind.new_stream(DEVICE)
    stream.add(lambda: done.append(name))
    buffer._sent = {DEVICE: kind.record(stream)}


def test_some_are_read_into_while_others_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = MadeUpDevices()
    kind.install(monkeypatch)
    done: list[str] = []
    with DeviceBuffers() as buffers:
        taken = []
        for number in range(BUFFERS):
            taken.append(buffers.take(DEVICE, [100, 7]))
            assert [len(view) for view in taken[-1].views] == [100, 7] and not done
            _sent(kind, taken[-1], done, f"{number}")
        assert len(set(map(id, taken))) == BUFFERS
        for number in range(BUFFERS):
            assert buffers.take(DEVICE, [30, 30]) is taken[number] and f"{number}" in done
        _sent(kind, taken[0], done, "again")
    assert sorted(done) == [*map(str, range(BUFFERS)), "again"]


def test_a_buffer_that_is_too_small_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = MadeUpDevices()
    kind.install(monkeypatch)
    done: list[str] = []
    with DeviceBuffers() as buffers:
        first, second, *_ = (buffers.take(DEVICE, [100]) for _ in range(BUFFERS))
        _sent(kind, first, done, "first")
        larger = buffers.take(DEVICE, [first.nbytes, 1])
        assert "first" in done and larger.nbytes == 2 * first.nbytes
        assert buffers.take(DEVICE, [1]) is second
