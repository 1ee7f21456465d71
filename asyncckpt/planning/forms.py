"""The forms of tensors, their dtypes, shapes and layouts, which are compared on every save; and where they are."""

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

from asyncckpt.shm.compiled import compiled

PlainForm: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of a plain tensor."""

_form = attrgetter("dtype", "shape", "layout")
_dense_form = attrgetter("dtype", "shape")
_NAME = b"dlpack_exchange_api"
_VERSION = 1

_SHARD_ATTRIBUTES = ("global_offsets", "global_shape", "local_offsets", "local_sizes")


def has_shards(value: object) -> bool:
    """Whether ``value`` says of itself which parts of a larger tensor it holds: torch's ``CheckpointableTensor``, which
    may be a plain tensor with attributes.
    """
    return all(map(hasattr, repeat(value), _SHARD_ATTRIBUTES))


def is_partial(value: object) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor of which each rank has only a summand, or the like."""
    return isinstance(value, DTensor) and any(each.is_partial() for each in value.placements)


def shards_in(values: Sequence[object]) -> list[int]:
    """The positions of those of ``values`` that do, in C for all others: 0.02 us a value."""
    suspects = compress(range(len(values)), map(hasattr, values, repeat(_SHARD_ATTRIBUTES[0])))
    return [number for number in suspects if has_shards(values[number])]


class Forms:
    """Those of some strided tensors; and which of them say that they are parts of a larger one.

    They are compared in one pass that makes nothing: 0.1 us a tensor, or 0.35 where nothing was compiled, or torch is
    older than 2.10.
    """

    devices: object | None = None
    """Another object whenever one of those last compared may be on another device than in the comparison before; None:
    nobody looked.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take them from ``tensors``."""
        self._forms = list(map(_form, tensors))
        self._shards = shards_in(tensors)
        self._described = None if self._shards else _described(list(tensors))
        self._on = array("q", bytes(8 * len(tensors)))

    def are_those_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors`` have them too."""
        if len(tensors) != len(self._forms):
            return False
        if self._described is not None and self._are_whole_and_as(tensors, self._described):
            return True
        self.devices = None
        return all(map(eq, map(_form, tensors), self._forms)) and shards_in(tensors) == self._shards

    def _are_whole_and_as(self, tensors: Sequence[torch.Tensor], described: array[int]) -> bool:
        """Whether they are as ``described``, as many, and none is a part; not, too, where that cannot be said."""
        if (exchange := _exchange()) is None:
            return False
        tensors = tensors if isinstance(tensors, list) else list(tensors)
        moved = ctypes.c_uint64(0)
        expected = described.buffer_info()[0], _SHARD_ATTRIBUTES[0], self._on.buffer_info()[0], ctypes.addressof(moved)
        try:
            done = exchange.compared(exchange.describe, tensors, len(tensors), *expected)
        except Exception:  # one has become such that DLPack does not know it
            return False
        if moved.value or self.devices is None:
            self.devices = object()
        return done == len(tensors)


class PlainAddresses:
    """Where tensors are of which the values are their bytes, call for call.

    That takes 0.05 us a tensor. To ask a tensor whether its values are the negatives of its bytes takes 0.1, and more
    where other threads want Python's lock: torch lets go of it for that. So those are not asked again that were asked
    in the call before, the same objects at the same addresses; but for single numbers, as a view of an imaginary part
    (``x.conj().imag``) that has more does not have them in a row, and for complex ones.
    """

    def __init__(self, sizes: Sequence[int], *, may_be_conjugate: bool = False, on_host: bool = True) -> None:
        """Know of none yet.

        Args:
            sizes: How many elements each has.
            may_be_conjugate: One may be complex.
            on_host: Whether they have to be there; else they may be on any device.
        """
        self._count = len(sizes)
        self._singles = [number for number, size in enumerate(sizes) if size == 1]
        self._may_be_conjugate, self._on_host = may_be_conjugate, on_host
        self._known = array("Q", bytes(16 * self._count))  # of each the object, and its address
        self._are_plain = False

    def of(self, tensors: Sequence[torch.Tensor]) -> array[int] | None:
        """Where the bytes of ``tensors`` begin; None where one is not on the host, or its elements are not in a row, or
        not its bytes.

        Raises ``ValueError`` if there are more or less of them.
        """
        if len(tensors) != self._count:
            raise ValueError(f"there are {len(tensors)} tensors, and not {self._count}")
        were_plain, self._are_plain = self._are_plain, False  # should this be interrupted
        found, are_new = _located(tensors, None, self._known, on_host=self._on_host)
        if found is None:
            return None
        asked = tensors
        if were_plain and not self._may_be_conjugate:
            asked = [*compress(tensors, are_new), *(tensors[number] for number in self._singles)]
        self._are_plain = are_plain(asked, may_be_conjugate=self._may_be_conjugate)
        return found if self._are_plain else None


def plain_addresses(tensors: Sequence[torch.Tensor], forms: Sequence[PlainForm]) -> array[int] | None:
    """Where plain tensors are.

    Args:
        tensors: They are strided, on any device.
        forms: What dtype and shape each is to have; those that have the same share one tuple.

    Returns:
        Where the bytes of each begin; None where one has another form, is not on the host, or has no elements in a row,
        or not its bytes.
    """
    found, _ = _located(tensors, forms, array("Q", bytes(16 * len(tensors))), on_host=True)
    may_be_conjugate = any(dtype.is_complex for dtype, _ in _distinct(forms).values())
    return found if found is not None and are_plain(tensors, may_be_conjugate=may_be_conjugate) else None


def are_plain(tensors: Sequence[torch.Tensor], *, may_be_conjugate: bool) -> bool:
    """Whether the values of contiguous ``tensors`` are their bytes, of which one may be complex."""
    if any(map(torch.Tensor.is_neg, tensors)):
        return False
    return not (may_be_conjugate and any(map(torch.Tensor.is_conj, tensors)))


def _located(
    tensors: Sequence[torch.Tensor], forms: Sequence[PlainForm] | None, known: array[int], *, on_host: bool
) -> tuple[array[int] | None, Sequence[int]]:
    """The addresses, if all have their elements in a row, and are on the host and of these ``forms``, if that is asked
    for; and for each whether it is another than ``known``, where that is noted.
    """
    are_new = bytearray(b"\1") * len(tensors)
    if (exchange := _exchange()) is not None:
        found, flags = array("Q", bytes(8 * len(tensors))), (ctypes.c_uint8 * len(tensors)).from_buffer(are_new)
        its = tensors if isinstance(tensors, list) else list(tensors)
        try:
            expected = None if forms is None else _as_described(forms)
            where = [None if each is None else each.buffer_info()[0] for each in (expected, found, known)]
            done = exchange.addresses(exchange.describe, its, len(its), *where, ctypes.addressof(flags), on_host)
        except Exception:  # of a dtype that DLPack does not know
            done = -1
        if done >= 0:
            return found if done == len(its) else None, are_new
    is_plain = all(map(torch.Tensor.is_contiguous, tensors))
    if on_host:
        is_plain = is_plain and all(map(attrgetter("is_cpu"), tensors))
    if not is_plain or not (forms is None or all(map(eq, map(_dense_form, tensors), forms))):
        return None, are_new
    return array("Q", map(torch.Tensor.data_ptr, tensors)), are_new


class _Exchange(NamedTuple):
    """``forms``, ``compared``, ``addresses``: of ``_forms.c``; ``describe``: the address of torch's own function."""

    forms: Callable[..., int]
    compared: Callable[..., int]
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
    forms, compared, addresses = library.asyncckpt_forms, library.asyncckpt_compared, library.asyncckpt_addresses
    forms.restype = compared.restype = addresses.restype = ctypes.c_ssize_t
    forms.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_ssize_t, ctypes.c_void_p]
    compared.argtypes = [*forms.argtypes, ctypes.py_object, *[ctypes.c_void_p] * 2]
    addresses.argtypes = [*forms.argtypes, *[ctypes.c_void_p] * 3, ctypes.c_int]
    library.asyncckpt_fetch_by(*_words())
    return _Exchange(forms, compared, addresses, header.describe)


def _words() -> tuple[int, int]:
    """Which word of a tensor's object refers to torch's own object, and which word of that to its storage; 0: it was
    not found.
    """
    tensor = torch.empty(1, device="cpu")
    implementation = tensor._cdata
    if (word := _word_of(implementation, id(tensor), torch.Tensor.__basicsize__ // 8)) == 0:
        return 0, 0
    return word, _word_of(tensor.untyped_storage()._cdata, implementation, 4)


def _word_of(wanted: int, address: int, count: int) -> int:
    words = (ctypes.c_uint64 * count).from_address(address)
    return next((number for number, word in enumerate(words) if word == wanted), 0)


def _described(tensors: list[torch.Tensor]) -> array[int] | None:
    """Their forms as numbers; None where they have none."""
    if (exchange := _exchange()) is None:
        return None
    found = array("q", bytes(8 * sum(2 + tensor.dim() for tensor in tensors)))
    try:
        done = exchange.forms(exchange.describe, tensors, len(tensors), found.buffer_info()[0])
    except Exception:  # of a dtype that DLPack does not know
        return None
    return found if done == len(tensors) else None


def _as_described(forms: Sequence[PlainForm]) -> array[int]:
    """The same of tensors that have ``forms``. Raises ``ValueError`` for a dtype that DLPack does not know."""
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
