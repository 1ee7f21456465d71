"""The structure of a state dict: its containers with their keys, its leaves in their order, the forms of its tensors.

DCP flattens a state dict anew on every save, which takes microseconds a value. Here a later save only compares the keys
and the forms of the tensors. All keys of a flat dict are compared as one list, and all forms in one pass in C.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, compress
from operator import itemgetter, methodcaller
from typing import Any, TypeAlias

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from asyncckpt.errors import MismatchError, UnsavableStateError
from asyncckpt.planning.forms import Forms

# A strided tensor of one of these types consists of its bytes alone. A subclass may hold anything else.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
# The types of most values of a state dict. None is ``Stateful``, so their values are not checked for that.
_STATELESS = PLAIN | {DTensor, dict, OrderedDict, list, tuple, int, float, bool, str, bytes, type(None)}


class StructureChanged(Exception):
    """The state differs from the planned one. Internal: the caller then makes a new plan."""


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...] | list[Any]]:
    """Return a function that picks the values at ``positions`` from a list, in C."""
    first = positions[0] if positions else 0
    following = range(first, first + len(positions))
    if list(positions) == list(following):
        return itemgetter(slice(first, following.stop))
    return itemgetter(*positions)


def is_leaf(value: object, tensor: type = torch.Tensor) -> bool:
    """Return whether DCP stores ``value`` as one value.

    A mapping is no leaf, and a list with a tensor or a mapping in it is none either. All other values are leaves,
    tuples too. ``torch.distributed.checkpoint._traverse`` has the same rule (torch 2.4 and later). ``tensor``: the type
    of tensors.
    """
    if isinstance(value, Mapping):
        return False
    if isinstance(value, list):
        return all(is_leaf(entry, tensor) and not isinstance(entry, tensor) for entry in value)
    return True


def has_no_bytes(tensor: torch.Tensor) -> bool:
    """Return True if the values of ``tensor`` do not lie in memory as its shape and dtype say."""
    return tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta"


def plain_part(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``tensor``, a part of ``name``, as a plain tensor.

    Raises ``UnsavableStateError`` if the tensor is not plain.
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()  # a collective may still be filling it
    if type(tensor) not in PLAIN:
        raise UnsavableStateError(
            f"{name!r} is sharded, and its part on this rank is a {type(tensor).__name__}, which may be more, or less,"
            " than its bytes; save what it is made of, or leave it out"
        )
    return tensor


StateDict: TypeAlias = Mapping[str, Any]
Keys: TypeAlias = tuple[Any, ...]
"""The keys and list positions on the path to a leaf. DCP has the same paths, with all keys as text."""


def leaf_keys(container: Mapping[Any, Any] | list[Any], keys: Keys = ()) -> Iterator[Keys]:
    """Yield the keys of each leaf of ``container``, in DCP's order. ``keys``: the path to ``container`` itself."""
    for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
        if is_leaf(value):
            yield (*keys, key)
        else:
            yield from leaf_keys(value, (*keys, key))


def put_leaf(state_dict: Any, keys: Keys, value: Any) -> None:
    """Replace a leaf.

    Args:
        state_dict: The state dict, with containers at any depth.
        keys: The path to the leaf.
        value: The new value.
    """
    for key in keys[:-1]:
        state_dict = state_dict[key]
    state_dict[keys[-1]] = value


def stateful_types(state_dict: Mapping[str, Any]) -> tuple[set[type], set[type]]:
    """Return the ``Stateful`` types at the top of ``state_dict``, and the ``Stateful`` types deeper in it.

    Raises ``TypeError`` if ``state_dict`` is no mapping, ``RecursionError`` if a container contains itself.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"a state dict maps names to values, and this is a {type(state_dict).__name__}: {{'model': model}} is one"
        )
    top: set[type] = set()
    deep: set[type] = set()
    # Look at one level at a time, in C: 0.1 us a value.
    values = list(state_dict.values())
    for depth in range(sys.getrecursionlimit()):
        types = list(map(type, values))
        kinds = set(types)
        found = _stateful(kinds - _STATELESS, values)
        (deep if depth else top).update(found)
        mappings = {kind for kind in kinds - found if issubclass(kind, Mapping)}
        lists = {kind for kind in kinds - found if issubclass(kind, list)}
        if not mappings and not lists:
            return top, deep
        entries = map(methodcaller("values"), compress(values, map(mappings.__contains__, types)))
        values = list(chain.from_iterable(chain(entries, compress(values, map(lists.__contains__, types)))))
    raise RecursionError("a container of the state dict is within itself")


def _stateful(kinds: set[type], values: Sequence[Any]) -> set[type]:
    """Return the ``Stateful`` types among ``kinds``, which are types of ``values``.

    Metaclasses are left out: a class as a value has the methods of ``Stateful``, but no state.
    """
    if not kinds:
        return set()
    # ``isinstance`` of a protocol takes microseconds, so only one value of each type is checked.
    examples = dict(zip(map(type, values), values, strict=True))
    return {kind for kind in kinds if not issubclass(kind, type) and isinstance(examples[kind], Stateful)}


def stateful_to_dict(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state_dict`` with each ``Stateful`` value replaced by its ``state_dict()``, at any depth.

    DCP itself replaces values at the top only. Raises ``TypeError`` if ``state_dict`` is no mapping.
    """
    top, deep = stateful_types(state_dict)
    if not top and not deep:
        return state_dict
    return {key: _state_of(value, top | deep, deep) for key, value in state_dict.items()}


def _state_of(value: Any, kinds: Set[type], deep: Set[type]) -> Any:
    """Return the state of a value.

    Args:
        value: A value in a state dict.
        kinds: The ``Stateful`` types that the value itself may have.
        deep: The ``Stateful`` types of values that it may contain.

    Returns:
        The state of a ``Stateful`` value; a copy of a container with ``Stateful`` values; otherwise the value itself.
    """
    if type(value) in kinds:
        return value.state_dict()
    if not has_stateful(value, deep):
        return value
    if isinstance(value, list):
        return [_state_of(entry, deep, deep) for entry in value]
    return {key: _state_of(entry, deep, deep) for key, entry in value.items()}


def has_stateful(value: Any, kinds: Set[type]) -> bool:
    """Return True if ``value`` is a container with a value of one of ``kinds`` in it, at any depth."""
    if not kinds or type(value) in PLAIN or not isinstance(value, (Mapping, list)):
        return False
    values = value if isinstance(value, list) else value.values()
    return any(type(entry) in kinds or has_stateful(entry, kinds) for entry in values)


def give_states(container: Any, states: Any) -> None:
    """Give each ``Stateful`` value of a container its state, and put the other values in their places.

    Args:
        container: The caller's container. It is changed in place.
        states: The loaded states, in the form that ``stateful_to_dict`` returns for the container.

    Raises:
        MismatchError: A list has another length.
    """
    top, deep = stateful_types(container)
    if top or deep:
        _give_states(container, states, top | deep, deep)
    else:
        for key, value in states.items():  # ``update`` would bypass ``__setitem__`` of a user's class
            container[key] = value


def _give_states(container: Any, states: Any, kinds: Set[type], deep: Set[type]) -> None:
    """Do the work of ``give_states``, with ``kinds`` and ``deep`` as in ``_state_of``, for the container's values."""
    is_list = isinstance(container, list)
    if is_list and len(states) != len(container):
        raise MismatchError(f"a list of {len(container)} values with states is stored with {len(states)}")
    for key in range(len(container)) if is_list else sorted(container, key=str):
        value = container[key]
        if type(value) in kinds:
            value.load_state_dict(states[key])
        elif has_stateful(value, deep):
            _give_states(value, states[key], deep, deep)
        else:
            container[key] = states[key]


class Structure:
    """The containers of one state dict, level by level. All containers of a level are compared together, in C.

    With ``nested`` false every value of the state dict is a leaf.
    """

    def __init__(self, container: Mapping[Any, Any] | list[Any], nested: bool = True) -> None:
        self._levels: list[_Level] = []
        entries: dict[int, range] = {}  # for each container, the numbers of its values among all values
        containers, numbers, count = [container], [-1], 0
        while containers:
            level = _Level(containers)
            values = level.values(containers)
            self._levels.append(level)
            first = count
            for number, length in zip(numbers, map(len, containers), strict=True):
                entries[number] = range(count, count + length)
                count += length
            inner = [at for at, value in enumerate(values) if nested and not is_leaf(value)]
            level.pick_containers = picker(inner)
            containers, numbers = [values[at] for at in inner], [first + at for at in inner]
        self._pick_leaves = picker(list(_leaf_numbers(entries, -1)))

    def leaves(self, container: Mapping[Any, Any]) -> Sequence[Any]:
        """Return the leaves of ``container`` in DCP's order. Raises ``StructureChanged`` if its containers differ.

        The caller has to check that each leaf is still a leaf, because the caller compares the types anyway.
        """
        containers: Sequence[Any] = [container]
        found: list[Any] = []
        for level in self._levels:
            values = level.values(containers)
            containers = level.pick_containers(values)
            found = found + values if found else values  # for 100,000 tensors, another list takes a millisecond
        return found if len(self._levels) == 1 else self._pick_leaves(found)


def _leaf_numbers(entries: Mapping[int, range], container: int) -> Iterator[int]:
    """Yield the numbers of the leaves in a container, in DCP's order.

    ``entries``: the numbers of the values of each container. ``container``: the number of the container.
    """
    for number in entries[container]:
        if number in entries:
            yield from _leaf_numbers(entries, number)
        else:
            yield number


class _Level:
    """The containers at one depth of a state dict: their types, lengths and keys."""

    pick_containers: Callable[[Sequence[Any]], Sequence[Any]]
    """Picks the containers of the next level from the values."""

    def __init__(self, containers: Sequence[Any]) -> None:
        self._kinds, self._lengths = list(map(type, containers)), list(map(len, containers))
        self._are_dicts = {*self._kinds} == {dict}
        self._keys = self._keys_of(containers)
        self._key_types = list(map(type, self._keys))  # 1 and True are equal, but DCP names them differently

    def values(self, containers: Sequence[Any]) -> list[Any]:
        """Return the values of all ``containers``. Raises ``StructureChanged`` if types, lengths or keys differ."""
        if list(map(type, containers)) != self._kinds:
            raise StructureChanged("a container is now one of another type, or none")
        if list(map(len, containers)) != self._lengths:
            raise StructureChanged("a container has more or fewer entries now")
        keys = self._keys_of(containers)
        if keys != self._keys or list(map(type, keys)) != self._key_types:
            raise StructureChanged("the keys changed")
        return list(chain.from_iterable(map(dict.values if self._are_dicts else _values, containers)))

    def _keys_of(self, containers: Sequence[Any]) -> list[Any]:
        return list(chain.from_iterable(containers if self._are_dicts else map(_keys, containers)))


def _keys(container: Mapping[Any, Any] | list[Any]) -> Iterable[Any]:
    return () if isinstance(container, list) else container


def _values(container: Mapping[Any, Any] | list[Any]) -> Iterable[Any]:
    return container if isinstance(container, list) else container.values()


class Fingerprint:
    """The properties of a list of strided tensors that have to stay as planned.

    The properties are the dtypes, shapes and layouts, the tensors that declare themselves parts of larger tensors, and
    the tensors with shared bytes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], aliases: Sequence[tuple[int, int]]) -> None:
        """Record the properties of ``tensors``. ``aliases``: pairs of positions of tensors with one ``alias_key``."""
        self._forms = Forms(tensors)
        self._aliases = aliases

    @property
    def devices(self) -> object | None:
        """See ``Forms.devices``."""
        return self._forms.devices

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ``StructureChanged`` unless ``tensors`` have the same fingerprint."""
        if not self._forms.are_those_of(tensors):
            raise StructureChanged("a tensor has another dtype, shape or layout, or is a part of a larger one now")
        for one, other in self._aliases:
            if alias_key(tensors[one]) != alias_key(tensors[other]):
                raise StructureChanged("two tensors that were one are two now")


def alias_key(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key that is equal for tensors with the same memory and form; None if ``tensor`` has no bytes."""
    if tensor.numel() == 0 or tensor.untyped_storage().data_ptr() == 0:
        return None
    form = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *form)
