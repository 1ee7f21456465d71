"""Compare the forms of tensors on every save, and find their addresses. A form is a dtype, a shape and a layout."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import attrgetter, eq
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.errors import unless_interrupt
from asyncckpt.shm.memcpy import compiled

PlainForm: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of a plain tensor."""

_form = attrgetter("dtype", "shape", "layout")
_dense_form = attrgetter("dtype", "shape")
_NAME = b"dlpack_exchange_api"
_VERSION = 1

_SHARD_ATTRIBUTES = ("global_offsets", "global_shape", "local_offsets", "local_sizes")


def has_shards(value: object) -> bool:
    """Return whether ``value`` declares which parts of a larger tensor it holds.

    The value may be torch's ``CheckpointableTensor``, or a plain tensor with the same attributes.
    """
    return all(map(hasattr, repeat(value), _SHARD_ATTRIBUTES))


def is_partial(value: object) -> TypeGuard[DTensor]:
    """Return True for a DTensor with a ``Partial`` placement: each rank has only a summand of its values."""
    return isinstance(value, DTensor) and any(each.is_partial() for each in value.placements)


def shards_in(values: Sequence[object]) -> list[int]:
    """Return the positions of ``values`` with ``has_shards``. All other values are skipped in C, at 0.02 us each."""
    suspects = compress(range(len(values)), map(hasattr, values, repeat(_SHARD_ATTRIBUTES[0])))
    return [number for number in suspects if has_shards(values[number])]


class Forms:
    """The forms of some strided tensors, and the positions of tensors that declare themselves parts of a larger one.

    The forms are compared in one pass without new objects, at 0.1 us a tensor. Without the compiled code, or with a
    torch older than 2.10, the comparison takes 0.35 us a tensor.
    """

    devices: object | None = None
    """A token for the devices of the tensors that were compared last. None: their devices are unknown.

    A comparison replaces the token if a tensor may have moved since the comparison before.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the forms of ``tensors``."""
        self._forms = list(map(_form, tensors))
        self._shards = shards_in(tensors)
        self._described = None if self._shards else _described(list(tensors))
        self._on = array("q", bytes(8 * len(tensors)))

    def are_those_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` have the same forms."""
        if len(tensors) != len(self._forms):
            return False
        if self._described is not None and self._are_whole_and_as(tensors, self._described):
            return True
        self.devices = None
        return all(map(eq, map(_form, tensors), self._forms)) and shards_in(tensors) == self._shards

    def _are_whole_and_as(self, tensors: Sequence[torch.Tensor], described: array[int]) -> bool:
        """Return True if the tensors have the ``described`` forms, and none declares itself a part of a larger tensor.

        Return False also if the compiled code cannot tell. The caller has compared the number of tensors.
        """
        if (exchange := _exchange()) is None:
            return False
        tensors = tensors if isinstance(tensors, list) else list(tensors)
        moved = ctypes.c_uint64(0)
        expected = described.buffer_info()[0], _SHARD_ATTRIBUTES[0], self._on.buffer_info()[0], ctypes.addressof(moved)
        try:
            done = exchange.compared(exchange.describe, tensors, len(tensors), *expected)
        except unless_interrupt(Exception):  # a tensor now has properties that DLPack does not know
            return False
        if moved.value or self.devices is None:
            self.devices = object()
        return done == len(tensors)


def plain_addresses(
    tensors: Sequence[torch.Tensor],
    forms: Sequence[PlainForm] | None = None,
    *,
    on_host: bool = True,
    may_be_conjugate: bool = True,
) -> array[int] | None:
    """Return the addresses of plain tensors, at 0.05 us each.

    ``Tensor.is_neg`` takes 0.1 us, or longer if other threads wait for the GIL, because torch releases the GIL. So the
    compiled code reads torch's bits instead.

    Args:
        tensors: Strided tensors on any device.
        forms: The required dtype and shape of each tensor. Equal forms share one tuple. The default is any form.
        on_host: Whether the tensors must be on the host.
        may_be_conjugate: Whether a tensor may be complex.

    Returns:
        The addresses; None if a tensor has another form, is not on the host although ``on_host`` is set, is not
        contiguous, or is a lazy negative or conjugate, so that its values are not its bytes.
    """
    its = tensors if isinstance(tensors, list) else list(tensors)
    if (exchange := _exchange()) is not None:
        found = array("Q", bytes(8 * len(its)))
        try:
            expected = None if forms is None else _as_described(forms)
            where = [None if each is None else each.buffer_info()[0] for each in (expected, found)]
            done = exchange.addresses(exchange.describe, its, len(its), *where, on_host)
        except unless_interrupt(Exception):  # DLPack does not know the dtype of a tensor
            done = -1
        if 0 <= done < len(its):
            return None
        if done >= 0 and exchange.sees_lazy:
            return found
    is_as_asked = all(map(torch.Tensor.is_contiguous, its)) and are_plain(its, may_be_conjugate=may_be_conjugate)
    if on_host:
        is_as_asked = is_as_asked and all(map(attrgetter("is_cpu"), its))
    if not is_as_asked or not (forms is None or all(map(eq, map(_dense_form, its), forms))):
        return None
    return array("Q", map(torch.Tensor.data_ptr, its))


def are_plain(tensors: Sequence[torch.Tensor], *, may_be_conjugate: bool) -> bool:
    """Return whether the values of contiguous ``tensors`` are their bytes.

    ``may_be_conjugate``: whether a tensor may be complex.
    """
    if any(map(torch.Tensor.is_neg, tensors)):
        return False
    return not (may_be_conjugate and any(map(torch.Tensor.is_conj, tensors)))


class _Exchange(NamedTuple):
    """The functions that read tensors. ``forms``, ``compared`` and ``addresses`` are compiled from ``_forms.c``.

    ``describe``: the address of torch's function. ``sees_lazy``: ``addresses`` detects lazy negatives and conjugates.
    """

    forms: Callable[..., int]
    compared: Callable[..., int]
    addresses: Callable[..., int]
    describe: int
    sees_lazy: bool


class _Header(ctypes.Structure):
    """The first fields of ``DLPackExchangeAPI``."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("of_older", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("describe", ctypes.c_void_p),
    ]


@functools.cache
def _exchange() -> _Exchange | None:
    """Return the compiled functions. Return None if torch has no such interface, or nothing was compiled."""
    library = compiled(__file__, "_forms", ctypes.PyDLL)
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if library is None or capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    header = _Header.from_address(pointer(capsule, _NAME))
    if header.major != _VERSION or not header.describe:
        return None
    forms, compared, addresses = library.asyncckpt_forms, library.asyncckpt_compared, library.asyncckpt_addresses
    forms.restype = compared.restype = addresses.restype = ctypes.c_ssize_t
    forms.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_ssize_t, ctypes.c_void_p]
    compared.argtypes = [*forms.argtypes, ctypes.py_object, *[ctypes.c_void_p] * 2]
    addresses.argtypes = [*forms.argtypes, ctypes.c_void_p, ctypes.c_int]
    library.asyncckpt_learn.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    implementation, storage = _words()
    lazy_word, lazy_bits = _lazy_bits() if implementation else (0, 0)
    library.asyncckpt_learn(implementation, storage, lazy_word, lazy_bits)
    return _Exchange(forms, compared, addresses, header.describe, sees_lazy=lazy_bits != 0)


def _words() -> tuple[int, int]:
    """Return two positions of pointers, in words; 0 for a pointer that was not found.

    The first pointer is in the Python object of a tensor, and refers to torch's C++ object. The second one is in the
    C++ object, and refers to the storage.
    """
    tensor = torch.empty(1, device="cpu")
    implementation = tensor._cdata
    if (word := _word_of(implementation, id(tensor), torch.Tensor.__basicsize__ // 8)) == 0:
        return 0, 0
    return word, _word_of(tensor.untyped_storage()._cdata, implementation, 4)


def _word_of(wanted: int, address: int, count: int) -> int:
    words = (ctypes.c_uint64 * count).from_address(address)
    return next((number for number, word in enumerate(words) if word == wanted), 0)


def _lazy_bits() -> tuple[int, int]:
    """Return the position of a word in torch's C++ object, and the bits in it that mark a lazy negative or conjugate.

    Return zeros unless exactly two bits, in one word, change when torch marks a tensor as both.
    """
    tensor = torch.zeros(1, dtype=torch.complex64, device="cpu")
    words = (ctypes.c_uint64 * _WORDS).from_address(tensor._cdata)
    before = [*words]
    try:
        torch._C._set_conj(tensor, True)
        torch._C._set_neg(tensor, True)
    except AttributeError:  # a later torch may lack them
        return 0, 0
    changed = [(number, was ^ now) for number, (was, now) in enumerate(zip(before, words, strict=True)) if was != now]
    return changed[0] if len(changed) == 1 and changed[0][1].bit_count() == 2 else (0, 0)


_WORDS = 24  # the words of torch's C++ object that are searched; the object has some more


def _described(tensors: list[torch.Tensor]) -> array[int] | None:
    """Return the forms of ``tensors`` as numbers; None if the compiled code cannot describe one of them."""
    if (exchange := _exchange()) is None:
        return None
    found = array("q", bytes(8 * sum(2 + tensor.dim() for tensor in tensors)))
    try:
        done = exchange.forms(exchange.describe, tensors, len(tensors), found.buffer_info()[0])
    except unless_interrupt(Exception):  # DLPack does not know the dtype of a tensor
        return None
    return found if done == len(tensors) else None


def _as_described(forms: Sequence[PlainForm]) -> array[int]:
    """Return ``forms`` as ``_described`` does. Raises ``ValueError`` for a dtype that DLPack does not know."""
    described = {
        key: array("q", [_dtype_number(dtype), len(shape), *shape]).tobytes()
        for key, (dtype, shape) in _distinct(forms).items()
    }
    return array("q", b"".join(map(described.__getitem__, map(id, forms))))


def _distinct(forms: Sequence[PlainForm]) -> dict[int, PlainForm]:
    return dict(zip(map(id, forms), forms, strict=True))


@functools.cache
def _dtype_number(dtype: torch.dtype) -> int:
    if (described := _described([torch.empty((), dtype=dtype, device="cpu")])) is None:
        raise ValueError(f"DLPack does not know {dtype}")
    return described[0]
