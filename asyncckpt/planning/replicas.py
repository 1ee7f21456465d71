"""Values that several ranks have under one name: DCP takes them for replicas, and saves one of them for all."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.errors import unless_interrupt
from asyncckpt.planning.structure import Keys, has_no_bytes, leaf_keys

logger = logging.getLogger(__name__)

# Whose bytes are compared. What is larger is a weight, or what is made of one, and copying it from a device takes time.
_SMALL_BYTES = 64 << 10
# Of the saves after the plan, and how many values of each rank.
_COMPARED_SAVES, _COMPARED_VALUES = 3, 64
_SHOWN = 5


def digests(values: Iterable[object]) -> array[int]:
    """A number for each value: equal for equal ones. 0 where that is not looked at."""
    return array("Q", map(_digest, values))


class Replicas:
    """A few small values, to be compared again in the next saves: what ranks begin with is often equal."""

    def __init__(self, state_dict: Mapping[str, Any], names: Collection[str]) -> None:
        """Look at those of ``names`` that are small, up to a limit."""
        keys = {".".join(map(str, keys)): keys for keys in leaf_keys(state_dict)} if names else {}
        small = (name for name in names if name in keys and _is_small(_value(state_dict, keys[name])))
        self._keys = {name: keys[name] for name in islice(small, _COMPARED_VALUES)}
        self._left = _COMPARED_SAVES

    def digests(self, state_dict: Mapping[str, Any]) -> dict[str, int]:
        """As ``digests``, by the names; of nothing, once enough saves are compared."""
        if not self._left:
            return {}
        self._left -= 1
        return {name: _digest(_value(state_dict, keys)) for name, keys in self._keys.items()}


def _value(state_dict: Any, keys: Keys) -> Any:
    for key in keys:
        state_dict = state_dict[key]
    return state_dict


def _is_small(value: object) -> bool:
    """Whether its bytes are looked at, and not only its form."""
    return _digest(value) != 0 and (not isinstance(value, torch.Tensor) or bool(_bytes(value)))


def _digest(value: object) -> int:
    hasher = hashlib.blake2b(digest_size=8)
    try:
        _add(hasher.update, value, _SMALL_BYTES)
    except unless_interrupt(Exception):  # of a class of the user's, perhaps: a warning is not worth a save
        return 0
    return int.from_bytes(hasher.digest(), "little") or 1


def _add(add: Callable[[bytes], object], value: Any, left: int) -> int:
    """Tell what a value is by some bytes, the same for equal ones.

    Args:
        add: Takes them.
        value: Plain values, and dicts, lists and tuples of such; arrays and tensors.
        left: The most bytes.

    Returns:
        How many are left.

    Raises:
        ValueError: It is something else, or too large.
    """
    kind = type(value)
    parts: Iterable[Any] = ()
    if kind is int:
        said = b"i%x" % value
    elif kind in (bool, float, complex, str, type(None)):
        said = f"{kind.__name__} {value!r}".encode()
    elif kind is bytes:
        said = value
    elif kind in (list, tuple):
        said, parts = b"%d values" % len(value), value
    elif kind is dict:
        said, parts = b"%d keys" % len(value), chain.from_iterable(sorted(value.items(), key=repr))
    elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        said = f"{value.dtype} {tuple(value.shape)}".encode() + _bytes(value)
    elif kind.__module__ == "numpy" and value.nbytes <= left and not value.dtype.hasobject:
        said = f"{value.dtype} {value.shape}".encode() + value.tobytes()
    else:
        raise ValueError("it is not compared")
    left -= len(said) + 1
    if left < 0:
        raise ValueError("it is large")
    add(said + b";")
    for part in parts:
        left = _add(add, part, left)
    return left


def _bytes(tensor: torch.Tensor) -> bytes:
    """Those of a small tensor that is no weight: floating-point ones may differ a little, as statistics of batches."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or has_no_bytes(tensor) or not tensor.data_ptr():
        return b""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.nbytes > _SMALL_BYTES:
        return b""
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def warn_differing(names: Iterable[Iterable[str]], digests: Sequence[array[int]], known: set[str]) -> None:
    """Log the names under which ranks have different values, of which only one is saved.

    Args:
        names: Those of the values of each rank.
        digests: Those of its values.
        known: Names that were logged before; those that are now are added.
    """
    found: dict[str, dict[int, list[int]]] = {}
    for rank, (its, mine) in enumerate(zip(names, digests, strict=True)):
        if rank and mine == digests[0]:
            continue  # as on nearly all ranks of nearly all jobs
        for name, digest in zip(its, mine, strict=False):  # none of a planner that does not show its values
            if digest and name not in known:
                found.setdefault(name, {}).setdefault(digest, []).append(rank)
    differing = {name: by_digest for name, by_digest in found.items() if len(by_digest) > 1}
    if differing:
        shown = ", ".join(f"{name!r} ({_ranks(by_digest)})" for name, by_digest in list(differing.items())[:_SHOWN])
        more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        logger.warning(
            "%d values differ from rank to rank, and of each only one is saved, which every rank will load: %s%s; wrap"
            " what is of each rank's own in asyncckpt.PerRank",
            len(differing),
            shown,
            more,
        )
    known.update(differing)


def _ranks(by_digest: Mapping[int, list[int]]) -> str:
    """Two ranks that differ."""
    one, other, *_ = (ranks[0] for ranks in by_digest.values())
    return f"ranks {one} and {other}"
