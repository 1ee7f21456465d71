"""The buffers that loads to a device go through: whose turn it is, and what is waited for then."""

from __future__ import annotations

import pytest
import torch
from support.devices import TYPE, MadeUpDevices

from asyncckpt.loading.device_buffers import DeviceBuffer, DeviceBuffers

DEVICE = torch.device(TYPE, 0)


def _sent(kind: MadeUpDevices, buffer: DeviceBuffer, done: list[str], name: str) -> None:
    """Something is being sent from ``buffer``."""
    stream = kind.new_stream(DEVICE)
    stream.add(lambda: done.append(name))
    buffer._sent = {DEVICE: kind.record(stream)}


def test_one_is_read_into_while_the_other_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = MadeUpDevices()
    kind.install(monkeypatch)
    done: list[str] = []
    with DeviceBuffers() as buffers:
        first = buffers.take(DEVICE, [100, 7])
        assert [len(view) for view in first.views] == [100, 7]
        _sent(kind, first, done, "first")
        second = buffers.take(DEVICE, [50])
        assert second is not first and done == []
        _sent(kind, second, done, "second")
        assert buffers.take(DEVICE, [30, 30]) is first and "first" in done
        _sent(kind, first, done, "first again")
    assert sorted(done) == ["first", "first again", "second"]


def test_a_buffer_that_is_too_small_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = MadeUpDevices()
    kind.install(monkeypatch)
    done: list[str] = []
    with DeviceBuffers() as buffers:
        first, second = buffers.take(DEVICE, [100]), buffers.take(DEVICE, [100])
        _sent(kind, first, done, "first")
        larger = buffers.take(DEVICE, [first.nbytes, 1])
        assert "first" in done and larger.nbytes == 2 * first.nbytes
        assert buffers.take(DEVICE, [1]) is second and buffers.take(torch.device("cpu"), [1]) is larger
