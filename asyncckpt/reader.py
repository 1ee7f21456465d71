"""Loading: straight into place where that will do (``direct.py``); else DCP's planner says which bytes go where."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from asyncckpt.catalog import is_ours, read_manifest
from asyncckpt.direct import draft, left_out, some, warn_left_out
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, MismatchError
from asyncckpt.progress import Progress
from asyncckpt.source import FolderSource, Source
from asyncckpt.spans import read_pool
from asyncckpt.structure import stateful_types
from asyncckpt.trust import load_metadata, load_object
from asyncckpt.wanted import Wanted
from asyncckpt.worker.manifest import METADATA_NAME
from asyncckpt.worker.storage import reading, translated

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A load that takes longer has a progress bar.
_LONG_S = 3.0


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
    progress: bool = False,
) -> None:
    """Load the checkpoint ``path`` into ``state_dict``, in place, as ``torch.distributed.checkpoint.load`` does.

    Tensors are filled where they are, other values replaced, ``Stateful`` ones told; keys of the checkpoint that
    ``state_dict`` has not are left alone. Also reads what stock DCP wrote. With ``verify`` all bytes are checked while
    they are copied: after an error part of ``state_dict`` may be loaded, also with bad bytes.

    With ``weights_only`` no value may run code while it is unpickled, see ``trust.py``. ``source``: where to read from
    (None: the folder ``path``). ``progress``: with a bar, see ``Config.progress``.

    In a job of many ranks all of ``process_group`` (None: of the job) load together, each what its part needs, and what
    goes wrong on one rank is raised on all.

    Raises ``CheckpointNotFoundError``, ``DamagedCheckpointError``, ``MismatchError``, ``UntrustedValueError``,
    ``StorageError``.
    """
    path = os.path.abspath(path)
    ranks = False if no_dist else process_group
    keys = sorted(state_dict, key=str)  # on all ranks the same, for what Stateful values may have to ask each other
    kinds = stateful_types(state_dict)
    states = {key: state_dict[key].state_dict() if type(state_dict[key]) in kinds else state_dict[key] for key in keys}
    shown = progress and _is_first()
    with contextlib.ExitStack() as held, _without_gc(), _unwrapped():
        bar = held.enter_context(Progress("loading", delay=_LONG_S, shown=shown))
        found = on_all(lambda: source or _find(path, held), ranks)
        plain = planner is None and found is not None
        drafted = on_all(lambda: draft(states, found, path, held) if plain and found is not None else None, ranks)
        if all(gather(drafted is not None, ranks)) and drafted is not None:
            with _wrapped():
                on_all(partial(drafted.read, bar, verify=verify, weights_only=weights_only), ranks)
        else:
            reader = on_all(lambda: _reader(path, found, bar, verify=verify, weights_only=weights_only), ranks)
            planner = planner or _CheckingPlanner(path, weights_only=weights_only)
            load_by_dcp(states, storage_reader=reader, planner=planner, process_group=process_group, no_dist=no_dist)
    for key in keys:
        if type(state_dict[key]) in kinds:
            state_dict[key].load_state_dict(states[key])
        else:
            state_dict[key] = states[key]


@contextlib.contextmanager
def _wrapped() -> Iterator[None]:
    """What a value's own code raises, as DCP would raise it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointException("read", {0: _wrap_exception(error)}) from error


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Our errors as they are: DCP wraps what each rank raised."""
    try:
        yield
    except CheckpointException as error:
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


def _find(path: str, held: contextlib.ExitStack) -> Source | None:
    """The checkpoint ``path``, which is ``held`` against removal; None: stock DCP wrote it."""
    if not os.path.isdir(path):
        raise CheckpointNotFoundError("there is no checkpoint here", path=path)
    with translated("opening", path):
        held.enter_context(reading(path))
    if os.path.exists(os.path.join(path, METADATA_NAME)) and not is_ours(path):
        return None
    return FolderSource(path, read_manifest(path))


def _reader(path: str, source: Source | None, progress: Progress, *, verify: bool, weights_only: bool) -> StorageReader:
    """For DCP."""
    reader: StorageReader
    if source is None:
        reader = _StockReader(path, weights_only=weights_only)
    else:
        reader = ImageReader(path, verify=verify, weights_only=weights_only, source=source, progress=progress)
    reader.read_metadata()  # so that what is wrong with it is said by us: DCP would make a text of it
    return reader


def on_all(do: Callable[[], T], process_group: Any = None) -> T:
    """What ``do`` returns, unless it raises a ``CheckpointError`` on some rank; then all raise the first of them.

    Here and below ``process_group`` is None for the whole job, False for this process alone.
    """
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
    if process_group is False or not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(process_group) > 1


def _is_first() -> bool:
    """Whether this is the first rank of the job, which speaks for all."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


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
        progress: Progress | None = None,
    ) -> None:
        """``source``: where its files are; None: in the folder ``path``. ``progress`` is told of what is read.

        Raises ``CheckpointNotFoundError``, ``DamagedCheckpointError``.
        """
        self._verify = verify
        self._weights_only = weights_only
        self._progress = progress or Progress("", shown=False)
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
        sizes: dict[str, dict[int, int]] = {}  # of what is stored, by its place: a first guess at what is to be read
        for item in plan.items:
            place = storage[item.storage_index]
            per_file.setdefault(place.relative_path, []).append((item, place.offset))
            sizes.setdefault(place.relative_path, {})[place.offset] = place.length
        expected = {name: sum(each.values()) for name, each in sizes.items()}
        self._progress.expect(sum(expected.values()))
        with read_pool() as pool:
            for name, requests in sorted(per_file.items()):
                self._read_file(name, requests, expected[name], planner, pool)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(
        self,
        name: str,
        requests: list[tuple[ReadItem, int]],
        expected: int,
        planner: LoadPlanner,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Of which ``expected`` bytes were expected."""
        file = self._source.open(name)
        try:
            stored = {item.at: item for item in file.index.items}
            filled: list[tuple[ReadItem, torch.Tensor]] = []
            wanted = Wanted()
            for item, at in requests:
                if at not in stored:
                    raise DamagedCheckpointError(f"the index has nothing at {at:,}, and .metadata has", path=file.path)
                if item.type == LoadItemType.BYTE_IO:
                    wanted.object(stored[at], partial(_load_bytes, planner, item))
                    continue
                tensor = planner.resolve_tensor(item).detach()
                if tuple(tensor.shape) != tuple(item.lengths):
                    raise MismatchError(
                        f"{item.dest_index.fqn!r} has the shape {tuple(tensor.shape)} and {tuple(item.lengths)} is"
                        " stored",
                        path=file.path,
                    )
                filled.append((item, tensor))
                wanted.box(tensor, stored[at], item.storage_offsets, item.lengths)
            if self._progress.shown:
                self._progress.expect(wanted.nbytes_read(file) - expected)
            wanted.read(file, pool, verify=self._verify, tell=self._progress.update)
            for item, tensor in filled:
                planner.commit_tensor(item, tensor)
        finally:
            file.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _load_bytes(planner: LoadPlanner, item: ReadItem, data: memoryview) -> None:
    planner.load_bytes(item, io.BytesIO(data))


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
                f"the checkpoint has no {some(missing)}; leave them out of the state dict to load the others",
                path=self._path,
            )
        warn_left_out(left_out(self.state_dict, known), self._path)
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
