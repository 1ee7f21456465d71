"""Small values beside the tensors: step counters, learning rates, names, and whatever else pickles.

DCP pickles each of them on every save. Here their bytes are kept: a value that is what it was is not pickled again.
Each has room to grow in the image, filled up with zeros, so that a changed value moves no other byte. The pickle is
``torch.save``'s older form, which ``torch.load`` reads just the same and which ends where it ends: zeros behind it are
not looked at (a zip would have to end with its directory).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from asyncckpt.errors import UnsavableStateError
from asyncckpt.image import Place
from asyncckpt.structure import StructureChanged, is_leaf

# The longest comment that a zip can end with.
_COMMENT_BYTES = 0xFFFF

_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})


class Raw(bytes):
    """Bytes that a user's own planner made; they are stored as they are.

    Those that ``torch.save`` made (a zip, as Megatron-LM's planner hands over) have room to grow all the same: what is
    left of it becomes the zip's comment. Any others are in no room but their own.
    """

    def is_zip(self) -> bool:
        return self.startswith(b"PK\3\4") and self[-22:-18] == b"PK\5\6" and self[-2:] == b"\0\0"

    def room(self) -> int:
        return len(self) + min(_COMMENT_BYTES, max(1024, len(self))) if self.is_zip() else len(self)

    def fits(self, room: int) -> bool:
        spare = room - len(self)
        return spare == 0 or (0 < spare <= _COMMENT_BYTES and self.is_zip())

    def filled(self, room: int) -> bytes:
        spare = room - len(self)
        return self[:-2] + spare.to_bytes(2, "little") + bytes(spare) if spare else self


def _is_constant(value: object) -> bool:
    """Whether ``value`` cannot change inside, so that it may be kept to compare with."""
    kind = type(value)
    return kind in _SCALARS or (kind is tuple and all(map(_is_constant, value)))  # type: ignore[call-overload]


def pickled(name: str, value: object) -> bytes:
    """The bytes of one object. Raises ``UnsavableStateError`` naming it."""
    if isinstance(value, Raw):
        return value
    if _is_constant(value):
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
_NONE = pickled("None", None)


def room_for(nbytes: int) -> int:
    """The bytes to set aside for an object that takes ``nbytes`` now."""
    return -(-(nbytes + max(64, nbytes // 4)) // 64) * 64


class StoredObjects:
    """The objects of one plan: their last values, their bytes, and what each slot of the image has of them."""

    def __init__(self, names: Sequence[str], values: Sequence[Any], slots: int) -> None:
        """Pickle ``values``; those that are ``Raw`` are stored as they are. Raises ``UnsavableStateError``."""
        self.names = names
        self._known = [value if _is_constant(value) else None for value in values]
        self._bytes = [pickled(name, value) for name, value in zip(names, values, strict=True)]
        self.rooms = [
            value.room() if isinstance(value, Raw) else room_for(len(data))
            for value, data in zip(values, self._bytes, strict=True)
        ]
        self._stale: list[set[int]] = [set(range(len(values))) for _ in range(slots)]

    def forget_slots(self) -> None:
        """The slots are in other memory now, which has nothing of the objects."""
        for stale in self._stale:
            stale.update(range(len(self.names)))

    def refresh(self, values: Sequence[Any]) -> None:
        """Take the ``values`` of a new save, pickling those that changed.

        Raises ``StructureChanged`` if one no longer fits its room or is no longer a leaf, ``UnsavableStateError`` if
        one does not pickle; then nothing is taken.
        """
        changed: list[tuple[int, Any, bytes]] = []
        for number, (new, known) in enumerate(zip(values, self._known, strict=True)):
            # Unchanged, for most values at a glance; of the others only constants are compared at all.
            if new is known:
                if new is not None or self._bytes[number] == _NONE:
                    continue
            elif type(new) is type(known) and _same(new, known):
                continue
            elif not is_leaf(new):
                raise StructureChanged(f"{self.names[number]} is now a {type(new).__name__} with tensors or a mapping")
            data = pickled(self.names[number], new)
            if data != self._bytes[number]:
                room = self.rooms[number]
                if not (new.fits(room) if isinstance(new, Raw) else len(data) <= room):
                    raise StructureChanged(f"{self.names[number]} does not fit its {room} bytes")
                changed.append((number, new, data))
        for number, new, data in changed:
            self._known[number] = new if _is_constant(new) else None
            self._bytes[number] = data
        numbers = {number for number, _, _ in changed}
        for stale in self._stale:
            stale |= numbers

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """Bring the objects in the ``image`` of ``slot`` up to date."""
        stale = self._stale[slot]
        for number in stale:
            place, data = places[number], self._bytes[number]
            room = place.nbytes
            image[place.at : place.at + room] = data.filled(room) if isinstance(data, Raw) else data.ljust(room, b"\0")
        stale.clear()


def _same(new: Any, known: Any) -> bool:
    """Whether two constants of one type are the same to the bit: not by ==, for which 0.0 is -0.0, and True is 1."""
    if type(new) is float:
        return bool(new.hex() == known.hex())
    if type(new) is tuple:
        return len(new) == len(known) and all(
            type(one) is type(other) and _same(one, other) for one, other in zip(new, known, strict=True)
        )
    return bool(new == known)
