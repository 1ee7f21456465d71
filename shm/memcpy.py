"""Copies by address: one, by the C library, and many at once, past the caches where what does that was compiled."""

from __future__ import annotations

import ctypes
import operator
import os
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import accumulate
from typing import Any, NamedTuple


def compiled(beside: str, name: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> Any:
    """A library of functions; None where it is not there.

    Args:
        beside: A file in the same folder.
        name: Of its source, without the ending.
        kind: Whether a call lets go of Python's lock (``CDLL``), or keeps it (``PyDLL``).
    """
    stem = os.path.join(os.path.dirname(beside), name)
    path = next(filter(os.path.exists, map(stem.__add__, EXTENSION_SUFFIXES)), None)
    return None if path is None else kind(path)


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


def _compiled() -> Callable[..., None] | None:
    """That of ``_copies.c``."""
    if (library := compiled(__file__, "_copies")) is None:
        return None
    function: Any = library.asyncckpt_copy_many
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    return function  # type: ignore[no-any-return]


_copy_many = _compiled()
IS_COMPILED = _copy_many is not None
"""Whether ``copy_many`` goes past the caches, and lets other threads of Python run."""


def copy_many(to: array[int], source: array[int], sizes: array[int]) -> None:
    """Copy ``sizes`` bytes from the addresses ``source`` to those in ``to``, each to each; all are of type "Q".

    It is meant for what nobody reads soon: it does not come into the caches.
    """
    if _copy_many is not None:
        _copy_many(*(each.buffer_info()[0] for each in (to, source, sizes)), len(to))
        return
    copy = memcpy if sizes and sum(sizes) >= _COPY_ALONE_BYTES * len(sizes) else memcpy_holding
    deque(map(copy, to, source, sizes), maxlen=0)


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

    def __init__(self, begins: Sequence[int], ends: Sequence[int], addresses: Sequence[int]) -> None:
        """Take the columns.

        Args:
            begins: The first byte of each part, in rising order. Parts may overlap.
            ends: The end of each part; none is empty.
            addresses: Where each part goes.
        """
        self._begins, self._ends, self._addresses = array("Q", begins), array("Q", ends), array("Q", addresses)
        # Tied tensors have the same bytes, and boxes may lie in each other: then what is between two may stick out.
        self._overlap = any(map(operator.lt, begins[1:], ends))
        self._reach = array("Q", accumulate(ends, max)) if self._overlap else self._ends
        # The first bytes in memory of each part and the ends, in rising order.
        firsts: Sequence[int] = addresses
        lasts: Sequence[int] = list(map(operator.add, addresses, map(operator.sub, ends, begins)))
        if any(map(operator.gt, firsts, firsts[1:])):
            firsts, lasts = zip(*sorted(zip(firsts, lasts, strict=True)), strict=True)
        self.tied = any(map(operator.lt, firsts[1:], lasts))
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
        # Of 100,000 small ones each microsecond would be a tenth of a second: only those at the edges, which may stick
        # out, are cut; where some overlap, any may.
        cut = range(first, last) if self._overlap else sorted({first, last - 1})
        to, froms, until = addresses[first:last], begins[first:last], ends[first:last]
        for number in cut:
            at = number - first
            froms[at] = min(max(begins[number], begin), end)
            until[at] = max(min(ends[number], end), froms[at])
            to[at] += froms[at] - begins[number]
        sizes = array("Q", map(operator.sub, until, froms))
        copy_many(to, array("Q", map((address_of(data) - begin).__add__, froms)), sizes)

    def _touched(self, begin: int, end: int) -> tuple[int, int]:
        """Those that have to do with a part of the file, first and last + 1; with an overlap, some that have not."""
        return bisect_right(self._reach, begin), bisect_left(self._begins, end)
