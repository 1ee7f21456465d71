"""Graphs of a device: while one is captured, what is queued is not done, and a replay calls nothing of Python."""

from __future__ import annotations

import logging

from asyncckpt.devices.kinds import KINDS
from asyncckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


def is_capturing() -> bool:
    """Whether the calling thread's current stream is being captured."""
    return any(kind.is_initialized() and kind.is_capturing() for kind in KINDS.values())


def check_not_capturing() -> None:
    """Raise ``CheckpointError`` where copies would become a part of a graph, with the streams that they go through."""
    if is_capturing():
        raise CheckpointError(
            "a graph is being captured on this stream: nothing is copied now, and each replay would copy over what is"
            " being written; save between two replays"
        )


def check_guarded_capture(*, copies_are_under_way: bool) -> None:
    """The step of a guarded optimizer begins: see whether it is captured, so that its replays are not held back.

    Raises ``CheckpointError`` while copies are under way: the graph would wait for events from outside of it.
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
