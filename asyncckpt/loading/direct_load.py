"""Load without a plan: read the bytes of every value straight into the value, from the place that the indexes name.

DCP's planner makes some ten objects for each tensor, and the first rank has to process the objects of all ranks. For a
small tensor this takes longer than reading its bytes. Without a planner, each rank finds the stored boxes of a tensor
in the indexes, and reads the boxes that overlap its own part. If a state is not plain, DCP loads the whole state, and
reports its errors.
"""

from __future__ import annotations

import functools
import io
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncckpt.errors import CheckpointError, OutOfMemoryError
from asyncckpt.format.index import Item
from asyncckpt.loading.data_file import ChecksummedFile, StoredFile, read_pool
from asyncckpt.loading.device_buffers import DeviceBuffers
from asyncckpt.loading.host_reads import HostReads
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.read_requests import ReadRequests, dtype_named, has_room
from asyncckpt.loading.source import Source
from asyncckpt.loading.unpickle import load_object
from asyncckpt.planning.forms import shards_in
from asyncckpt.planning.per_rank import of_any_rank
from asyncckpt.planning.structure import PLAIN, Keys, is_leaf, put_leaf

logger = logging.getLogger(__name__)

# Every rank reads the indexes of all ranks. For more files than this, DCP's metadata, which is one file, is faster.
_MOST_FILES = 64

# The files and items in which each value, or each part of a value, is stored, by name.
_Stored = dict[str, "list[tuple[ChecksummedFile, Item]]"]


class _NotPlain(Exception):
    """DCP has to do this load, or to refuse it."""


@dataclass(frozen=True)
class DirectLoad:
    """A prepared load: the ``requests`` that fill ``state_dict``, for each open file of ``source``, in order of names.

    ``path`` is the folder of the checkpoint, for errors. ``host_reads``: the bytes that other ranks of this host need,
    too; None: this rank loads alone, or from memory. ``unexpected`` has the stored values that were not requested,
    and ``left_out`` the values that the caller may have forgotten.
    """

    state_dict: dict[str, Any]
    source: Source
    path: str
    requests: Mapping[ChecksummedFile, ReadRequests]
    left_out: Sequence[str]
    unexpected: Sequence[str]
    host_reads: HostReads | None = None

    def with_host_reads(self, held: ExitStack) -> DirectLoad:
        """Return this load, with ``host_reads`` if all files are in storage, with checksums for the shared bytes.

        ``held`` releases the memory of the reads.
        """
        have_checksums = all(len(file.index.checksums) or not file.index.nbytes for file in self.requests)
        if have_checksums and all(isinstance(file, StoredFile) for file in self.requests):
            with suppress(OutOfMemoryError):  # this rank reads alone
                host_reads = held.enter_context(closing(HostReads(self.requests, self.source.attempt)))
                return replace(self, host_reads=host_reads)
        return self

    def read(self, progress: Progress, *, verify: bool, weights_only: bool, warns: bool) -> None:
        """Fill the state dict.

        Args:
            progress: Receives the number of bytes that are read.
            verify: Whether to compare the checksums.
            weights_only: Whether to refuse values that could run code while they are unpickled.
            warns: Whether to warn about values that were not requested.

        Raises:
            DamagedCheckpointError, UntrustedValueError: Bytes are damaged, or a value could run code.
            StorageError: Storage cannot be read.
        """
        if warns:
            warn_left_out(self.left_out, self.path)
        if progress.shown:
            progress.expect(sum(requests.nbytes_read(file) for file, requests in self.requests.items()))
        with ExitStack() as at_end, DeviceBuffers() as buffers, read_pool(self.path) as pool:
            if self.host_reads is not None:
                at_end.callback(self.host_reads.finish)
                self.host_reads.join()
            metadata = pool.submit(self.source.metadata)  # only to compare its checksum
            for file, requests in self.requests.items():
                for (name, keys), data in requests.read(file, pool, buffers, progress.update, verify=verify):
                    value = load_object(io.BytesIO(data), name, self.path, weights_only=weights_only)
                    put_leaf(self.state_dict, keys, value)
            metadata.result()


def draft(state_dict: dict[str, Any], source: Source, path: str, held: ExitStack) -> DirectLoad | None:
    """Compare a state dict with the stored values.

    Args:
        state_dict: The state to load, in place; without ``Stateful`` values.
        source: The files of the checkpoint.
        path: Its folder, for errors.
        held: Closes the files that are opened.

    Returns:
        The prepared load; None: DCP has to load the state, or to report its errors.
    """
    try:
        leaves = _Leaves(state_dict)
        files = _opened(source, held)
        stored = _stored(files)
        asked = leaves.tensors.keys() | leaves.others.keys()
        left = left_out(state_dict, asked, stored)
        if not leaves.containers.isdisjoint(left):
            raise _NotPlain("DCP looks whether this is of a torch before 2.4")
        with torch.no_grad():  # so that a DTensor's part is no view of the DTensor
            found = _requests(leaves, stored)
        requests = {file: found[file] for file in files}
        return DirectLoad(state_dict, source, path, requests, left, unexpected(asked, stored))
    except (_NotPlain, CheckpointError) as error:
        logger.debug("%s is loaded by DCP: %s", path, error)
        return None


def unexpected(asked: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the names that are ``known`` but not ``asked`` for, without per-rank values of other ranks."""
    others = set(known).difference(asked := set(asked))
    per_rank = set(map(of_any_rank, asked)).difference(asked) if others else ()
    return sorted(name for name in others if of_any_rank(name) not in per_rank)


def left_out(state_dict: Mapping[str, Any], asked: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the stored names that the caller may have forgotten to request.

    A name counts if it is ``known`` but not ``asked`` for, and either another name with the same top-level key is asked
    for, or the name lies in an empty container of ``state_dict``. A per-rank value does not count if the value of this
    rank, or of any rank, is asked for.
    """
    missing = set(known).difference(asked := set(asked))
    if not missing:
        return []
    tops = {name.partition(".")[0] for name in asked}
    empty = tuple(each for key, value in state_dict.items() if str(key) not in tops for each in _empty(value, str(key)))
    per_rank = set(map(of_any_rank, asked)).difference(asked)
    return sorted(
        name
        for name in missing
        if of_any_rank(name) not in per_rank and (name.startswith(empty) or name.partition(".")[0] in tops)
    )


def _empty(container: Any, name: str) -> Iterator[str]:
    """Yield the name prefixes of values that would lie in the empty containers within ``container``."""
    if isinstance(container, Mapping | list):
        if not container:
            yield f"{name}."
        for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
            yield from _empty(value, f"{name}.{key}")


def warn_left_out(left: Sequence[str], path: str) -> None:
    """Warn about forgotten values.

    The dict of a fresh optimizer has no state yet, and a dict may get its keys later. DCP skips such values silently.
    """
    if left:
        logger.warning(
            "%d values of %s were not asked for, and not loaded: %s; for an optimizer, put the optimizer itself into"
            " the state, or make its dict by get_optimizer_state_dict; give another dict its keys",
            len(left),
            path,
            some(left),
        )


def some(names: Sequence[str]) -> str:
    """Return the first five of ``names``, and the number of other names, as text for a message."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


class _Leaves:
    """The values of a state dict, by the names that DCP gives them."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        """Collect the values of ``state_dict``. Raises ``_NotPlain``."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.others: dict[str, Keys] = {}  # values that are no tensors: the keys that lead to each
        self.containers: set[str] = set()  # names of the containers that have a leaf in them
        self._collect(state_dict, (), "")
        self.containers.discard("")
        if shards_in(list(self.tensors.values())):
            raise _NotPlain("a tensor is a part of a larger one")
        if not self.tensors.keys().isdisjoint(self.others):
            raise _NotPlain("a name is there twice")

    def _collect(self, container: Any, keys: Keys, prefix: str) -> None:
        is_dict = isinstance(container, dict)
        if not is_dict and not isinstance(container, list):
            raise _NotPlain(f"there is a {type(container).__name__}")
        tensors, others = self.tensors, self.others
        before = len(tensors) + len(others)
        for key, value in container.items() if is_dict else enumerate(container):
            name = f"{prefix}{key}"
            if type(value) in PLAIN:
                # Keep the short-circuit, because some of these checks raise for tensors of other kinds.
                if name in tensors or value.layout != torch.strided or value.is_meta or value.is_quantized:
                    raise _NotPlain(f"{name} is there twice, or no plain tensor")
                tensors[name] = value
            elif type(value) is DTensor and name not in tensors and not value.is_meta:
                tensors[name] = value
            elif isinstance(value, torch.Tensor):
                raise _NotPlain(f"{name} is no plain tensor")
            elif not is_leaf(value):
                self._collect(value, (*keys, key), f"{name}.")
            elif name in others:
                raise _NotPlain(f"{name} is there twice")
            else:
                others[name] = (*keys, key)
        if len(tensors) + len(others) > before:
            self.containers.add(prefix[:-1])


def _opened(source: Source, held: ExitStack) -> list[ChecksummedFile]:
    names = source.data_files()
    if len(names) > _MOST_FILES:
        raise _NotPlain("there are many files")
    return [held.enter_context(closing(source.open(name))) for name in sorted(names)]


def _stored(files: Sequence[ChecksummedFile]) -> _Stored:
    """Return the places of each value, by name."""
    stored: _Stored = {}
    for file in files:
        for item in file.index.items:
            stored.setdefault(item.name, []).append((file, item))
    return stored


def _requests(leaves: _Leaves, stored: _Stored) -> defaultdict[ChecksummedFile, ReadRequests]:
    requests: defaultdict[ChecksummedFile, ReadRequests] = defaultdict(ReadRequests)
    # Cache the results, because many layers have the same shapes.
    part_of, pieces_of = functools.cache(_part_of), functools.cache(_pieces_of)
    for name in _request_rows(leaves.tensors, stored, requests):
        tensor, found = leaves.tensors[name], stored.get(name, ())
        shape = tensor.shape
        if type(tensor) is DTensor:
            part = part_of(shape, tensor.device_mesh, tensor.placements)
            local = tensor.to_local()
            if type(local) not in PLAIN or local.layout != torch.strided or local.shape != part.lengths:
                raise _NotPlain(f"{name} is no plain tensor on this rank")
        else:
            part, local = _Box((0,) * len(shape), shape), tensor
        if not found or not has_room(local):
            raise _NotPlain(f"{name} is not there, or has no memory to fill")
        for _, item in found:
            if not _is_of(item, tensor.dtype):
                raise _NotPlain(f"{name} is stored in another form")
        for piece in pieces_of(shape, part, tuple([_Box((*item.offsets,), (*item.shape,)) for _, item in found])):
            file, item = found[piece.number]
            if piece.stored is None:
                requests[file].whole(local, item)
            else:
                requests[file].box(_narrowed(local, piece.place), item, *piece.stored)
    for name, keys in leaves.others.items():
        found = stored.get(name, ())
        if len(found) != 1 or found[0][1].kind != "object":
            raise _NotPlain(f"{name} is not there, or a tensor")
        requests[found[0][0]].object(found[0][1], (name, keys))
    return requests


def _request_rows(
    tensors: Mapping[str, torch.Tensor], stored: _Stored, requests: Mapping[ChecksummedFile, ReadRequests]
) -> Iterable[str]:
    """Request all tensors that are plain rows of bytes, file by file. Return the names of all other tensors."""
    plain: defaultdict[ChecksummedFile, list[tuple[str, torch.Tensor, Item]]] = defaultdict(list)
    others = []
    for name, tensor in tensors.items():
        found = stored.get(name, ())
        if len(found) == 1 and type(tensor) in PLAIN:
            plain[found[0][0]].append((name, tensor, found[0][1]))
        else:
            others.append(name)
    for file, its in plain.items():
        names, *columns = zip(*its, strict=True)
        if not requests[file].rows(*columns):
            others += names
    return others


def _is_of(item: Item, dtype: torch.dtype) -> bool:
    """Return whether the item is a tensor of that dtype. Check its size, too, because an index may be forged."""
    is_such = item.kind == "tensor" and dtype_named(item.dtype) == dtype
    return is_such and item.payload_bytes == dtype.itemsize * math.prod(item.shape)


class _Box(NamedTuple):
    """A part of a tensor, or of another box: its offsets and lengths in each dimension, in elements."""

    offsets: Sequence[int]
    lengths: Sequence[int]


class _Piece(NamedTuple):
    """The overlap of the stored part ``number`` and the part of this rank.

    ``place`` is the overlap's box in this rank's part, ``stored`` its box in the stored part. ``stored`` is None if
    both parts are the same.
    """

    number: int
    place: _Box
    stored: _Box | None


def _part_of(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> _Box:
    """Return the part of this rank. Raises ``_NotPlain``."""
    if not {Shard, Replicate}.issuperset(map(type, placements)) or mesh.get_coordinate() is None:
        raise _NotPlain("a DTensor is placed in a way of its own")
    lengths, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return _Box(tuple(offsets), torch.Size(lengths))


def _pieces_of(shape: torch.Size, part: _Box, boxes: Sequence[_Box]) -> Sequence[_Piece]:
    """Return the pieces that fill ``part`` of a tensor of that ``shape``. ``boxes`` are the stored parts of the tensor.

    Raises ``_NotPlain`` if the stored parts are not the whole tensor, each element once.
    """
    ends = [tuple(map(add, *box)) for box in boxes]
    is_whole = sum(math.prod(box.lengths) for box in boxes) == math.prod(shape)
    is_once = len({box.offsets for box in boxes}) == len(boxes)
    if not is_whole or not is_once or {*map(len, ends)} != {len(shape)} or tuple(map(max, *ends, ends[0])) != shape:
        raise _NotPlain("it is stored in another shape")
    pieces, limits = [], tuple(map(add, *part))
    for number, (box, end) in enumerate(zip(boxes, ends, strict=True)):
        begins = tuple(map(max, part.offsets, box.offsets))
        lengths = tuple(map(sub, map(min, limits, end), begins))
        if min(lengths, default=1) > 0:
            place = _Box(tuple(map(sub, begins, part.offsets)), lengths)
            piece = _Box(tuple(map(sub, begins, box.offsets)), lengths)
            pieces.append(_Piece(number, place, None if lengths == part.lengths == box.lengths else piece))
    if sum(math.prod(piece.place.lengths) for piece in pieces) != math.prod(part.lengths):
        raise _NotPlain("it is stored with gaps, or twice")
    return pieces


def _narrowed(tensor: torch.Tensor, box: _Box) -> torch.Tensor:
    found = tensor.detach()
    for dim, (begin, length) in enumerate(zip(*box, strict=True)):
        found = found if length == found.shape[dim] else found.narrow(dim, begin, length)
    return found
