"""Test pinning with a fake driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.checkpoints import PAGE
from support.devices import TYPE, MadeUpDevices

from asyncckpt.devices.pinned import PinnedMemory
from asyncckpt.devices.pinners import AscendPinner, CudaPinner
from asyncckpt.errors import CheckpointError
from asyncckpt.shm.segment import Segment


class _Driver:
    """A fake of ``cudaHostRegister`` and ``cudaHostUnregister`` that notes the calls."""

    def __init__(self, answers: Sequence[int] = ()) -> None:
        self.answers = list(answers)
        self.registered: list[int] = []
        self.taken_back: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1 and address % PAGE == 0 and nbytes % PAGE == 0
        code = self.answers.pop(0) if self.answers else 0
        if code == 0:
            self.registered.append(address)
        return code

    def cudaHostUnregister(self, address: int) -> int:
        self.taken_back.append(address)
        return 0


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list with one entry for each driver error that was cleared from the thread."""
    found: list[bool] = []

    def launch(*_: Any, **__: Any) -> None:
        found.append(True)
        raise RuntimeError("CUDA error: that of before")

    monkeypatch.setattr(torch, "ones", launch)
    monkeypatch.setattr(CudaPinner, "limit", 4 * PAGE)
    kind = MadeUpDevices()
    kind.pinner = CudaPinner()
    kind.install(monkeypatch)
    return found


def _pin(segment: Segment, driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return PinnedMemory(segment, [PAGE * 3, PAGE * 5, PAGE * 6], torch.device(TYPE, 0))


def test_memory_is_pinned_in_ranges_and_taken_back(monkeypatch: pytest.MonkeyPatch, forgotten: list[bool]) -> None:
    with Segment.create("asyncckpt-test", 8 * PAGE) as segment:
        memory = _pin(segment, driver := _Driver(), monkeypatch)
        assert [address - segment.address for address in driver.registered] == [0, 3 * PAGE, 6 * PAGE]
        assert memory.addresses == driver.registered
        memory.close()
        memory.close()
        assert sorted(driver.taken_back) == driver.registered and not forgotten


def test_what_cannot_be_pinned_is_told_and_leaves_no_error(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with Segment.create("asyncckpt-test", 8 * PAGE) as segment:
        memory = _pin(segment, driver := _Driver([0, 2, 2, 2]), monkeypatch)
        assert f"{TYPE} error 2" in caplog.text and f"{3 * PAGE} of {8 * PAGE} bytes" in caplog.text
        assert len(driver.registered) == 2 and forgotten == [True] * 3
        memory.close()
        assert sorted(driver.taken_back) == driver.registered


def test_what_is_refused_whole_is_pinned_in_halves(monkeypatch: pytest.MonkeyPatch, forgotten: list[bool]) -> None:
    with Segment.create("asyncckpt-test", 8 * PAGE) as segment:
        memory = _pin(segment, driver := _Driver([0, 1]), monkeypatch)
        assert [(address - segment.address) // PAGE for address in driver.registered] == [0, 3, 5, 6]
        memory.close()
        assert sorted(driver.taken_back) == driver.registered


def test_what_was_pinned_where_the_memory_is_now(monkeypatch: pytest.MonkeyPatch, forgotten: list[bool]) -> None:
    """The driver has stale pages at this address: they are unregistered, or nothing is copied there."""
    with Segment.create("asyncckpt-test", 8 * PAGE) as segment:
        memory = _pin(segment, driver := _Driver([712]), monkeypatch)
        assert driver.taken_back == [segment.address] and len(driver.registered) == 3 and forgotten == [True]
        memory.close()
        with pytest.raises(CheckpointError, match="unmapped while pinned"):
            _pin(segment, driver := _Driver([0, 712, 712]), monkeypatch)
        assert driver.registered == [segment.address] and segment.address in driver.taken_back


def test_after_a_failure_the_next_call_begins_anew(monkeypatch: pytest.MonkeyPatch, forgotten: list[bool]) -> None:
    """Otherwise later copies would go to stale pages of the driver."""
    with Segment.create("asyncckpt-test", 8 * PAGE) as segment:
        driver = _Driver()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        memory = PinnedMemory(segment, [PAGE * 3, PAGE * 6], torch.device(TYPE, 0), 3 * PAGE)
        driver.answers = [712, 712]
        for _ in range(2):
            with pytest.raises(CheckpointError, match="unmapped while pinned"):
                memory.extend(6 * PAGE)
            assert not memory.addresses
            driver.answers = [0, 712, 712]
        driver.answers, driver.registered = [], []
        memory.extend(3 * PAGE)
        memory.extend(6 * PAGE)
        memory.extend(6 * PAGE)
        assert [address - segment.address for address in driver.registered] == [0, 3 * PAGE]
        memory.close()


@pytest.mark.parametrize("device", ["cpu", TYPE])
def test_nothing_is_pinned_where_there_is_no_such_thing(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    MadeUpDevices().install(monkeypatch)
    with Segment.create("asyncckpt-test", PAGE) as segment:
        memory = PinnedMemory(segment, [], torch.device(device))
        assert not memory.addresses
        memory.close()


def test_a_driver_that_refuses_all_is_not_asked_for_each_piece(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver([2] * 10_000))
    with Segment.create("asyncckpt-test", 2000 * PAGE) as segment:
        memory = PinnedMemory(segment, range(0, 2000 * PAGE, PAGE), torch.device(TYPE, 0))
        assert not memory.addresses and f"{2000 * PAGE} of {2000 * PAGE} bytes" in caplog.text
        assert len(forgotten) < 600
        memory.close()


def test_a_host_without_ascend_s_library_is_refused() -> None:
    assert AscendPinner().register(0, PAGE) != 0
