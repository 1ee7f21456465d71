"""Loading: straight into place where the indexes say enough (``direct_load.py``), else by DCP's planner."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from asyncckpt.errors import CheckpointError, located
from asyncckpt.loading.dcp_reader import CheckingPlanner, CheckpointReader, StockReader, load_by_dcp
from asyncckpt.loading.direct_load import draft
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import Source, StorageSource, is_stock
from asyncckpt.planning.per_rank import all_loaded_from
from asyncckpt.planning.structure import give_states, stateful_to_dict
from asyncckpt.ranks.collectives import gather, many, on_all
from asyncckpt.worker.storage import absolute, storage_for

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
    """Load a checkpoint into ``state_dict``, in place, as ``torch.distributed.checkpoint.load`` does.

    Tensors are filled where they are, other values are replaced, ``Stateful`` values at any depth are given their
    state. Keys that only the checkpoint has are left alone. Checkpoints that stock DCP wrote are read, too.

    Args:
        state_dict: What to load; its tensors have the shapes to fill.
        path: The folder of the checkpoint; with ``source`` it is for errors.
        planner: DCP's planner to use; None: the default one, where a plan is needed at all.
        verify: Check all bytes while they are copied. After an error part of ``state_dict`` may have bad bytes.
        weights_only: No value may run code while it is unpickled, see ``unpickle.py``.
        process_group: The ranks that load together; None: all of the job. What goes wrong on one is raised on all.
        no_dist: This process loads alone.
        source: Where to read from; None: the folder ``path``.
        progress: Show a bar on the terminal, see ``Config.progress``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        DamagedCheckpointError: Bytes are missing, or are not those that were written.
        MismatchError: The checkpoint lacks a key, or has another shape, or a dtype that the tensor's cannot hold.
        UntrustedValueError: A value could run code, and ``weights_only`` forbids that.
        StorageError: Storage cannot be read.
        CheckpointError: A value fails to unpickle, or ``planner`` raises.
    """
    path = absolute(path)
    ranks = False if no_dist else process_group
    with contextlib.ExitStack() as held, _without_gc(), _as_ours(path, ranks):
        bar = held.enter_context(Progress("loading", delay=_LONG_S, shown=progress and _is_first()))

        def open_() -> Source | None:
            found = source or _open(path, held)
            metadata = lambda: _open_reader(path, found, bar, verify, weights_only).read_metadata()  # noqa: E731
            held.enter_context(all_loaded_from(metadata, state_dict))
            return found

        found = on_all(open_, ranks)
        states = held.enter_context(_states(state_dict))
        direct = on_all(lambda: draft(states, found, path, held) if planner is None and found else None, ranks)
        if all(gather(direct is not None, ranks)) and direct is not None:
            on_all(partial(direct.read, bar, verify=verify, weights_only=weights_only), ranks)
        else:
            reader = on_all(lambda: _open_reader(path, found, bar, verify, weights_only), ranks)
            planner = planner or CheckingPlanner(path, weights_only=weights_only)
            load_by_dcp(states, storage_reader=reader, planner=planner, process_group=process_group, no_dist=no_dist)


@contextlib.contextmanager
def _states(state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The values to fill, with states for ``Stateful`` ones; ``state_dict`` is given what they are in the end."""
    keys = sorted(state_dict, key=str)  # on all ranks the same, for what Stateful values may have to ask each other
    states = dict(stateful_to_dict({key: state_dict[key] for key in keys}))
    yield states
    give_states(state_dict, states)


def _open(path: str, held: contextlib.ExitStack) -> Source | None:
    """The checkpoint ``path``, which is ``held`` against removal; None: stock DCP wrote it."""
    held.enter_context(storage_for(path).reading(path))
    return None if is_stock(path) else StorageSource(path)


def _open_reader(path: str, source: Source | None, bar: Progress, verify: bool, weights_only: bool) -> StorageReader:
    """For DCP. It has read its metadata here: of what is wrong with that DCP would make a text."""
    reader: StorageReader
    if source is None:
        reader = StockReader(path, weights_only=weights_only)
    else:
        reader = CheckpointReader(path, verify=verify, weights_only=weights_only, source=source, progress=bar)
    reader.read_metadata()
    return reader


def _is_first() -> bool:
    """Whether this is the first rank of the job, which alone shows the bar."""
    return not many(None) or dist.get_rank() == 0


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


@contextlib.contextmanager
def _as_ours(path: str, ranks: Any) -> Iterator[None]:
    """Raise every failure as one of ours: DCP makes one that is no ``Exception`` of what the ranks raised."""
    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        me = dist.get_rank(ranks) if many(ranks) else 0
        causes = {rank: each[0] if isinstance(each, tuple) else each for rank, each in error.failures.items()}
        for cause in causes.values():
            if isinstance(cause, CheckpointError):
                raise cause from None
        if me in causes and not isinstance(causes[me], Exception):
            raise causes[me] from None  # Ctrl-C
        rank, cause = next(iter(causes.items()))
        raise located(cause, path=path, rank=rank if many(ranks) else None) from error
    except Exception as error:
        raise located(error, path=path) from error
