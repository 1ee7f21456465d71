"""Loading without a plan: where every value is stored as it is wanted, its bytes go straight to it.

DCP's planner can load any placement into any other. For that it makes some ten objects a tensor, which takes longer
than the bytes of a small one. The indexes of a checkpoint say what stands where just as well, and that is enough for
most states. What is not as plain as that is left to DCP, whole, and so is saying what is wrong with it.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from asyncckpt.errors import CheckpointError
from asyncckpt.source import Source
from asyncckpt.spans import SpanFile, read_pool
from asyncckpt.structure import PLAIN, is_leaf
from asyncckpt.trust import load_object
from asyncckpt.wanted import Wanted, dtype_of, read_wanted, want_object, want_whole
from asyncckpt.worker.manifest import Item

logger = logging.getLogger(__name__)

# Every rank reads the indexes of all ranks. For more than these, DCP's metadata, one file, is the quicker way.
_MOST_FILES = 64

_NOWHERE = (None, None)

_Path = tuple[str | int, ...]


class _NotPlain(Exception):
    """This is for DCP to load, or to refuse."""


class DirectLoad:
    """All of a load but the reading: what goes where."""

    def __init__(self, state_dict: dict[str, Any], source: Source, path: str, held: ExitStack) -> None:
        """For ``state_dict``, from the checkpoint ``path`` in ``source``, whose files are ``held`` open.

        Raises ``_NotPlain``, or what is wrong with the checkpoint.
        """
        self._state_dict = state_dict
        self._path = path
        self._weights_only = True
        self._left: list[str] = []
        self._wanted: dict[SpanFile, list[Wanted]] = {}
        leaves = _leaves(state_dict)
        source.metadata()  # nothing in it is needed, but it is a part of the checkpoint, and is checked as all of it
        stored = _stored(source, held)
        for name, (place, value) in leaves.items():
            file, item = stored.get(name, _NOWHERE)
            if file is None or item is None:
                raise _NotPlain(f"{name} is not there, or in pieces")
            self._wanted.setdefault(file, []).append(self._want(name, place, value, item))
        self._left = left_out(leaves, stored)
        if self._left and not _containers(place for place, _ in leaves.values()).isdisjoint(self._left):
            raise _NotPlain("DCP looks whether this is of a torch before 2.4")

    def read(self, *, verify: bool, weights_only: bool) -> None:
        """Fill the state dict. Raises ``DamagedCheckpointError``, ``UntrustedValueError``, ``StorageError``."""
        warn_left_out(self._left, self._path)
        self._weights_only = weights_only
        with read_pool() as pool:
            for file, wanted in self._wanted.items():
                read_wanted(file, wanted, pool, verify=verify)

    def _want(self, name: str, place: _Path, value: Any, item: Item) -> Wanted:
        if not isinstance(value, torch.Tensor) and item.kind == "object":
            return want_object(item, partial(self._replace, name, place))
        fits = isinstance(value, torch.Tensor) and item.kind == "tensor"
        if not fits or value.dtype != dtype_of(item) or list(value.shape) != item.shape:
            raise _NotPlain(f"{name} is stored in another form")
        return want_whole(value, item)

    def _replace(self, name: str, place: _Path, data: memoryview) -> None:
        loaded = load_object(io.BytesIO(data), name, self._path, weights_only=self._weights_only)
        set_element(self._state_dict, place, loaded)


def draft(state_dict: dict[str, Any], source: Source, path: str, held: ExitStack) -> DirectLoad | None:
    """A load of the checkpoint ``path`` in ``source`` into ``state_dict``; None: that is for DCP.

    ``state_dict`` is without ``Stateful`` values. ``held`` has the open files.
    """
    try:
        return DirectLoad(state_dict, source, path, held)
    except (_NotPlain, CheckpointError) as error:
        logger.debug("%s is loaded by DCP: %s", path, error)
        return None


def left_out(asked: Iterable[str], known: Iterable[str]) -> list[str]:
    """Names that are ``known``, and not ``asked`` for, though others are with the same key at the top."""
    names = set(asked)
    tops = {name.partition(".")[0] for name in names}
    return sorted(name for name in known if name not in names and name.partition(".")[0] in tops)


def warn_left_out(left: Sequence[str], path: str) -> None:
    """A fresh optimizer has no state yet, so none is asked for, and DCP loses its moments in silence."""
    if left:
        logger.warning(
            "%d values of %s were not asked for, and not loaded: %s; if they belong to an optimizer, give it its"
            " state before loading (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict does)",
            len(left),
            path,
            some(left),
        )


def some(names: Sequence[str]) -> str:
    """The first of ``names``, for a message."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def _leaves(state_dict: Mapping[str, Any]) -> dict[str, tuple[_Path, Any]]:
    """The values of ``state_dict`` and their places in it, by the names that DCP gives them."""
    leaves: dict[str, tuple[_Path, Any]] = {}

    def collect(container: Any, place: _Path, prefix: str) -> None:
        is_dict = isinstance(container, dict)
        if not is_dict and not isinstance(container, list):
            raise _NotPlain(f"there is a {type(container).__name__}")
        for key, value in container.items() if is_dict else enumerate(container):
            name = f"{prefix}{key}"
            here = (*place, str(key) if is_dict else key)
            if not is_leaf(value):
                collect(value, here, f"{name}.")
            elif name in leaves or (isinstance(value, torch.Tensor) and not _is_plain(value)):
                raise _NotPlain(f"{name} is there twice, or no plain tensor")
            else:
                leaves[name] = (here, value)

    collect(state_dict, (), "")
    return leaves


def _containers(places: Iterable[_Path]) -> set[str]:
    return {".".join(map(str, place[:end])) for place in places for end in range(1, len(place))}


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def _stored(source: Source, held: ExitStack) -> dict[str, tuple[SpanFile, Item] | tuple[None, None]]:
    """Where each value is, by its name; nowhere, if it is in pieces."""
    names = source.data_files()
    if len(names) > _MOST_FILES:
        raise _NotPlain("there are many files")
    stored: dict[str, tuple[SpanFile, Item] | tuple[None, None]] = {}
    for name in sorted(names):
        file = held.enter_context(closing(source.open(name)))
        for item in file.index.items:
            stored[item.name] = (file, item) if item.name not in stored else _NOWHERE
    return stored
