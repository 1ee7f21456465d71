"""The forms of tensors, their dtypes, shapes and layouts, which are compared on every save; and where they are."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch

from asyncckpt.shm.compiled import compiled

_form = attrgetter("dtype", "shape", "layout")
_NAME = b"dlpack_exchange_api"
_VERSION = 1


class Forms:
    """Those of some strided tensors.

    They are compared in one pass that keeps nothing: 0.06 us a tensor, or 0.25 where nothing was compiled, or torch is
    older than 2.10.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take them from ``tensors``."""
        self._forms = list(map(_form, tensors))
        self._described = _described(list(tensors))

    def are_those_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors`` have them too."""
        if len(tensors) != len(self._forms):
            return False
        if self._described is not None and _are_as(tensors, self._described):
            return True
        return all(map(eq, map(_form, tensors), self._forms))


class PlainAddresses:
    """Where tensors are of which the values are their bytes, call for call.

    That takes 0.05 us a tensor. To ask a tensor whether its values are the negatives of its bytes takes 0.1, and more
    where other threads want Python's lock: torch lets go of it for that. So those are not asked again that were asked
    in the call before, the same objects at the same addresses; but for single numbers, as a view of an imaginary part
    (``x.conj().imag``) that has more does not have them in a row, and for complex ones.
    """

    def __init__(self, sizes: Sequence[int], *, may_be_conjugate: bool = False) -> None:
        """``sizes``: how many elements each has. ``may_be_conjugate``: one may be complex."""
        self._count = len(sizes)
        self._singles = [number for number, size in enumerate(sizes) if size == 1]
        self._may_be_conjugate = may_be_conjugate
        self._known = array("Q", bytes(16 * self._count))  # of each the object, and its address
        self._are_plain = False

    def of(self, tensors: Sequence[torch.Tensor]) -> array[int] | None:
        """Where the bytes of ``tensors`` begin; None where the elements of one are not in a row, or not its bytes.

        Raises ``ValueError`` if there are more or less of them.
        """
        if len(tensors) != self._count:
            raise ValueError(f"there are {len(tensors)} tensors, and not {self._count}")
        were_plain, self._are_plain = self._are_plain, False  # should this be interrupted
        found, are_known = self._located(tensors)
        if found is None:
            return None
        asked = tensors
        if are_known and were_plain and not self._may_be_conjugate:
            asked = [tensors[number] for number in self._singles]
        self._are_plain = are_plain(asked, may_be_conjugate=self._may_be_conjugate)
        return found if self._are_plain else None

    def _located(self, tensors: Sequence[torch.Tensor]) -> tuple[array[int] | None, bool]:
        """The addresses, if all have their elements in a row; and whether they are known."""
        if (exchange := _exchange()) is not None:
            found = array("Q", bytes(8 * len(tensors)))
            changed = ctypes.c_uint64(0)
            its = tensors if isinstance(tensors, list) else list(tensors)
            where = found.buffer_info()[0], self._known.buffer_info()[0], ctypes.addressof(changed)
            try:
                done = exchange.addresses(exchange.describe, its, len(its), *where)
            except Exception:  # of a dtype that DLPack does not know
                done = -1
            if done >= 0:
                return found if done == len(its) else None, changed.value == 0
        if not all(map(torch.Tensor.is_contiguous, tensors)):
            return None, False
        return array("Q", map(torch.Tensor.data_ptr, tensors)), False


def plain_addresses(tensors: Sequence[torch.Tensor], *, may_be_conjugate: bool) -> array[int] | None:
    """The same for one call."""
    return PlainAddresses([0] * len(tensors), may_be_conjugate=may_be_conjugate).of(tensors)


def are_plain(tensors: Sequence[torch.Tensor], *, may_be_conjugate: bool) -> bool:
    """Whether the values of contiguous ``tensors`` are their bytes, of which one may be complex."""
    if any(map(torch.Tensor.is_neg, tensors)):
        return False
    return not (may_be_conjugate and any(map(torch.Tensor.is_conj, tensors)))


class _Exchange(NamedTuple):
    """``forms``, ``addresses``: those of ``_forms.c``; ``describe``: the address of torch's own function."""

    forms: Callable[..., int]
    addresses: Callable[..., int]
    describe: int


class _Header(ctypes.Structure):
    """``DLPackExchangeAPI`` up to what is needed of it."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("of_older", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("describe", ctypes.c_void_p),
    ]


@functools.cache
def _exchange() -> _Exchange | None:
    """None: torch has none, or nothing was compiled."""
    library = compiled(__file__, "_forms", ctypes.PyDLL)
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if library is None or capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    header = _Header.from_address(pointer(capsule, _NAME))
    if header.major != _VERSION or not header.describe:
        return None
    forms: Any = library.asyncckpt_forms
    addresses: Any = library.asyncckpt_addresses
    forms.restype = addresses.restype = ctypes.c_ssize_t
    forms.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p]
    addresses.argtypes = [*forms.argtypes, ctypes.c_void_p]
    return _Exchange(forms, addresses, header.describe)


def _described(tensors: list[torch.Tensor]) -> array[int] | None:
    """Their forms as numbers; None where they have none."""
    if (exchange := _exchange()) is None:
        return None
    found = array("q", bytes(8 * sum(2 + tensor.dim() for tensor in tensors)))
    try:
        done = exchange.forms(exchange.describe, tensors, len(tensors), None, found.buffer_info()[0])
    except Exception:  # of a dtype that DLPack does not know
        return None
    return found if done == len(tensors) else None


def _are_as(tensors: Sequence[torch.Tensor], described: array[int]) -> bool:
    """Whether they are as ``described``, as many; not, too, where that cannot be said."""
    if (exchange := _exchange()) is None:
        return False
    tensors = tensors if isinstance(tensors, list) else list(tensors)
    try:
        done = exchange.forms(exchange.describe, tensors, len(tensors), described.buffer_info()[0], None)
    except Exception:  # one has become such that DLPack does not know it
        return False
    return done == len(tensors)
