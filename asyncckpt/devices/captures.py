"""Graphs of a device: during a capture, queued work is recorded but not done; a replay calls no Python code."""

from __future__ import annotations

import logging

from asyncckpt.devices.kinds import KINDS
from asyncckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


def is_capturing() -> bool:
    """Return whether the calling thread's current stream is being captured."""
    return any(kind.is_initialized() and kind.is_capturing() for kind in KINDS.values())


def check_not_capturing() -> None:
    """Raise ``CheckpointError`` if copies, and their streams, would become a part of a graph."""
    if is_capturing():
        raise CheckpointError(
            "a graph is being captured on this stream: nothing is copied now, and each replay would copy over what is"
            " being written; save between two replays"
        )


def check_guarded_capture(*, copies_are_under_way: bool) -> None:
    """Check at the start of a guarded optimizer step whether it is captured; if so, warn that replays do not wait.

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
