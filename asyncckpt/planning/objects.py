"""Small values beside the tensors: step counters, learning rates, names, and whatever else pickles.

DCP pickles each of them on every save. Here a value that has not changed is not pickled again. More bytes are reserved
for each in the image than it takes, filled up with zeros, so that a changed value moves no other byte. A pickle has
``torch.save``'s older form, which ``torch.load`` reads without a look at the zeros behind it. In that form, however, a
tensor has no values yet when the object around it is unpickled. So an object that holds a tensor is an archive, with
the zeros before its directory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError, unless_interrupt
from asyncckpt.format.archive import is_archive, stretched
from asyncckpt.planning.forms import has_shards
from asyncckpt.planning.layout import Place
from asyncckpt.planning.per_rank import of_any_rank
from asyncckpt.planning.structure import StructureChanged, is_leaf

_EXACT = frozenset({int, bool, str, bytes, type(None)})
"""Where values of these types are equal, and of one type, they are the same."""
_SCALARS = _EXACT | {float}


class Raw(bytes):
    """Bytes that a user's own planner made; they are stored as they are.

    An archive, as ``torch.save`` makes it and Megatron-LM's planner hands it over, is unpickled once, and more room is
    reserved for it. For any others exactly their own length is reserved.
    """


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
    try:
        pickler = _Pickler(buffer := io.BytesIO(), _PROTOCOL)
        pickler.dump(value)
        if pickler.parts and of_any_rank(name) == name:
            raise _part_refused(name, value, pickler.parts[0])
        if not pickler.has_storages:
            return _BEFORE + buffer.getvalue() + _AFTER
        torch.save(value, buffer := io.BytesIO())
    except UnsavableStateError:
        raise
    except unless_interrupt(Exception) as error:  # whatever the value's own code raises
        raise UnsavableStateError(
            f"the value of {name!r}, a {type(value).__qualname__}, cannot be pickled: {type(error).__name__}: {error};"
            " leave it out of the state dict, or give it a __getstate__ that drops what does not pickle"
        ) from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Notes whether the value holds the storage of a tensor, and which of its tensors are parts of larger ones."""

    has_storages = False

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.parts: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _is_part(value):
            self.parts.append(value)
        if isinstance(value, torch.storage.TypedStorage) or torch.is_storage(value):
            self.has_storages = True
            return "storage"
        return None


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether this rank has only a part of a tensor, or a summand of it."""
    if isinstance(tensor, DTensor):
        placed = enumerate(tensor.placements)
        return any(not each.is_replicate() and tensor.device_mesh.size(dim) > 1 for dim, each in placed)
    return has_shards(tensor) or hasattr(tensor, "local_shards")


def _part_refused(name: str, value: object, part: torch.Tensor) -> UnsavableStateError:
    placed = f" placed as {list(part.placements)}" if isinstance(part, DTensor) else ""
    return UnsavableStateError(
        f"the value of {name!r}, a {type(value).__qualname__}, holds a {type(part).__qualname__}{placed}, and this rank"
        " has only a part of that: all ranks would load the part of one; put such a tensor into the dicts and lists of"
        " the state dict itself, or save its full_tensor()"
    )


def _check_unpickles(name: str, value: object, data: bytes) -> None:
    """Raise ``UnsavableStateError`` if ``data``, the pickle of a value, cannot be unpickled.

    First its tensors go to the host, to spare the memory of devices. Some objects can only be made on their device.
    """
    for device in ("cpu", None):
        try:
            torch.load(io.BytesIO(data), map_location=device, weights_only=False)
            return
        except unless_interrupt(Exception) as error:  # whatever the value's own code raises
            cause = error
    kind = "" if isinstance(value, Raw) else f", a {type(value).__qualname__},"
    raise UnsavableStateError(
        f"the value of {name!r}{kind} pickles, but could not be loaded again:"
        f" {type(cause).__name__}: {cause}; leave it out of the state dict, or mend its __reduce__ or __setstate__"
    ) from cause


def _around(pickled: bytes) -> tuple[bytes, bytes]:
    """Return the bytes that ``torch.save`` puts before and behind the pickle of a value without tensors.

    ``pickled`` is the pickle of a text.
    """
    torch.save(pickle.loads(pickled), buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    before, after = buffer.getvalue().split(pickled)
    return before, after


_PROTOCOL = 2
_BEFORE, _AFTER = _around(pickle.dumps("asyncckpt", protocol=_PROTOCOL))
_NONE = _pickled("None", None)


def bytes_to_reserve(nbytes: int) -> int:
    """How many bytes to reserve for an object that takes ``nbytes`` now."""
    return -(-(nbytes + max(64, nbytes // 4)) // 64) * 64


def _has_fixed_size(data: bytes) -> bool:
    """Return True for bytes of a planner in a form that is not known here, so that no zeros can be added to them."""
    return isinstance(data, Raw) and not is_archive(data)


class StoredObjects:
    """The objects of one plan: their last values, their bytes, and what each slot has of them."""

    def __init__(self, names: Sequence[str], values: Sequence[Any], reserved: Sequence[int] | None = None) -> None:
        """Pickle values.

        Args:
            names: Theirs.
            values: To be pickled.
            reserved: The bytes to reserve for each; None: as they need it.

        Raises:
            UnsavableStateError: One does not pickle, or cannot be unpickled.
            StructureChanged: One does not fit what is to be reserved for it.
        """
        self._names = names
        self._known = list(map(_kept, values))
        self._bytes = list(map(_pickled, names, values))
        needed = [len(data) if _has_fixed_size(data) else bytes_to_reserve(len(data)) for data in self._bytes]
        self.reserved = needed if reserved is None else reserved
        """The bytes reserved for each."""
        for name, data, room in zip(names, self._bytes, self.reserved, strict=True):
            _check_fits(name, data, room)
        # Of each object the type that was last unpickled again.
        self._checked: list[type | None] = [None] * len(values)
        for number, value in enumerate(values):
            self._check(number, value, self._bytes[number])
        # For each slot that was written to, the numbers of the objects that have changed since.
        self._stale: dict[int, set[int]] = {}

    def own_pickles(self) -> Iterator[tuple[str, bytes]]:
        """The names and the bytes of those that pickled by code of their own, as classes and arrays do."""
        for name, kind, data in zip(self._names, self._checked, self._bytes, strict=True):
            if kind not in (None, Raw):
                yield name, data

    def forget_slots(self) -> None:
        """The slots are in other memory now, which has nothing of the objects."""
        self._stale.clear()

    def refresh(self, values: Sequence[Any]) -> None:
        """Take the ``values`` of a new save, pickling those that changed.

        Raises ``StructureChanged`` if one no longer fits the bytes reserved for it or is no longer a leaf,
        ``UnsavableStateError`` as ``__init__``; then nothing is taken.
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
            self._check(number, new, data)
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

    def _check(self, number: int, value: Any, data: bytes) -> None:
        """Unpickle ``data`` again, if the value pickles by code of its own, and is of another type than before."""
        if value is None or _has_fixed_size(data) or _kept(value) is not None:
            self._checked[number] = None
        elif type(value) is not self._checked[number]:
            _check_unpickles(self._names[number], value, data)
            self._checked[number] = type(value)

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
            image[at : at + reserved] = stretched(data, reserved) if is_archive(data) else data.ljust(reserved, b"\0")
        self._stale[slot] = set()


def _check_fits(name: str, data: bytes, reserved: int) -> None:
    if len(data) > reserved or (len(data) < reserved and _has_fixed_size(data)):
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
