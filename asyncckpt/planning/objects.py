"""Store the objects of a state dict: step counters, learning rates, names, and all other values that can be pickled.

DCP pickles each object on every save. Here an unchanged value is not pickled again. The image reserves more bytes for
each object than the object needs, and fills them with zeros. So a changed value moves no other bytes.

A pickle has the older format of ``torch.save``, because ``torch.load`` then ignores the zeros behind the pickle. In
that format, however, a tensor has no values yet when the object around the tensor is unpickled. So an object that holds
a tensor is stored as an archive, with the zeros before the archive's directory.
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
"""Types for which two equal values of one type are the same to the bit."""
_SCALARS = _EXACT | {float}


class Raw(bytes):
    """Bytes from a user's own planner, stored unchanged.

    An archive of ``torch.save``, as from Megatron-LM's planner, is unpickled once as a check, and more bytes are
    reserved for it. For other bytes exactly their own length is reserved.
    """


def _is_constant(value: object) -> bool:
    """Return whether ``value`` is immutable: a scalar, or a tuple of immutable values."""
    return type(value) in _SCALARS or (type(value) is tuple and _are_constant(value))


def _are_constant(values: Sequence[Any]) -> bool:
    return {*map(type, values)} <= _SCALARS or all(map(_is_constant, values))


def _kept(value: Any) -> Any:
    """Return the value to compare with on the next save.

    An immutable value is returned itself. A list of immutable values is copied: optimizers have lists of all parameter
    names. For any other value, return None.
    """
    if type(value) is list:
        return value.copy() if _are_constant(value) else None
    return value if _is_constant(value) else None


def _pickled(name: str, value: object) -> bytes:
    """Return the bytes to store for a value. Raises ``UnsavableStateError`` with ``name``."""
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
    """Return whether this rank has only a part, or only a summand, of a tensor."""
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

    The first try loads tensors to the host, to spare the memory of devices. Some objects load only on their device.
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
    """Return the bytes that ``torch.save`` writes before and behind the pickle of a value without tensors.

    ``pickled``: the pickle of a text, as an example.
    """
    torch.save(pickle.loads(pickled), buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    before, after = buffer.getvalue().split(pickled)
    return before, after


_PROTOCOL = 2
_BEFORE, _AFTER = _around(pickle.dumps("asyncckpt", protocol=_PROTOCOL))
_NONE = _pickled("None", None)


def bytes_to_reserve(nbytes: int) -> int:
    """Return the number of bytes to reserve for an object that needs ``nbytes`` now."""
    return -(-(nbytes + max(64, nbytes // 4)) // 64) * 64


def _has_fixed_size(data: bytes) -> bool:
    """Return True for a planner's bytes in an unknown format, to which no zeros can be added."""
    return isinstance(data, Raw) and not is_archive(data)


class StoredObjects:
    """The objects of one plan: their last values, their bytes, and which objects each slot has in an old version."""

    def __init__(self, names: Sequence[str], values: Sequence[Any], reserved: Sequence[int] | None = None) -> None:
        """Pickle values.

        Args:
            names: The names of the values.
            values: The values.
            reserved: The bytes to reserve for each value; None: as many as the value needs, and some more.

        Raises:
            UnsavableStateError: A value cannot be pickled, or its pickle cannot be unpickled.
            StructureChanged: A value does not fit into its ``reserved`` bytes.
        """
        self._names = names
        self._known = list(map(_kept, values))
        self._bytes = list(map(_pickled, names, values))
        needed = [len(data) if _has_fixed_size(data) else bytes_to_reserve(len(data)) for data in self._bytes]
        self.reserved = needed if reserved is None else reserved
        """The bytes reserved for each object."""
        for name, data, room in zip(names, self._bytes, self.reserved, strict=True):
            _check_fits(name, data, room)
        # For each object, the type of the last value that was unpickled as a check. None: no check was needed.
        self._checked: list[type | None] = [None] * len(values)
        for number, value in enumerate(values):
            self._check(number, value, self._bytes[number])
        # For each written slot, the numbers of the objects that have changed since.
        self._stale: dict[int, set[int]] = {}

    def own_pickles(self) -> Iterator[tuple[str, bytes]]:
        """Yield the names and bytes of the objects that pickle by code of their own, such as classes and arrays."""
        for name, kind, data in zip(self._names, self._checked, self._bytes, strict=True):
            if kind not in (None, Raw):
                yield name, data

    def forget_slots(self) -> None:
        """Note that the slots are in other memory now, which holds no objects."""
        self._stale.clear()

    def refresh(self, values: Sequence[Any]) -> None:
        """Take the ``values`` of a new save, and pickle the changed values.

        Raises ``StructureChanged`` if a value does not fit into its reserved bytes or is no longer a leaf, and
        ``UnsavableStateError`` as ``__init__`` does. After an error nothing is taken.
        """
        changed: list[tuple[int, Any, bytes]] = []
        for number, (new, known) in enumerate(zip(values, self._known, strict=True)):
            # Most unchanged values are the same object. Other values are compared only if they were kept.
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
            # Keep this order. An interrupt at any point then leaves no known value with the bytes of another value.
            self._known[number] = None
            for stale in self._stale.values():
                stale.add(number)
            self._bytes[number] = data
            self._known[number] = _kept(new)

    def _check(self, number: int, value: Any, data: bytes) -> None:
        """Check that ``data`` unpickles, if the value pickles by code of its own and has another type than before."""
        if value is None or _has_fixed_size(data) or _kept(value) is not None:
            self._checked[number] = None
        elif type(value) is not self._checked[number]:
            _check_unpickles(self._names[number], value, data)
            self._checked[number] = type(value)

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """Write the last captured version of all stale objects into a slot.

        Args:
            slot: The number of the slot.
            image: The memory of the slot.
            places: The place of each object in the image, in bytes.
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
    """Return whether two values of one type are the same to the bit. ``==`` is no use: 0.0 == -0.0, and True == 1."""
    if type(new) is float:
        return bool(new.hex() == known.hex())
    if type(new) in (tuple, list):
        types = list(map(type, new))
        if types != list(map(type, known)):
            return False
        if not {*types} <= _EXACT:
            return all(map(_same, new, known))
    return bool(new == known)
