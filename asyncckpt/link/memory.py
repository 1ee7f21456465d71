"""Taking memory: one process at a time looks how much there is, and says how much it takes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from asyncckpt.errors import OutOfMemoryError
from asyncckpt.link.endpoint import announce_memory, announced_bytes, host_lock
from asyncckpt.link.takeover import retire_idle_workers
from asyncckpt.shm import budget
from asyncckpt.shm.huge import take_huge
from asyncckpt.shm.segment import Segment

logger = logging.getLogger(__name__)

# How long others may take to give memory back that is needed here.
GIVE_BACK_S = 10.0
# How long to wait for other processes, each of which may be taking some hundred GiB.
_TURN_S = 120.0
HINT = "use fewer slots, or leave more memory to them (each holds one image of the state)"


def take_memory(
    segment: Segment, wait_released: Callable[[], bool] = lambda: False, end: int | None = None, begin: int = 0
) -> None:
    """Take memory of ``segment``. Raises ``OutOfMemoryError``, when some of it may be taken.

    Args:
        segment: All before ``begin`` is taken.
        wait_released: Waits for memory that will be free in a moment; whether there was any.
        end: Up to which byte; None: all.
        begin: From which.
    """
    end = segment.nbytes if end is None else end
    nbytes = end - begin
    with contextlib.ExitStack() as announced:
        # Two that look at once would take the same. The taking itself, a second for each two GiB or so, is done side by
        # side.
        with host_lock(_TURN_S) as alone:
            if not alone:
                logger.warning("%d bytes are taken without looking whether others take as much", nbytes)
            try:
                budget.require(nbytes + announced_bytes(), "staging", HINT)
            except OutOfMemoryError:
                # What is held for trainers that may never come back must not deny memory to one that is here.
                if not (wait_released() or retire_idle_workers(GIVE_BACK_S)):
                    raise
                budget.require(nbytes + announced_bytes(), "staging", HINT)
            announced.enter_context(announce_memory(segment.fileno(), end))
        take_huge(segment, begin, end)
        segment.touch(end, begin)
