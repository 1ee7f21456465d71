"""Load a checkpoint straight into the values if the indexes suffice (``direct_load.py``), else by DCP's planner."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asyncckpt.budgets import ANSWER_S, CHECK_S
from asyncckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    interrupts_as_they_are,
    is_interrupt,
    located,
    unless_interrupt,
)
from asyncckpt.format.manifest import data_of_rank
from asyncckpt.format.storage_meta import without_storage_meta
from asyncckpt.loading.contents import source_at
from asyncckpt.loading.dcp_reader import CheckingPlanner, CheckpointReader, StockReader, load_by_dcp
from asyncckpt.loading.direct_load import DirectLoad, draft
from asyncckpt.loading.optimizer_state import stored_state
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import Source, StorageSource, stands_there
from asyncckpt.planning.draft import StoredPlan
from asyncckpt.planning.per_rank import PerRank, values_of_type
from asyncckpt.planning.structure import give_states, stateful_to_dict, stateful_types
from asyncckpt.ranks.ranks import Ranks, ranks_of
from asyncckpt.storage import absolute, storage_for
from asyncckpt.threads import without_gc

logger = logging.getLogger(__name__)

# Loads that take longer than this, in seconds, show a progress bar.
_LONG_S = 3.0


class Filled(NamedTuple):
    """The result of a load on this rank. With a planner of the caller the names are unknown.

    Attributes:
        nbytes: The number of bytes read; 0 for a checkpoint of stock DCP.
        missing: The names of values that the checkpoint lacks, and that stayed as they were (``strict=False``).
        unexpected: The names of values in the checkpoint that the state dict lacks.
    """

    nbytes: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@without_gc
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
    warns: bool = True,
    strict: bool = True,
) -> Filled:
    """Load a checkpoint into ``state_dict``, in place, as ``torch.distributed.checkpoint.load`` does.

    Tensors are filled in place, other values are replaced, ``Stateful`` values at any depth get their state. Keys that
    only the checkpoint has are ignored. Checkpoints of stock DCP are loaded, too.

    Args:
        state_dict: The state to load; its tensors have the shapes to fill.
        path, source: The folder of the checkpoint. If there is an open ``source``, the load reads the source, and
            ``path`` is for errors.
        planner: The DCP planner to use; None: the default planner, if a plan is needed at all.
        verify: Check all bytes while they are copied. After an error, parts of ``state_dict`` may have bad bytes.
        weights_only: Whether to refuse values that could run code while they are unpickled, see ``unpickle.py``.
        process_group, no_dist: The ranks that load together (None: all ranks of the job), or whether this rank loads
            alone. If one rank fails, all ranks raise its error.
        progress, warns: Whether to show a bar on the terminal; whether to warn about values that were not requested,
            such as the state of a fresh optimizer.
        strict: Raise if the checkpoint lacks a value. With False, the value stays unchanged.

    Raises:
        CheckpointNotFoundError, StorageError, DamagedCheckpointError: There is no checkpoint, it cannot be read, or it
            is damaged.
        ValueError: ``strict=False`` with a ``planner``, because the planner decides this.
        MismatchError: The checkpoint lacks a key, or has another shape, or a dtype that the tensor's cannot hold.
        UntrustedValueError, CheckpointError: A value could run code, or fails to unpickle; or ``planner`` raises.
    """
    if planner is not None and not strict:
        raise ValueError(
            "strict=False is for loads without a planner: DefaultLoadPlanner(allow_partial_load=True) is one"
        )
    path, ranks = absolute(path), ranks_of(False if no_dist else process_group)
    per_rank, optimizers = values_of_type(state_dict, PerRank), values_of_type(state_dict, Optimizer)
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as held, _as_ours(path, ranks):
        bar = held.enter_context(Progress("loading", delay=_LONG_S, shown=progress and ranks_of().rank == 0))
        source = source or held.enter_context(opened(path, ranks, trusts=not weights_only))
        open_reader = partial(_open_reader, path, source, bar, verify, weights_only)
        states = _states(state_dict, per_rank, optimizers, open_reader, held, undo, ranks)
        increment_version(list(_dtensors(states)))
        if planner is None and (direct := _drafted_by_all(states, source, path, held, ranks, verify)) is not None:
            ranks.on_all(partial(direct.read, bar, verify=verify, weights_only=weights_only, warns=warns and strict))
            names: tuple[Iterable[str], Iterable[str]] = (), direct.unexpected
        else:
            reader = ranks.on_all(open_reader)
            checking = CheckingPlanner(path, weights_only=weights_only, warns=warns and strict, strict=strict)
            planner = planner or checking
            load_by_dcp(states, storage_reader=reader, planner=planner, process_group=process_group, no_dist=no_dist)
            names = checking.missing, checking.unexpected
        undo.pop_all()
    give_states(state_dict, states)
    for value in per_rank.values():
        value.after_load()
    return Filled(bar.nbytes, *map(tuple, names))


def _dtensors(container: Any) -> Iterator[DTensor]:
    """Yield the DTensors of a state.

    A load writes to their local parts, and autograd has to know that the DTensors change.
    """
    for value in container.values() if isinstance(container, Mapping) else container:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, Mapping | list) and dist.is_initialized():
            yield from _dtensors(value)


def _drafted_by_all(
    states: dict[str, Any], source: Source | None, path: str, held: contextlib.ExitStack, ranks: Ranks, verify: bool
) -> DirectLoad | None:
    """Return the prepared load without DCP; None: some rank needs DCP.

    Without ``verify`` the ranks share no bytes, because a stray write to the shared memory would go unnoticed.
    """

    def here() -> DirectLoad | None:
        direct = draft(states, source, path, held) if source else None
        return direct.with_host_reads(held) if direct is not None and ranks.size > 1 and verify else direct

    direct = ranks.on_all(here)
    host_reads = None if direct is None else direct.host_reads
    told = ranks.gather((direct is not None, None if host_reads is None else host_reads.member))
    if not all(is_direct for is_direct, _ in told):
        return None
    if host_reads is not None:
        host_reads.members = [member for _, member in told]
    return direct


def _states(
    state_dict: dict[str, Any],
    per_rank: Mapping[str, PerRank],
    optimizers: Mapping[str, Optimizer],
    open_reader: Callable[[], StorageReader],
    held: contextlib.ExitStack,
    undo: contextlib.ExitStack,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the values to fill, with states for ``Stateful`` values.

    Per-rank values look up the stored metadata. A new optimizer gets the state to fill, until ``undo`` takes it back.
    """
    fresh = {name: each for name, each in optimizers.items() if not each.state}

    def ask_for_stored() -> None:
        metadata = open_reader().read_metadata() if per_rank or fresh else Metadata({})
        for name, value in per_rank.items():
            held.enter_context(value.loaded_from(metadata, name))
        for name, optimizer in fresh.items():
            undo.callback(optimizer.state.clear)
            optimizer.state.update(stored_state(optimizer, name, metadata))

    ranks.on_all(ask_for_stored)  # before ``Stateful`` values are called, because they may communicate
    keys: Iterable[str] = state_dict
    if any(stateful_types(state_dict)):
        keys = sorted(keys, key=str)  # the same order on all ranks
    return ranks.on_all(lambda: dict(stateful_to_dict({key: state_dict[key] for key in keys})))


@contextlib.contextmanager
def opened(path: str, ranks: Ranks, *, may_be_stock: bool = True, trusts: bool = False) -> Iterator[Source | None]:
    """Open the checkpoint ``path`` on all ranks, and protect it against removal; None: stock DCP wrote it.

    Raises ``DamagedCheckpointError`` for a checkpoint of another library unless it ``may_be_stock``. ``trusts``: see
    ``RankFiles.read``.

    If only some ranks find the checkpoint, wait for the others: a network file system may show a new name late.
    """

    def here() -> Source | None:
        held.enter_context(storage_for(path).reading(path))
        return source_at(path, held, ranks.rank, trusts=trusts) if may_be_stock else StorageSource(path)

    deadline = time.monotonic() + ANSWER_S
    with contextlib.ExitStack() as held:
        while True:
            try:
                with _as_ours(path, ranks):
                    source = ranks.on_all(here)
                break
            except CheckpointNotFoundError:
                is_awaited = time.monotonic() < deadline and stands_there(path, "") != "none"
                if not any(ranks.gather(is_awaited)):
                    raise
                time.sleep(CHECK_S)
        yield source


def _open_reader(path: str, source: Source | None, bar: Progress, verify: bool, weights_only: bool) -> StorageReader:
    """Return the reader for DCP. Read the metadata here, because DCP would turn an error of this read into text."""
    reader: StorageReader
    if source is None:
        reader = StockReader(path, weights_only=weights_only)
    else:
        reader = CheckpointReader(path, verify=verify, weights_only=weights_only, source=source, progress=bar)
    reader.read_metadata()
    return reader


@contextlib.contextmanager
def _as_ours(path: str, ranks: Ranks) -> Iterator[None]:
    """Raise every failure as an error of this package.

    DCP wraps the errors of ranks in an error that does not derive from ``Exception``.
    """
    try:
        with interrupts_as_they_are():
            yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        causes = {rank: each[0] if isinstance(each, tuple) else each for rank, each in error.failures.items()}
        for cause in causes.values():
            if isinstance(cause, CheckpointError):
                raise cause from None
        if ranks.rank in causes and is_interrupt(causes[ranks.rank]):
            raise causes[ranks.rank] from None  # e.g. Ctrl-C
        rank, cause = next(iter(causes.items()))
        raise located(cause, path=path, rank=rank if ranks.size > 1 else None) from error
    except unless_interrupt(Exception) as error:
        raise located(error, path=path) from error


def read_plan(source: Source | None, rank: int) -> StoredPlan | None:
    """Return the part of the stored plan that ``rank`` needs.

    Return None if the plan is not stored, as in a checkpoint of stock DCP (``source`` is None then), or is unreadable.
    A load fails in neither case.
    """
    if source is None:
        return None
    try:
        return _read(source, rank)
    # Ignore all errors, because the load meets them too, together with the other ranks.
    except unless_interrupt(Exception) as error:
        logger.info("the next save is planned anew, as the plan of attempt %s is not known: %s", source.attempt, error)
        return None


def _read(source: Source, rank: int) -> StoredPlan | None:
    indexes = []
    for name in data_of_rank(source.data_files(), rank):
        with contextlib.closing(source.open(name)) as file:
            indexes.append(file.index)
    if not indexes or not all(index.asked for index in indexes):
        return None
    return StoredPlan(source.attempt, indexes, without_storage_meta(source.metadata()) if rank == 0 else b"")
