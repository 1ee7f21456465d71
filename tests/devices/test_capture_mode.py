"""Test the capture mode with a fake runtime."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from asyncckpt.devices import capture_mode, runtime
from asyncckpt.devices.capture_mode import relaxed
from asyncckpt.devices.kinds import KINDS
from asyncckpt.devices.runtime import runtime_call


class _Runtime:
    """A fake runtime with the mode of one thread. ``code`` is the result of its calls."""

    def __init__(self, code: int = 0) -> None:
        self.mode, self.code = 0, code

    def exchange(self, pointer: Any) -> int:
        if self.code == 0:
            given = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))
            given[0], self.mode = self.mode, given[0]
        return self.code


def _not_found(name: str, mode: int) -> None:
    raise OSError(name)


@pytest.mark.parametrize("raises", [False, True])
def test_the_mode_is_changed_and_given_back(monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    made = _Runtime()
    monkeypatch.setattr(capture_mode, "runtime_call", lambda _: made.exchange)
    for before in (0, 1, 2):
        made.mode = before
        try:
            with relaxed():
                assert made.mode == 2
                if raises:
                    raise KeyError
        except KeyError:
            assert raises
        assert made.mode == before


def test_a_runtime_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _Runtime(code=1)
    monkeypatch.setattr(capture_mode, "runtime_call", lambda _: made.exchange)
    with relaxed():
        assert made.mode == 0


@pytest.mark.parametrize(("cuda", "hip"), [("99.9", None), (None, "99.9"), (None, None)])
def test_without_a_runtime_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, hip: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", _not_found)
    for cached in (runtime._library, runtime_call):
        cached.cache_clear()
    try:
        with relaxed():
            assert runtime_call("ThreadExchangeStreamCaptureMode") is None
        assert runtime.cuda_copy_many(0) is None
    finally:
        for cached in (runtime._library, runtime_call):
            cached.cache_clear()


def test_devices_of_cuda_are_used_so() -> None:
    assert KINDS["cuda"]._relaxed is relaxed  # type: ignore[attr-defined]
