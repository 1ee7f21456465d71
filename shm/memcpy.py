"""Copies by address: one, with the C library's ``memcpy``, and many, from one piece of a file to where its parts go."""

from __future__ import annotations

import ctypes
import operator
from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate, pairwise
from typing import NamedTuple

# Arguments: to, from, how many bytes. Not ctypes.memmove, which makes an int of the pointer it returns. Other threads
# run meanwhile.
memcpy = ctypes.CDLL(None).memcpy
# This one keeps Python's lock, for small copies: else each of them would have to wait to get it back.
memcpy_holding = ctypes.PyDLL(None).memcpy
for _function in (memcpy, memcpy_holding):
    _function.restype = None
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

# Arguments: one, the other, how many bytes. 0: they are the same.
memcmp = ctypes.CDLL(None).memcmp
memcmp.restype = ctypes.c_int
memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

# Copies of so many bytes let go of Python's lock, so that several threads copy.
_COPY_ALONE_BYTES = 256 << 10
# Copied one by one.
_FEW = 8


def address_of(data: memoryview) -> int:
    """The address of the bytes of ``data``, which must be writable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def memory_at(address: int, nbytes: int) -> memoryview:
    """The ``nbytes`` at ``address``, to be written; whoever asks keeps the memory."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class Destination(NamedTuple):
    """Where the bytes from ``begin`` to ``end`` of a file go: to the memory at ``address``."""

    begin: int
    end: int
    address: int


class Destinations:
    """The memory that parts of a file go to, as columns, because there may be 100,000.

    Whoever makes this keeps the memory. ``fill`` is safe to call on several threads for different parts of the file.
    """

    def __init__(self, begins: list[int], ends: list[int], addresses: list[int]) -> None:
        """Take the columns.

        Args:
            begins: The first byte of each part, in rising order. Parts may overlap.
            ends: The end of each part; none is empty.
            addresses: Where each part goes.
        """
        self._begins = begins
        self._ends = ends
        self._addresses = addresses
        # Tied tensors have the same bytes, and boxes may lie in each other: then what is between two may stick out.
        self._overlap = any(map(operator.lt, begins[1:], ends))
        self._reach = list(accumulate(ends, max)) if self._overlap else ends
        order = sorted(range(len(begins)), key=addresses.__getitem__)
        self.tied = any(addresses[b] < addresses[a] + ends[a] - begins[a] for a, b in pairwise(order))
        """Whether some go to the same memory: they are to be filled one after the other."""

    def only(self, begin: int, end: int) -> Destination | None:
        """The one destination of all that has one from ``begin`` to ``end``; None: there is none, or several."""
        first, last = self._touched(begin, end)
        if self.tied or last != first + 1:  # what is checked there must not be written by others
            return None
        return Destination(self._begins[first], self._ends[first], self._addresses[first])

    def fill(self, begin: int, data: memoryview) -> None:
        """Copy what of ``data``, which stands at ``begin`` in the file, has a destination."""
        if not data:
            return
        begins, ends, addresses = self._begins, self._ends, self._addresses
        end = begin + len(data)
        first, last = self._touched(begin, end)
        if first >= last:
            return
        source = address_of(data) - begin
        # In C all that can be: of 100,000 small ones each microsecond would be a tenth of a second.
        low = first if self._overlap or last - first < _FEW else first + 1
        high = low if self._overlap or last - first < _FEW else last - 1
        deque(
            map(
                memcpy_holding,
                addresses[low:high],
                map(source.__add__, begins[low:high]),
                map(operator.sub, ends[low:high], begins[low:high]),
            ),
            maxlen=0,
        )
        for number in (*range(first, low), *range(high, last)):
            inner_begin, inner_end = max(begins[number], begin), min(ends[number], end)
            nbytes = inner_end - inner_begin
            if nbytes > 0:
                copy = memcpy if nbytes >= _COPY_ALONE_BYTES else memcpy_holding
                copy(addresses[number] + inner_begin - begins[number], source + inner_begin, nbytes)

    def _touched(self, begin: int, end: int) -> tuple[int, int]:
        """Those that have to do with a part of the file, first and last + 1; with an overlap, some that have not."""
        return bisect_right(self._reach, begin), bisect_left(self._begins, end)
