"""Small values beside the tensors: step counters, learning rates, names, and whatever else pickles.

DCP pickles each of them on every save. Here a value that is what it was is not pickled again. More bytes are reserved
for each in the image than it takes, filled up with zeros, so that a changed value moves no other byte. The pickle is
``torch.save``'s older form, which ``torch.load`` reads just the same, and without a look at the zeros behind it (a zip
would have to end with its directory).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.layout import Place
from asyncckpt.planning.structure import StructureChanged, is_leaf
from asyncckpt.worker.archive import LOCAL_MAGIC

# The longest comment that a zip can end with.
_COMMENT_BYTES = 0xFFFF

_EXACT = frozenset({int, bool, str, bytes, type(None)})
"""Where values of these types are equal, and of one type, they are the same."""
_SCALARS = _EXACT | {float}


class Raw(bytes):
    """Bytes that a user's own planner made; they are stored as they are.

    For a zip, as ``torch.save`` makes it and Megatron-LM's planner hands it over, more is reserved than it takes: what
    is left becomes the zip's comment. For any others exactly their own length is reserved.
    """

    def _is_zip(self) -> bool:
        return self.startswith(LOCAL_MAGIC) and self[-22:-18] == b"PK\5\6" and self[-2:] == b"\0\0"

    def reserve(self) -> int:
        """How many bytes to reserve."""
        return len(self) + min(_COMMENT_BYTES, max(1024, len(self))) if self._is_zip() else len(self)

    def fits(self, reserved: int) -> bool:
        """Whether they can fill ``reserved`` bytes."""
        unused = reserved - len(self)
        return unused == 0 or (0 < unused <= _COMMENT_BYTES and self._is_zip())

    def filled(self, reserved: int) -> bytes:
        """They, and what fills up ``reserved`` bytes."""
        unused = reserved - len(self)
        return self[:-2] + unused.to_bytes(2, "little") + bytes(unused) if unused else self


def _is_constant(value: object) -> bool:
    """Whether ``value`` cannot change inside."""
    return type(value) in _SCALARS or (type(value) is tuple and _are_constant(value))


def _are_constant(values: Sequence[Any]) -> bool:
    return {*map(type, values)} <= _SCALARS or all(map(_is_constant, values))


def _kept(value: Any) -> Any:
    """What to keep of ``value`` to compare with: itself, if it cannot change inside; of a list of such, as optimizers
    have of the names of all parameters, a copy; of others None.
    """
    if type(value) is list:
        return value.copy() if _are_constant(value) else None
    return value if _is_constant(value) else None


def _pickled(name: str, value: object) -> bytes:
    """The bytes of one object. Raises ``UnsavableStateError`` naming it."""
    if isinstance(value, Raw):
        return value
    if value is None or _kept(value) is not None:
        return _BEFORE + pickle.dumps(value, protocol=_PROTOCOL) + _AFTER
    return _saved(name, value)


def _saved(name: str, value: object) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, _use_new_zipfile_serialization=False)
    except Exception as error:  # whatever the value's own code raises
        raise UnsavableStateError(
            f"the value of {name!r}, a {type(value).__qualname__}, cannot be pickled: {type(error).__name__}: {error};"
            " leave it out of the state dict, or give it a __getstate__ that drops what does not pickle"
        ) from error
    return buffer.getvalue()


# What torch.save puts around the pickle of a value without tensors, ten times as slowly.
_PROTOCOL = 2
_BEFORE, _AFTER = _saved("", "asyncckpt").split(pickle.dumps("asyncckpt", protocol=_PROTOCOL))
_NONE = _pickled("None", None)


def bytes_to_reserve(nbytes: int) -> int:
    """How many bytes to reserve for an object that takes ``nbytes`` now."""
    return -(-(nbytes + max(64, nbytes // 4)) // 64) * 64


class StoredObjects:
    """The objects of one plan: their last values, their bytes, and what each slot has of them."""

    def __init__(self, names: Sequence[str], values: Sequence[Any], reserved: Sequence[int] | None = None) -> None:
        """Pickle values.

        Args:
            names: Theirs.
            values: To be pickled.
            reserved: The bytes to reserve for each; None: as they need it.

        Raises:
            UnsavableStateError: One does not pickle.
            StructureChanged: One does not fit what is to be reserved for it.
        """
        self._names = names
        self._known = list(map(_kept, values))
        self._bytes = list(map(_pickled, names, values))
        needed = [data.reserve() if isinstance(data, Raw) else bytes_to_reserve(len(data)) for data in self._bytes]
        self.reserved = needed if reserved is None else reserved
        """The bytes reserved for each."""
        for name, data, room in zip(names, self._bytes, self.reserved, strict=True):
            _check_fits(name, data, room)
        # For each slot that was written to, the numbers of the objects that have changed since.
        self._stale: dict[int, set[int]] = {}

    def own_pickles(self) -> Iterator[tuple[str, bytes]]:
        """The names and the bytes of those that pickled by code of their own, as classes and arrays do."""
        for name, data, known in zip(self._names, self._bytes, self._known, strict=True):
            if known is None and not isinstance(data, Raw) and data != _NONE:
                yield name, data

    def forget_slots(self) -> None:
        """The slots are in other memory now, which has nothing of the objects."""
        self._stale.clear()

    def refresh(self, values: Sequence[Any]) -> None:
        """Take the ``values`` of a new save, pickling those that changed.

        Raises ``StructureChanged`` if one no longer fits the bytes reserved for it or is no longer a leaf,
        ``UnsavableStateError`` if one does not pickle; then nothing is taken.
        """
        changed: list[tuple[int, Any, bytes]] = []
        for number, (new, known) in enumerate(zip(values, self._known, strict=True)):
            # Unchanged, for most values at a glance; of the others only what was kept is compared at all.
            if new is known:
                if new is not None or self._bytes[number] == _NONE:
                    continue
            elif type(new) is type(known) and _same(new, known):
                continue
            elif not is_leaf(new):
                raise StructureChanged(f"{self._names[number]} is now a {type(new).__name__} with tensors or a mapping")
            data = _pickled(self._names[number], new)
            if data != self._bytes[number]:
                _check_fits(self._names[number], data, self.reserved[number])
                changed.append((number, new, data))
        for number, new, data in changed:
            # In this order: whatever interrupts this, no value is known of which other bytes are kept.
            self._known[number] = None
            for stale in self._stale.values():
                stale.add(number)
            self._bytes[number] = data
            self._known[number] = _kept(new)

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """Bring the objects in a slot up to what was last captured.

        Args:
            slot: The number of the slot.
            image: Its memory.
            places: Where in it each object stands, in bytes.
        """
        for number in self._stale.get(slot, range(len(self._bytes))):
            at, reserved, *_ = places[number]
            data = self._bytes[number]
            image[at : at + reserved] = data.filled(reserved) if isinstance(data, Raw) else data.ljust(reserved, b"\0")
        self._stale[slot] = set()


def _check_fits(name: str, data: bytes, reserved: int) -> None:
    if not (data.fits(reserved) if isinstance(data, Raw) else len(data) <= reserved):
        raise StructureChanged(f"{name} does not fit its {reserved} bytes")


def _same(new: Any, known: Any) -> bool:
    """Whether two values of one type are the same to the bit: not by ==, for which 0.0 is -0.0, and True is 1."""
    if type(new) is float:
        return bool(new.hex() == known.hex())
    if type(new) in (tuple, list):
        types = list(map(type, new))
        if types != list(map(type, known)):
            return False
        if not {*types} <= _EXACT:
            return all(map(_same, new, known))
    return bool(new == known)
