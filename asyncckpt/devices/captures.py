"""Check for graph captures. During a capture, work is recorded but not executed. A replay calls no Python code."""

from __future__ import annotations

import logging

from asyncckpt.devices.kinds import KINDS
from asyncckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


def is_capturing() -> bool:
    """Return whether the calling thread's current stream is being captured."""
    return any(kind.is_initialized() and kind.is_capturing() for kind in KINDS.values())


def check_not_capturing() -> None:
    """Raise ``CheckpointError`` if a capture would record the copies of a save into a graph."""
    if is_capturing():
        raise CheckpointError(
            "a graph is being captured on this stream: nothing is copied now, and each replay would copy over what is"
            " being written; save between two replays"
        )


def check_guarded_capture(*, copies_are_under_way: bool) -> None:
    """Warn that replays do not wait for copies, if a guarded optimizer step is being captured. Call this at its start.

    Raises ``CheckpointError`` while copies are under way, because the graph would wait for events from outside it.
    """
    if not is_capturing():
        return
    if copies_are_under_way:
        raise CheckpointError(
            "a guarded step is being captured in a graph while a save still copies: wait for that before"
            " (Save.wait_staged)"
        )
    logger.warning(
        "a guarded step is captured in a graph: its replays wait for no copy; call Checkpointer.synchronize_staging"
        " before each replay"
    )
