"""Test that the simulated device turns a mistake into an error that tests notice."""

from __future__ import annotations

import ctypes
import signal

import pytest
import torch
from support import accelerators, simulated_device
from support.accelerators import busy, module
from support.checkpoints import PAGE
from support.ranks import alone

from asyncckpt.shm.segment import Segment

pytestmark = [
    pytest.mark.device,
    pytest.mark.usefixtures("forkserver"),
    pytest.mark.skipif(accelerators.CHOICE != simulated_device.TYPE, reason="the tests run on a real device"),
]


def _touch() -> None:
    tensor = torch.ones(10, device=accelerators.load())
    ctypes.string_at(tensor.data_ptr(), 4)


def test_the_host_cannot_touch_its_memory(device_type: str) -> None:
    assert alone(_touch) == (-signal.SIGSEGV, None)


def test_who_does_not_wait_reads_too_early(device_type: str) -> None:
    tensor = torch.zeros(10, device=device_type)
    module().synchronize()
    busy(0.2)
    tensor.fill_(1)
    with module().stream(module().Stream(device_type)):
        assert float((tensor * 1).sum()) == 0
        module().current_stream().wait_stream(module().default_stream())
        assert float((tensor * 1).sum()) == 10


def test_what_is_freed_is_poison_to_other_streams(device_type: str) -> None:
    stream = module().Stream(device_type)
    tensor = torch.ones(1000, device=device_type)
    stream.wait_stream(module().current_stream())
    with module().stream(stream):
        busy(0.2)
        copy = torch.empty_like(tensor).copy_(tensor)
    address = tensor.data_ptr()
    del tensor
    module().synchronize()
    assert bool((copy != 1).all())
    assert torch.empty(1000, device=device_type).data_ptr() == address


def test_the_driver_knows_what_is_registered(device_type: str) -> None:
    runtime = module().cudart()
    tensor = torch.ones(PAGE, dtype=torch.uint8, device=device_type)
    with Segment.create("asyncckpt-test", 4 * PAGE) as segment:
        segment.touch()
        assert runtime.cudaHostRegister(segment.address, PAGE, 0xFFFF) == 1
        with pytest.raises(RuntimeError, match="error: 1"):
            tensor.fill_(2)
        assert [runtime.cudaHostRegister(segment.address + at, PAGE, 1) for at in (0, PAGE, 0)] == [0, 0, 712]
        whole = torch.frombuffer(segment.view, dtype=torch.uint8)
        busy(0.1)  # launches no kernel, and so clears no error
        with pytest.raises(RuntimeError, match="error: 712"):
            tensor.fill_(3)
        with pytest.raises(RuntimeError, match="across"):
            whole[100 : PAGE + 100].copy_(tensor, non_blocking=True)
        busy(0.1)
        whole[:PAGE].copy_(tensor, non_blocking=True)
        assert int(whole[0]) == 0
        module().synchronize()
        assert int(whole[0]) == 1
        assert [runtime.cudaHostUnregister(segment.address + at) for at in (0, PAGE, 0)] == [0, 0, 713]
        with pytest.raises(RuntimeError, match="error: 713"):
            tensor.fill_(4)
        del whole


def test_a_graph_is_replayed(device_type: str) -> None:
    tensor, graph = torch.zeros(10, device=device_type), module().Graph()
    with graph.capture():
        assert module().is_current_stream_capturing()
        tensor.add_(1)
    assert float(tensor[0]) == 0
    for _ in range(3):
        graph.replay()
    assert float(tensor[0]) == 3
