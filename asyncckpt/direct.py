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
from asyncckpt.progress import Progress
from asyncckpt.source import Source
from asyncckpt.spans import SpanFile, read_pool
from asyncckpt.structure import PLAIN, is_leaf
from asyncckpt.trust import load_object
from asyncckpt.wanted import Wanted, dtype_of
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
        self._wanted: dict[SpanFile, Wanted] = {}
        leaves = _Leaves(state_dict)
        source.metadata()  # nothing in it is needed, but it is a part of the checkpoint, and is checked as all of it
        stored = _stored(source, held)
        for name, tensor in leaves.tensors.items():
            file, item = stored.get(name, _NOWHERE)
            if file is None or item is None or item.kind != "tensor":
                raise _NotPlain(f"{name} is not there, or in pieces, or no tensor")
            # The size says the same, unless whoever wrote the index means harm.
            same = tensor.dtype == dtype_of(item) and [*tensor.shape] == item.shape
            if not same or tensor.nbytes != item.payload_bytes:
                raise _NotPlain(f"{name} is stored in another form")
            self._of(file).whole(tensor, item)
        for name, place in leaves.others.items():
            file, item = stored.get(name, _NOWHERE)
            if file is None or item is None or item.kind != "object":
                raise _NotPlain(f"{name} is not there, or a tensor")
            self._of(file).object(item, partial(self._replace, name, place))
        self._left = left_out(leaves.names(), stored)
        if self._left and not leaves.containers.isdisjoint(self._left):
            raise _NotPlain("DCP looks whether this is of a torch before 2.4")

    def read(self, progress: Progress, *, verify: bool, weights_only: bool) -> None:
        """Fill the state dict. Raises ``DamagedCheckpointError``, ``UntrustedValueError``, ``StorageError``."""
        warn_left_out(self._left, self._path)
        self._weights_only = weights_only
        if progress.shown:
            progress.expect(sum(wanted.nbytes_read(file) for file, wanted in self._wanted.items()))
        with read_pool() as pool:
            for file, wanted in self._wanted.items():
                wanted.read(file, pool, verify=verify, tell=progress.update)

    def _of(self, file: SpanFile) -> Wanted:
        wanted = self._wanted.get(file)
        if wanted is None:
            wanted = self._wanted[file] = Wanted()
        return wanted

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
    missing = set(known).difference(asked := set(asked))
    if not missing:
        return []
    tops = {name.partition(".")[0] for name in asked}
    return sorted(name for name in missing if name.partition(".")[0] in tops)


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


class _Leaves:
    """The values of a state dict, by the names that DCP gives them."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ``_NotPlain``."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.others: dict[str, _Path] = {}
        """All else, by its place."""
        self.containers: set[str] = set()
        """The names of containers with a leaf in them, whatever DCP would call them."""
        self._collect(state_dict, (), "")
        self.containers.discard("")
        if len(self.names()) < len(self.tensors) + len(self.others):
            raise _NotPlain("a name is there twice")

    def names(self) -> set[str]:
        """Of all leaves."""
        return self.tensors.keys() | self.others.keys()

    def _collect(self, container: Any, place: _Path, prefix: str) -> None:
        is_dict = isinstance(container, dict)
        if not is_dict and not isinstance(container, list):
            raise _NotPlain(f"there is a {type(container).__name__}")
        tensors, others = self.tensors, self.others
        before = len(tensors) + len(others)
        for key, value in container.items() if is_dict else enumerate(container):
            name = f"{prefix}{key}"
            if type(value) in PLAIN:
                # One by one: some answers raise for tensors of other kinds.
                if name in tensors or value.layout != torch.strided or value.is_meta or value.is_quantized:
                    raise _NotPlain(f"{name} is there twice, or no plain tensor")
                tensors[name] = value
            elif isinstance(value, torch.Tensor):
                raise _NotPlain(f"{name} is no plain tensor")
            elif not is_leaf(value):
                self._collect(value, (*place, str(key) if is_dict else key), f"{name}.")
            elif name in others:
                raise _NotPlain(f"{name} is there twice")
            else:
                others[name] = (*place, str(key) if is_dict else key)
        if len(tensors) + len(others) > before:
            self.containers.add(prefix[:-1])


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
