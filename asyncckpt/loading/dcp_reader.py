"""Load by DCP's planner. The planner decides which bytes go where, and the readers here fetch them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import os
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from asyncckpt.errors import DamagedCheckpointError, MismatchError, StorageError, unless_interrupt
from asyncckpt.format.index import Item
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.loading.data_file import ChecksummedFile, read_pool
from asyncckpt.loading.device_buffers import DeviceBuffers
from asyncckpt.loading.direct_load import left_out, some, unexpected, warn_left_out
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.read_requests import (
    ReadRequests,
    copy_converted,
    dtype_named,
    has_room,
    is_lossy,
    warn_out_of_range,
)
from asyncckpt.loading.source import Source, StorageSource
from asyncckpt.loading.unpickle import load_metadata, load_object
from asyncckpt.planning.forms import has_shards, is_partial
from asyncckpt.planning.structure import PLAIN, Keys, has_no_bytes, leaf_keys, put_leaf
from asyncckpt.ranks.ranks import cpu_group, many
from asyncckpt.storage import absolute, is_address, storage_for
from asyncckpt.storage.storage import FileStamp

logger = logging.getLogger(__name__)

_LARGEST = 1 << 63  # every size and every offset is smaller


def check_metadata(metadata: Metadata, path: str) -> None:
    """Raise ``DamagedCheckpointError`` if the metadata of ``path`` has a type or size that DCP would not write."""
    try:
        for name, about in metadata.state_dict_metadata.items():
            if not isinstance(name, str) or not _is_value(about):
                raise ValueError(f"the entry {name!r}")
        for index, place in (metadata.storage_data or {}).items():
            name = index.fqn
            if not (isinstance(index, MetadataIndex) and isinstance(name, str) and _is_place(place)):
                raise ValueError(f"the place of {name!r}")
            its = metadata.state_dict_metadata.get(name)
            if isinstance(its, TensorStorageMetadata) and not _are_sizes(index.offset or its.size, len(its.size)):
                raise ValueError(f"the part of {name!r} that is stored")
    except unless_interrupt(Exception) as error:  # unpickled attributes may be missing, or be of any type
        raise DamagedCheckpointError(
            f"{METADATA_NAME} is damaged: {type(error).__name__}: {error}", path=path
        ) from error


def _is_value(about: Any) -> bool:
    if not isinstance(about, TensorStorageMetadata):
        return isinstance(about, BytesStorageMetadata)
    ndim = len(about.size)
    is_right = isinstance(about.properties.dtype, torch.dtype) and _are_sizes(about.size, ndim)
    return is_right and all(
        isinstance(each, ChunkStorageMetadata) and _are_sizes(each.offsets, ndim) and _are_sizes(each.sizes, ndim)
        for each in about.chunks
    )


def _is_place(place: Any) -> bool:
    return isinstance(place.relative_path, str) and _are_sizes((place.offset, place.length), 2)


def _are_sizes(numbers: Any, count: int) -> bool:
    """Return whether these are ``count`` sizes or offsets within the limit."""
    return isinstance(numbers, tuple | list) and len(numbers) == count and all(map(_is_size, numbers))


def _is_size(number: Any) -> bool:
    return isinstance(number, Integral) and 0 <= int(number) < _LARGEST


def load_by_dcp(state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **options: Any) -> None:
    """Call ``torch.distributed.checkpoint.load`` in a way that works with every version of torch.

    Args:
        state_dict: The state to load, in place.
        process_group: The ranks that load together; None: all ranks of the job.
        no_dist: Whether this process loads alone.
        options: The other arguments of ``torch.distributed.checkpoint.load``, by name.
    """
    with warnings.catch_warnings(), contextlib.ExitStack() as held:
        # Suppress the warning that only one process loads. A job of one process expects this.
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        if "no_dist" in inspect.signature(state_dict_loader.load).parameters:
            options["no_dist"] = no_dist
        elif no_dist and many(None):  # torch before 2.7 lacks the argument; a group of one rank has the same effect
            process_group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            held.callback(dist.destroy_process_group, process_group)
        if not no_dist and many(process_group):
            process_group = cpu_group(process_group)  # otherwise DCP sends the messages of its planners over devices
        state_dict_loader.load(state_dict, process_group=process_group, **options)


def read_stock_metadata(path: str, *, weights_only: bool) -> Metadata:
    """Return the metadata of the checkpoint ``path``, which stock DCP wrote, after checking it.

    The metadata names only files of that folder. Raises as ``load_metadata``, and ``StorageError``.
    """
    data = storage_for(path).read(os.path.join(path, METADATA_NAME))
    metadata = load_metadata(data, path, weights_only=weights_only)
    check_metadata(metadata, path)
    for place in (metadata.storage_data or {}).values():
        if (name := str(place.relative_path)).startswith("/") or ".." in name.split("/"):
            raise DamagedCheckpointError(f"{METADATA_NAME} names a file of another folder: {name!r}", path=path)
    return metadata


class _LookedAt:
    """Wrap a planner that unpickles any bytes, to refuse bytes that could run code before the planner gets them."""

    def __init__(self, planner: LoadPlanner, path: str) -> None:
        self._planner, self._path = planner, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        load_object(value, read_item.dest_index.fqn, self._path, weights_only=True)
        value.seek(0)
        self._planner.load_bytes(read_item, value)


def _looked_at(planner: LoadPlanner, path: str, *, weights_only: bool) -> LoadPlanner:
    """Return the planner, wrapped if ``weights_only`` so that bytes that could run code are refused.

    Only a planner that unpickles as DCP's does is wrapped. A planner with its own ``load_bytes`` is returned unchanged,
    because only that planner knows the format of the bytes.
    """
    if not weights_only or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        return planner
    return cast("LoadPlanner", _LookedAt(planner, path))


class _Converting:
    """Wrap a planner for DCP's own reader, to convert stored tensors to the dtype of the tensor to fill.

    Count the values that are out of range of that dtype.
    """

    def __init__(self, planner: LoadPlanner, metadata: Metadata) -> None:
        self._planner, self._known = planner, metadata.state_dict_metadata
        self.out_of_range: Counter[str] = Counter()
        self._into: dict[int, torch.Tensor] = {}  # by the address of the temporary tensor that DCP fills

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        into = self._planner.resolve_tensor(read_item)
        stored = self._known[read_item.storage_index.fqn]
        if not isinstance(stored, TensorStorageMetadata) or type(into) not in PLAIN:
            return into
        if stored.properties.dtype == into.dtype:
            return into
        filled = torch.empty(into.shape, dtype=stored.properties.dtype, device=into.device)
        self._into[filled.data_ptr()] = into
        return filled

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if (into := self._into.pop(tensor.data_ptr(), None)) is not None:
            if count := copy_converted(into.detach(), tensor):
                self.out_of_range[read_item.dest_index.fqn] += count
            tensor = into
        self._planner.commit_tensor(read_item, tensor)


class StockReader(FileSystemReader):
    """DCP's own reader, for checkpoints of DCP, with checks of its metadata and of its files."""

    def __init__(self, path: str, *, weights_only: bool) -> None:
        super().__init__(path)
        self._weights_only = weights_only
        self._stamp: FileStamp | None = None  # stamp of the metadata file, taken before it was read
        self._metadata = Metadata({})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        (self._stamp,) = self._stamps([METADATA_NAME])
        metadata = read_stock_metadata(str(self.path), weights_only=self._weights_only)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._metadata = metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the data. Raise if the checkpoint was replaced during the read, because nothing else would notice.

        Open each file first: DCP would block for ever if a file is a pipe.
        """
        path = str(self.path)
        names = [*{self.storage_data[item.storage_index].relative_path for item in plan.items}]
        for name in names:
            storage_for(path).open(os.path.join(path, name)).close()
        before = self._stamps(names)
        planner = _looked_at(planner, path, weights_only=self._weights_only)
        converting = _Converting(planner, self._metadata)
        read = super().read_data(plan, cast("LoadPlanner", converting))
        warn_out_of_range(converting.out_of_range, path)
        if self._stamps([METADATA_NAME, *names]) != [self._stamp, *before]:
            raise StorageError("this checkpoint was changed or replaced while it was read: try again", path=path)
        return read

    def _stamps(self, names: Sequence[str]) -> list[FileStamp | None]:
        return [storage_for(str(self.path)).stamp(os.path.join(self.path, name)) for name in names]


class CheckpointReader(StorageReader):
    """Storage reader for checkpoints of asyncckpt, for ``torch.distributed.checkpoint.load(storage_reader=...)``."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        weights_only: bool = True,
        source: Source | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Open a checkpoint.

        Args:
            path: The folder of the checkpoint.
            verify: Whether to compare the checksums.
            weights_only: Whether to refuse values that could run code while they are unpickled.
            source: The source of its files; None: the folder ``path``.
            progress: Receives the number of bytes that are read; None: no progress bar.

        Raises:
            CheckpointNotFoundError, DamagedCheckpointError: There is no checkpoint, or its manifest is damaged.
        """
        self._verify = verify
        self._weights_only = weights_only
        self._progress = progress or Progress("loading", shown=False)
        self._metadata: Metadata | None = None
        self._path = absolute(path)
        self._source = source or StorageSource(self._path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and absolute(checkpoint_id) != self._path:
            self._path = absolute(checkpoint_id)
            self._source = StorageSource(self._path)
            self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = load_metadata(self._source.metadata(), self._path, weights_only=self._weights_only)
            save_id = getattr(self._metadata.storage_meta, "save_id", None)  # missing if the checkpoint is in memory
            # Use the present path instead of the stored path, because the checkpoint may have been moved.
            place = self._path if is_address(self._path) else Path(self._path)
            self._metadata.storage_meta = StorageMeta(place, save_id=save_id, load_id=str(uuid.uuid4()))
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        storage: Mapping[Any, Any] = self._metadata.storage_data if self._metadata is not None else {}
        per_file: dict[str, list[tuple[ReadItem, int]]] = {}
        # Sizes of stored values, by offset: a first estimate of the bytes to read.
        sizes: dict[str, dict[int, int]] = {}
        for item in plan.items:
            stored = storage[item.storage_index]
            per_file.setdefault(stored.relative_path, []).append((item, stored.offset))
            sizes.setdefault(stored.relative_path, {})[stored.offset] = stored.length
        expected = {name: sum(each.values()) for name, each in sizes.items()}
        self._progress.expect(sum(expected.values()))
        planner = _looked_at(planner, self._path, weights_only=self._weights_only)
        all_filled: list[tuple[ReadItem, torch.Tensor]] = []
        out_of_range: Counter[str] = Counter()
        with DeviceBuffers() as buffers, read_pool(self._path) as pool:
            for name, items in sorted(per_file.items()):
                with contextlib.closing(self._source.open(name)) as file:
                    requests, filled = self._requests(file, items, planner)
                    if self._progress.shown:
                        self._progress.expect(requests.nbytes_read(file) - expected[name])
                    for item, data in requests.read(file, pool, buffers, self._progress.update, verify=self._verify):
                        planner.load_bytes(item, io.BytesIO(data))
                    out_of_range += requests.out_of_range
                all_filled += filled
        for item, tensor in all_filled:  # all copies are done now, also to devices
            planner.commit_tensor(item, tensor)
        warn_out_of_range(out_of_range, self._path)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _requests(
        self, file: ChecksummedFile, items: list[tuple[ReadItem, int]], planner: LoadPlanner
    ) -> tuple[ReadRequests, list[tuple[ReadItem, torch.Tensor]]]:
        """Return the requests to ``file`` for ``items`` (each with its offset), and the tensors that they fill."""
        stored: dict[int, list[Item]] = {}
        for each in file.index.items:  # tied tensors are stored once, under several names
            stored.setdefault(each.at, []).append(each)
        sizes = functools.cache(self._sizes)
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        requests = ReadRequests()
        for item, at in items:
            index = item.storage_index
            found = _same(index, sizes(index.fqn), stored.get(at, []))
            if found is None:
                there = ", ".join(f"{each.name!r} ({each.kind} of {each.shape})" for each in stored.get(at, []))
                raise DamagedCheckpointError(
                    f".metadata has {index.fqn!r} at {at:,} of this file, and its index has {there or 'nothing'}: they"
                    " are not of one checkpoint",
                    path=file.path,
                )
            if item.type == LoadItemType.BYTE_IO:
                requests.object(found, item)
                continue
            tensor = planner.resolve_tensor(item).detach()
            if tuple(tensor.shape) != tuple(item.lengths):
                raise MismatchError(
                    f"{item.dest_index.fqn!r} has the shape {tuple(tensor.shape)} and {tuple(item.lengths)} is stored",
                    path=file.path,
                )
            # This check is for other planners. The default planner has already done it.
            if is_lossy(dtype := dtype_named(found.dtype), tensor.dtype):
                raise MismatchError(f"{item.dest_index.fqn!r} {_lost(tensor.dtype, dtype)}", path=file.path)
            filled.append((item, tensor))
            requests.box(tensor, found, item.storage_offsets, item.lengths)
        return requests, filled

    def _sizes(self, name: str) -> dict[tuple[int, ...], list[int]] | None:
        """Return the shapes of the chunks of a tensor, by offset, from DCP's metadata; None: the value is an object."""
        known = self._metadata.state_dict_metadata[name] if self._metadata is not None else None
        if not isinstance(known, TensorStorageMetadata):
            return None
        return {tuple(chunk.offsets): list(chunk.sizes) for chunk in known.chunks}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _same(
    index: MetadataIndex, sizes: Mapping[tuple[int, ...], list[int]] | None, found: Sequence[Item]
) -> Item | None:
    """Return the item of ``found`` that matches DCP's metadata: the same name, chunk and shape.

    The dtype is not compared, because a user's planner may save another dtype than it declares.
    """
    expected: list[object] = [index.fqn, "object", [], []]
    if sizes is not None:
        offsets = index.offset or (0,) * len(next(iter(sizes), ()))
        expected = [index.fqn, "tensor", list(offsets), sizes.get(tuple(offsets))]
    return next((item for item in found if [item.name, item.kind, item.offsets, item.shape] == expected), None)


class CheckingPlanner(DefaultLoadPlanner):
    """DCP's default planner with errors of this package. One error names all keys that do not fit."""

    def __init__(self, path: str, *, weights_only: bool, warns: bool = True, strict: bool = True) -> None:
        """Plan nothing yet.

        Args:
            path: The folder of the checkpoint, for errors.
            weights_only: Whether to refuse values that could run code while they are unpickled.
            warns: Whether to warn about values that were not requested.
            strict: Raise if the checkpoint lacks a value. With False, the value stays unchanged.
        """
        super().__init__(allow_partial_load=not strict)
        self._path = path
        self._weights_only = weights_only
        self._warns = warns
        self.missing: Sequence[str] = ()
        """The values that the checkpoint lacks, once there is a plan."""
        self.unexpected: Sequence[str] = ()
        """The values of the checkpoint that were not requested."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_object(value, name, self._path, weights_only=self._weights_only)
        if name in self._keys:
            put_leaf(self.original_state_dict, self._keys[name], loaded)
        else:  # the name has the form of DCP before torch 2.4
            set_element(self.original_state_dict, self.mappings[name], loaded)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        # DCP would put a loaded value under a text key. If the caller's key is a number, that is another key.
        self._keys = {".".join(map(str, keys)): keys for keys in leaf_keys(state_dict)}
        if not dist.is_initialized():  # otherwise DCP makes tensors on the device of the process group
            self._refuse_meta(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        known: Mapping[str, Any] = self.metadata.state_dict_metadata if self.metadata is not None else {}
        self.missing = [name for name in self.state_dict if name not in known]
        self.unexpected = unexpected(self.state_dict, known)
        left = left_out(self.original_state_dict, self.state_dict, known) if self.missing or self._warns else []
        if self.missing and not self.allow_partial_load:
            others = left  # often the same names with a prefix, such as DDP's
            if not others and not _tops(self.missing) <= _tops(known):  # the checkpoint lacks a top-level key
                others = sorted(_tops(self.unexpected))
            there = f"; it has {some(others)}, which were not asked for" if others else ""
            raise MismatchError(
                f"the checkpoint has no {some(self.missing)}; load with strict=False, or leave them out of the state"
                f" dict to load the others{there}",
                path=self._path,
            )
        if self._warns:
            warn_left_out(left, self._path)
        wrong = [
            f"{name!r} {why}"
            for name, value in self.state_dict.items()
            if isinstance(stored := known.get(name), TensorStorageMetadata) and (why := _why_not(value, stored))
        ]
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise MismatchError(f"the state dict does not fit: {'; '.join(wrong[:5])}{more}", path=self._path)
        converted = [
            name
            for name, value in self.state_dict.items()
            if isinstance(value, torch.Tensor)
            and isinstance(stored := known.get(name), TensorStorageMetadata)
            and stored.properties.dtype != value.dtype
        ]
        if converted:
            logger.info(
                "%d tensors of %s are converted to another dtype: %s", len(converted), self._path, some(converted)
            )
        return super().create_local_plan()

    def _refuse_meta(self, state_dict: Any) -> None:
        on_meta = [name for name, keys in self._keys.items() if getattr(_leaf(state_dict, keys), "is_meta", False)]
        if on_meta:
            raise MismatchError(
                f"on the meta device, without memory to fill: {some(on_meta)}; make them on a device first"
                " (torch.nn.Module.to_empty does)",
                path=self._path,
            )


def _tops(names: Iterable[str]) -> set[str]:
    """Return the top-level keys of ``names`` in the state dict."""
    return {name.partition(".")[0] for name in names}


def _leaf(state_dict: Any, keys: Keys) -> Any:
    for key in keys:
        state_dict = state_dict[key]
    return state_dict


def _lost(wanted: torch.dtype, stored: torch.dtype) -> str:
    return f"is {wanted} and {stored} is stored, which would lose: load into {stored}, and convert that"


def _why_not(value: Any, stored: TensorStorageMetadata) -> str | None:
    """Return why a stored tensor cannot be loaded into ``value``; None: it can, or DCP has to decide."""
    if not isinstance(value, torch.Tensor):
        if hasattr(value, "__create_chunk_list__"):
            return None
        return f"is a {type(value).__name__} and a tensor of {tuple(stored.size)} is stored: give a tensor to fill"
    if is_lossy(stored.properties.dtype, value.dtype):
        return _lost(value.dtype, stored.properties.dtype)
    if is_partial(value):
        return f"is a DTensor placed as {list(value.placements)}: load into one that is replicated or sharded"
    if has_shards(value):
        return None
    if stored.size != value.size():
        return f"is {tuple(value.size())} and {tuple(stored.size)} is stored"
    if type(value) in PLAIN and (has_no_bytes(value) or not has_room(value)):
        return "has no memory of its own for each element (it is sparse, quantised, expanded or freed)"
    return None
