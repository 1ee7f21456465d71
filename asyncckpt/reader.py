"""Loading: DCP's planner says which bytes go where, and they are read in large runs, checked, and copied into place."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import logging
import os
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from asyncckpt.catalog import is_ours, read_manifest
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, MismatchError
from asyncckpt.source import FolderSource, Source
from asyncckpt.spans import SpanFile, raise_damage, read_pool
from asyncckpt.trust import load_metadata, load_object
from asyncckpt.worker.manifest import METADATA_NAME, Index, Item
from asyncckpt.worker.storage import reading, translated

logger = logging.getLogger(__name__)

T = TypeVar("T")


def load(
    state_dict: dict[str, Any],
    path: str,
    *,
    planner: LoadPlanner | None = None,
    verify: bool = True,
    weights_only: bool = True,
    process_group: Any = None,
    no_dist: bool = False,
    source: Source | None = None,
) -> None:
    """Load the checkpoint ``path`` into ``state_dict``, in place, as ``torch.distributed.checkpoint.load`` does.

    Tensors are filled where they are, other values replaced, ``Stateful`` ones told; keys of the checkpoint that
    ``state_dict`` has not are left alone. Also reads what stock DCP wrote. With ``verify`` the bytes are checked before
    they are copied, tensor by tensor: after an error part of ``state_dict`` may be loaded.

    With ``weights_only`` no value may run code while it is unpickled, see ``trust.py``. ``source``: where to read from
    (None: the folder ``path``).

    In a job of many ranks all of ``process_group`` (None: of the job) load together, each what its part needs, and what
    goes wrong on one rank is raised on all.

    Raises ``CheckpointNotFoundError``, ``DamagedCheckpointError``, ``MismatchError``, ``UntrustedValueError``,
    ``StorageError``.
    """
    path = os.path.abspath(path)

    def open_reader() -> StorageReader:
        return _open(path, source, held, verify=verify, weights_only=weights_only)

    with contextlib.ExitStack() as held, _without_gc():
        reader = open_reader() if no_dist else on_all(open_reader, process_group)
        planner = planner or _CheckingPlanner(path, weights_only=weights_only)
        try:
            load_by_dcp(
                state_dict, storage_reader=reader, planner=planner, process_group=process_group, no_dist=no_dist
            )
        except CheckpointException as error:
            # DCP wraps what each rank raised; ours go through as they are.
            for failure in error.failures.values():
                cause = failure[0] if isinstance(failure, tuple) else failure
                if isinstance(cause, CheckpointError):
                    raise cause from None
            raise


def load_by_dcp(state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **options: Any) -> None:
    """``torch.distributed.checkpoint.load`` of any torch."""
    with warnings.catch_warnings(), contextlib.ExitStack() as held:
        # That one process alone loads is no news to a job of one process.
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        if "no_dist" in inspect.signature(state_dict_loader.load).parameters:
            options["no_dist"] = no_dist
        elif no_dist and _many(None):  # torch before 2.7: a group of its own is as good
            process_group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            held.callback(dist.destroy_process_group, process_group)
        state_dict_loader.load(state_dict, process_group=process_group, **options)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Planning makes some ten objects a tensor, none of them garbage: looking for that takes longer than all else."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _open(
    path: str, source: Source | None, held: contextlib.ExitStack, *, verify: bool, weights_only: bool
) -> StorageReader:
    """The reader for ``path``, which is ``held`` against removal."""
    if source is None:
        if not os.path.isdir(path):
            raise CheckpointNotFoundError("there is no checkpoint here", path=path)
        with translated("opening", path):
            held.enter_context(reading(path))
    reader: StorageReader
    if source is None and os.path.exists(os.path.join(path, METADATA_NAME)) and not is_ours(path):
        reader = _StockReader(path, weights_only=weights_only)
    else:
        reader = ImageReader(path, verify=verify, weights_only=weights_only, source=source)
    reader.read_metadata()  # so that what is wrong with it is said by us: DCP would make a text of it
    return reader


def on_all(do: Callable[[], T], process_group: Any = None) -> T:
    """What ``do`` returns, unless it raises a ``CheckpointError`` on some rank; then all raise the first of them."""
    failure: CheckpointError | None = None
    try:
        result = do()
    except CheckpointError as error:
        failure = error
    except Exception as error:
        if not _many(process_group):
            raise
        failure = CheckpointError(f"{type(error).__name__}: {error}", rank=dist.get_rank())
    for told in gather(failure, process_group):
        if told is not None:
            raise told
    return result


def from_first(do: Callable[[], T], process_group: Any = None) -> T:
    """What ``do`` returns on the first rank, on all ranks; or the ``CheckpointError`` that it raises there."""
    if not _many(process_group):
        return do()
    answer: list[Any] = [None]
    if dist.get_rank(process_group) == 0:
        try:
            answer[0] = do()
        except CheckpointError as error:
            answer[0] = error
        except Exception as error:  # the others wait
            answer[0] = CheckpointError(f"{type(error).__name__}: {error}", rank=dist.get_rank())
    first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    dist.broadcast_object_list(answer, src=first, group=process_group)
    if isinstance(answer[0], CheckpointError):
        raise answer[0]
    found: T = answer[0]
    return found


def gather(value: T, process_group: Any = None) -> list[T]:
    """What each rank has, in their order."""
    if not _many(process_group):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def _many(process_group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


class _StockReader(FileSystemReader):
    """DCP's own reader, for what DCP wrote, but with an eye on what its metadata names."""

    def __init__(self, path: str, *, weights_only: bool) -> None:
        super().__init__(path)
        self._weights_only = weights_only

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        name = os.path.join(self.path, METADATA_NAME)
        with translated("reading", name), open(name, "rb") as file:
            metadata = load_metadata(file.read(), str(self.path), weights_only=self._weights_only)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class ImageReader(StorageReader):
    """DCP's way to read a checkpoint of ours, for ``torch.distributed.checkpoint.load(storage_reader=...)``."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        weights_only: bool = True,
        source: Source | None = None,
    ) -> None:
        """``source``: where its files are; None: in the folder ``path``.

        Raises ``CheckpointNotFoundError``, ``DamagedCheckpointError``.
        """
        self._verify = verify
        self._weights_only = weights_only
        self._metadata: Metadata | None = None
        self._path = os.path.abspath(os.fspath(path))
        self._source = source or FolderSource(self._path, read_manifest(self._path))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and os.path.abspath(os.fspath(checkpoint_id)) != self._path:
            self._path = os.path.abspath(os.fspath(checkpoint_id))
            self._source = FolderSource(self._path, read_manifest(self._path))
            self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = load_metadata(self._source.metadata(), self._path, weights_only=self._weights_only)
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
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
        for item in plan.items:
            place = storage[item.storage_index]
            per_file.setdefault(place.relative_path, []).append((item, place.offset))
        with read_pool() as pool:
            for name, requests in sorted(per_file.items()):
                self._read_file(name, requests, planner, pool)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(
        self, name: str, requests: list[tuple[ReadItem, int]], planner: LoadPlanner, pool: ThreadPoolExecutor
    ) -> None:
        file = self._source.open(name)
        try:
            stored = _Stored(file.index, file.path)
            wanted = sorted((stored.want(item, at, planner) for item, at in requests), key=lambda want: want.stored.at)
            # Values whose bytes must be brought together first are read a batch at a time, to bound that memory.
            for batch in _batches(wanted):
                _read_batch(file, batch, planner, pool, self._verify)
        finally:
            file.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


# Bytes that are brought together before they can be copied to where they belong, at most, but for one larger tensor.
_BATCH_BYTES = 256 << 20
# Copies of so many bytes let go of Python's lock, so that several threads copy.
_COPY_ALONE_BYTES = 256 << 10


@dataclass
class _Want:
    """Bytes of the file that are wanted, from ``begin`` to ``end``, and the memory they go to.

    ``target`` is that of the destination itself where it is just these bytes in a row, else a buffer, out of which
    ``finish`` copies.
    """

    item: ReadItem
    stored: Item
    begin: int
    end: int
    target: memoryview | None = None
    destination: torch.Tensor | None = None

    @property
    def buffered(self) -> int:
        return 0 if self.target is not None else self.end - self.begin


class _Stored:
    """The items of a data file by where they begin."""

    def __init__(self, index: Index, path: str) -> None:
        self.path = path
        self._items = {item.at: item for item in index.items}

    def want(self, item: ReadItem, at: int, planner: LoadPlanner) -> _Want:
        stored = self._items.get(at)
        if stored is None:
            raise DamagedCheckpointError(f"the index has nothing at {at:,}, and .metadata has", path=self.path)
        if item.type == LoadItemType.BYTE_IO:
            return _Want(item, stored, stored.at, stored.at + stored.nbytes)
        destination = planner.resolve_tensor(item).detach()
        if tuple(destination.shape) != tuple(item.lengths):
            raise MismatchError(
                f"{item.dest_index.fqn!r} has the shape {tuple(destination.shape)} and {tuple(item.lengths)} is stored",
                path=self.path,
            )
        first, count = _extent(stored.shape, item.storage_offsets, item.lengths)
        itemsize = _dtype(stored).itemsize
        begin = stored.payload_at + first * itemsize
        want = _Want(item, stored, begin, begin + count * itemsize, destination=destination)
        plain = (
            destination.is_cpu
            and type(destination) in (torch.Tensor, torch.nn.Parameter)
            and destination.layout == torch.strided
            and destination.is_contiguous()
            and destination.dtype == _dtype(stored)
            and destination.numel() == count
            and not (destination.is_conj() or destination.is_neg())
        )
        if plain:
            want.target = _bytes_of(destination)
        return want


def _batches(wanted: Sequence[_Want]) -> list[list[_Want]]:
    batches: list[list[_Want]] = []
    size = 0
    for want in wanted:
        if not batches or size + want.buffered > _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(want)
        size += want.buffered
    return batches


def _read_batch(
    file: SpanFile, batch: Sequence[_Want], planner: LoadPlanner, pool: ThreadPoolExecutor, verify: bool
) -> None:
    places = [
        (want.begin, want.end, memoryview(bytearray(want.end - want.begin)) if want.target is None else want.target)
        for want in batch
    ]
    starts = [want.stored.at for want in batch]

    def scatter(begin: int, data: memoryview) -> None:
        end = begin + len(data)
        # Stored values do not overlap: the first of these bytes are of the last value that starts at or before them.
        last_before = bisect_right(starts, begin) - 1
        number = bisect_left(starts, starts[last_before]) if last_before >= 0 else 0
        while number < len(places) and starts[number] < end:
            first, last, target = places[number]
            low, high = max(first, begin), min(last, end)
            if low < high:
                _copy(target[low - first : high - first], data[low - begin : high - begin])
            number += 1

    file.read(
        [(begin, end) for begin, end, _ in places if begin < end], scatter, pool, raise_damage if verify else None
    )
    for want, (_, _, data) in zip(batch, places, strict=True):
        _finish(want, data, planner)


def _copy(target: memoryview, source: memoryview) -> None:
    if len(source) < _COPY_ALONE_BYTES:
        target[:] = source
    else:
        numpy.copyto(numpy.asarray(target), numpy.asarray(source))


def _finish(want: _Want, data: memoryview, planner: LoadPlanner) -> None:
    if want.destination is None:
        planner.load_bytes(want.item, io.BytesIO(data))
        return
    if want.target is None and want.destination.numel() > 0:
        source = torch.frombuffer(data, dtype=torch.uint8).view(_dtype(want.stored))
        box = source.as_strided(tuple(want.item.lengths), _strides(want.stored.shape))
        with torch.no_grad():
            want.destination.copy_(box)
    planner.commit_tensor(want.item, want.destination)


def _extent(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The first element of a box in a contiguous tensor, and how many there are up to its last one."""
    if 0 in lengths:
        return 0, 0
    strides = _strides(shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return first, sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + 1


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


def _dtype(item: Item) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, item.dtype)
    return dtype


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _CheckingPlanner(DefaultLoadPlanner):
    """DCP's default planner, that says in our errors, and of all keys at once, what does not fit."""

    def __init__(self, path: str, *, weights_only: bool) -> None:
        super().__init__()
        self._path = path
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_object(value, name, self._path, weights_only=self._weights_only)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    def create_local_plan(self) -> LoadPlan:
        known: Mapping[str, Any] = self.metadata.state_dict_metadata if self.metadata is not None else {}
        missing = [name for name in self.state_dict if name not in known]
        if missing:
            raise MismatchError(
                f"the checkpoint has no {_some(missing)}; leave them out of the state dict to load the others",
                path=self._path,
            )
        asked = {name.partition(".")[0] for name in self.state_dict}
        left = [name for name in known if name not in self.state_dict and name.partition(".")[0] in asked]
        if left:
            # A fresh optimizer has no state yet, so none is asked for, and DCP loses its moments in silence.
            logger.warning(
                "%d values of %s were not asked for, and not loaded: %s; if they belong to an optimizer, give it its"
                " state before loading (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict does)",
                len(left),
                self._path,
                _some(left),
            )
        wrong = [
            f"{name!r} is {tuple(value.size())} and {tuple(stored.size)} is stored"
            for name, value in self.state_dict.items()
            if isinstance(value, torch.Tensor)
            and isinstance(stored := known[name], TensorStorageMetadata)
            and stored.size != value.size()
        ]
        if wrong:
            raise MismatchError(f"shapes do not fit: {'; '.join(wrong[:5])}", path=self._path)
        return super().create_local_plan()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
