"""Test CUDA's call for many copies with a fake runtime. The arguments are as in CUDA's headers."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asyncckpt.devices import runtime
from asyncckpt.devices.runtime import cuda_copy_many

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_BEFORE_13 = ctypes.CFUNCTYPE(ctypes.c_int, *[_POINTER] * 3, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER)
_FROM_13 = ctypes.CFUNCTYPE(ctypes.c_int, *[_POINTER] * 3, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER)


class _Runtime:
    """A fake runtime that notes the copies. ``code`` is the result of its calls."""

    def __init__(self, version: str) -> None:
        self.code, self.driver, self.can_use, self.errors_taken = 0, 13000, 1, 0
        self.copies: list[tuple[int, int, int]] = []
        self.attributes: tuple[int, ...] = ()
        self.stream: int | None = 0
        kind = _BEFORE_13 if version.startswith("12.") else _FROM_13
        self._call = kind(self._copy_before_13 if version.startswith("12.") else self._copy)

    def _copy(
        self, to: int, source: int, sizes: int, count: int, attributes: int, firsts: int, its: int, *rest: Any
    ) -> int:
        columns = [(ctypes.c_uint64 * count).from_address(each) for each in (to, source, sizes)]
        self.copies += zip(*columns, strict=True)
        self.attributes = tuple((ctypes.c_int * 6).from_address(attributes))
        assert its == 1 and _SIZE.from_address(firsts).value == 0
        self.stream = rest[-1]
        return self.code

    def _copy_before_13(self, *given: Any) -> int:
        assert _SIZE.from_address(given[-2]).value == 0  # the index of the failed copy
        return self._copy(*given)

    def call(self, name: str) -> Callable[..., int] | None:
        calls: dict[str, Callable[..., int]] = {
            "MemcpyBatchAsync": self._call,
            "GetLastError": self._take_error,
            "DriverGetVersion": lambda found: self._answer(found, self.driver),
            "DeviceGetAttribute": lambda found, what, index: self._answer(found, self.can_use * (what.value == 91)),
        }
        return calls.get(name)

    def _take_error(self) -> int:
        self.errors_taken += 1
        return self.code

    def _answer(self, found: Any, value: int) -> int:
        found._obj.value = value
        return 0


@pytest.fixture(params=["12.8", "13.0"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Runtime]:
    its = _Runtime(request.param)
    monkeypatch.setattr(torch.version, "cuda", request.param)
    monkeypatch.setattr(runtime, "runtime_call", its.call)
    monkeypatch.delenv("ASYNC_CKPT_COPY_MANY", raising=False)
    yield its


def test_many_copies_by_one_call(made: _Runtime) -> None:
    copy_many = cuda_copy_many(0)
    assert copy_many is not None
    columns = array("Q", [1 << 40, 2 << 40]), array("Q", [3 << 40, 4 << 40]), array("Q", [5, 6 << 30])
    assert copy_many(1 << 45, *columns) == 0
    assert made.copies == [(1 << 40, 3 << 40, 5), (2 << 40, 4 << 40, 6 << 30)]
    assert made.stream == 1 << 45 and made.attributes == (1, 0, 0, 0, 0, 0)  # the copies run in stream order
    assert made.errors_taken == 0


def test_an_error_is_returned_and_not_left_to_the_next_launch(made: _Runtime) -> None:
    copy_many = cuda_copy_many(0)
    made.code = 1
    assert copy_many is not None and copy_many(1, *(array("Q", [8]) for _ in range(3))) == 1
    assert made.errors_taken == 1


@pytest.mark.parametrize("lacks", ["driver", "can_use", "switch"])
def test_where_there_is_no_such_call(made: _Runtime, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks == "switch":
        monkeypatch.setenv("ASYNC_CKPT_COPY_MANY", "0")
    else:
        setattr(made, lacks, {"driver": 12020, "can_use": 0}[lacks])
    assert cuda_copy_many(0) is None
