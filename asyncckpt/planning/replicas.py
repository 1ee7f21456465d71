"""Compare replicas: values of several ranks under one name. DCP saves only one of them, for all ranks.

The first rank's worker compares digests of the replicas in the commit (``worker/replica_check.py``). No worker has the
bytes of a replica that another rank writes, so the trainer makes the digests. The digest of a small value covers the
whole value; the digest of a tensor covers a sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import nsmallest
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.devices.kinds import ReadyEvents, kind_of
from asyncckpt.errors import unless_interrupt
from asyncckpt.planning.structure import PLAIN, Keys, has_no_bytes, leaf_keys

# Maximum bytes of a value that is compared whole. Floating-point tensors and tensors on devices are sampled instead.
_SMALL_BYTES = 64 << 10
# The number of elements in the sample of a tensor, spread over the whole tensor.
_SAMPLED = 16
# The first save by a plan compares all values, up to ``_MOST_VALUES``. The other first saves, and then one save in each
# ``_COMPARE_EVERY``, compare a part of about ``_LATER_VALUES``.
_FIRST_SAVES, _MOST_VALUES = 4, 4096
_COMPARE_EVERY, _LATER_VALUES = 10, 128
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """The values of a plan that other ranks may have too, and the choice of values to compare in each save.

    Ranks may have different names. Each rank chooses by a hash of the name, so that all ranks choose the same names.
    """

    def __init__(self, state_dict: Mapping[str, Any], names: Collection[str], number: int) -> None:
        """Find the values.

        Args:
            state_dict: The planned state dict.
            names: The names of its values that are no shards; empty: there are no other ranks.
            number: The number of the save, or of the preparation, that made the plan.
        """
        self._planned_at, self._compared_at = number, number
        self._is_committed = False
        chosen = set(nsmallest(_MOST_VALUES, names, key=_hash))
        named = ((".".join(map(str, keys)), keys) for keys in (leaf_keys(state_dict) if names else ()))
        self._keys = {name: keys for name, keys in named if name in chosen}
        # A power of two, so that the parts of a rank with more names subdivide the parts of a rank with fewer names.
        self._parts = 1 << max(0, math.ceil(math.log2(max(1, len(self._keys)) / _LATER_VALUES)))

    def on_end(self, *, is_committed: bool) -> None:
        """Note the end of a save, on all ranks alike. After a failed save, all values are compared again."""
        self._is_committed = is_committed

    def values(self, state: Callable[[], Mapping[str, Any]], number: int) -> Iterable[tuple[str, object]]:
        """Yield the values of the ``state`` that are compared in save ``number``, with their names."""
        turn, before = number // _COMPARE_EVERY, self._compared_at // _COMPARE_EVERY
        if number < self._planned_at + _FIRST_SAVES:
            turn, before = number, -1
        if not self._keys or (turn == before and self._is_committed):
            return
        self._compared_at = number
        state_dict = state()
        for name, keys in self._keys.items():
            if not self._is_committed or _hash(name) % self._parts == turn % self._parts:
                try:
                    value = _value(state_dict, keys)
                except (LookupError, TypeError):  # a user's own planner may allow a state without this value
                    continue
                yield name, value


class Sample:
    """Digests of values. Samples of tensors on devices may still be on the devices."""

    def __init__(self, values: Iterable[tuple[str, object]]) -> None:
        """Make digests of small values, and queue the sampling of tensors on the current streams of their devices."""
        self._digests: dict[str, int] = {}
        views: dict[tuple[torch.device, int], list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        for name, value in values:
            try:
                if isinstance(value, torch.Tensor) and not _is_small(value):
                    view = _sampled(value)
                    views.setdefault((view.device, view.itemsize), []).append((name, value, view))
                else:
                    self._digests[name] = _digest(value)
            except unless_interrupt(Exception):  # perhaps from a user's class; the comparison must not fail the save
                continue
        self._sampled: list[tuple[list[str], list[int], list[bytes], torch.Tensor]] = []
        for its in views.values():
            forms = [f"{tensor.dtype} {tuple(tensor.shape)}".encode() for _, tensor, _ in its]
            sizes = [view.nbytes for _, _, view in its]
            with contextlib.suppress(RuntimeError):  # a device may lack this operation
                together = torch.cat([view for _, _, view in its])
                self._sampled.append(([name for name, _, _ in its], sizes, forms, together))

    @property
    def on_devices(self) -> list[torch.Tensor]:
        """The samples that have to be ready before ``digests`` is called."""
        return [tensor for *_, tensor in self._sampled if not tensor.is_cpu]

    def digests(self, ready: ReadyEvents) -> dict[str, int]:
        """Return a number for each value, by name. Equal values have equal numbers.

        ``ready``: the events that the same thread recorded after it made this sample.
        """
        for names, sizes, forms, together in self._sampled:
            data, at = _on_host(together, ready).view(torch.uint8).numpy().tobytes(), 0
            for name, nbytes, form in zip(names, sizes, forms, strict=True):
                self._digests[name] = _number(hashlib.blake2b(form + data[at : at + nbytes], digest_size=8))
                at += nbytes
        self._sampled.clear()
        return self._digests


def _on_host(tensor: torch.Tensor, ready: ReadyEvents) -> torch.Tensor:
    """Copy a sample from its device. Do not wait for work that was queued on the device after the ``ready`` event."""
    kind = kind_of(tensor.device)
    if kind is None or tensor.device not in ready:
        return tensor.cpu()
    ready[tensor.device].synchronize()
    with kind.use(tensor.device, kind.new_stream(tensor.device)):
        return tensor.cpu()


def _hash(name: str) -> int:
    return zlib.crc32(name.encode(errors="surrogatepass"))


def _value(state_dict: Any, keys: Keys) -> Any:
    for key in keys:
        state_dict = state_dict[key]
    return state_dict


def _number(hasher: Any) -> int:
    return int.from_bytes(hasher.digest(), "little")


def _digest(value: object) -> int:
    """Return a number for a small value. Raise ``ValueError`` if its type is not supported, or it is too large."""
    hasher = hashlib.blake2b(digest_size=8)
    _add(hasher.update, value, _SMALL_BYTES)
    return _number(hasher)


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is compared whole."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.is_cpu and not is_number and tensor.nbytes <= _SMALL_BYTES


@torch.no_grad()
def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements from all over a tensor, as integers in a row. Raise ``ValueError`` if it is not plain."""
    if type(tensor) not in PLAIN or has_no_bytes(tensor) or tensor.is_conj() or tensor.is_neg():
        raise ValueError("it is not compared")
    kind, count = _INTEGERS[tensor.itemsize], tensor.numel()
    few, step = min(count, _SAMPLED), max(1, count // _SAMPLED)
    if tensor.is_contiguous():
        return tensor.as_strided((few,), (step,)).view(kind)
    return tensor[torch.unravel_index(torch.arange(few) * step, tensor.shape)].view(kind)


def _add(add: Callable[[bytes], object], value: Any, left: int) -> int:
    """Describe a value by some bytes. Equal values have equal bytes.

    Args:
        add: Called with the bytes.
        value: A plain value, an array, a tensor, or a dict, list or tuple of these.
        left: Maximum bytes.

    Returns:
        The bytes that are left of the maximum.

    Raises:
        ValueError: The type of the value is not supported, or the value is too large.
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
    """Return the bytes of a tensor that is compared whole; no bytes of any other tensor in a container."""
    if type(tensor) not in PLAIN or has_no_bytes(tensor) or not tensor.data_ptr() or not _is_small(tensor):
        return b""
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
