"""The C library's ``memcpy``, by addresses: to, from, how many bytes."""

from __future__ import annotations

import ctypes

# Not ctypes.memmove, which makes an int of the pointer it returns. Other threads run meanwhile.
memcpy = ctypes.CDLL(None).memcpy
# Holding Python's lock, for small copies: else each of them would have to win it back.
memcpy_holding = ctypes.PyDLL(None).memcpy
for _function in (memcpy, memcpy_holding):
    _function.restype = None
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def address_of(data: memoryview) -> int:
    """Where the bytes of ``data`` are, which must be writable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
