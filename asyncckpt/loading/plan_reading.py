"""Read the plan of a checkpoint, so that the first save after a load need not plan."""

from __future__ import annotations

import contextlib
import logging

from asyncckpt.errors import unless_interrupt
from asyncckpt.format.manifest import data_of_rank
from asyncckpt.format.storage_meta import without_storage_meta
from asyncckpt.loading.source import Source
from asyncckpt.planning.stored_plan import StoredPlan

logger = logging.getLogger(__name__)


def read_plan(source: Source | None, rank: int) -> StoredPlan | None:
    """Return the part of the plan that the rank of that number needs, or None.

    The plan may not be stored, as in a checkpoint of stock DCP (``source`` is None then), or may be unreadable. A load
    does not fail because of that.
    """
    if source is None:
        return None
    try:
        return _read(source, rank)
    # No error may stop this rank, because the other ranks have loaded and go on.
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
