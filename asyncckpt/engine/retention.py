"""What becomes of other checkpoints when one is saved."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.worker.messages import Existing
from asyncckpt.worker.storage import step_folder
from asyncckpt.worker.storage.history import Origin

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is to become of what stands at the place of a save, and beside it.

    ``keep_last``: how many of the newest steps stay, once it is committed; None: all. ``keep``: asked on the first rank
    whether this one is kept for good. ``since``: see ``WriteRequest``.
    """

    existing: Existing = "refuse"
    keep_last: int | None = None
    keep: Callable[[], bool] | None = None
    since: float = 0.0


def retention_of(config: Config, origin: Origin | None, root: str, step: int) -> Retention:
    """What a save of ``step`` under ``root`` does to other checkpoints.

    Args:
        config: Says how many stay, and which for good.
        origin: Where the run goes on from; None: it has loaded nothing.
        root: The folder of the steps.
        step: The one to be saved.
    """
    existing: Existing = "refuse"
    with contextlib.suppress(StorageError):  # the save says it better
        if origin is not None and origin.has_left(root, step):
            existing = "set aside"
            logger.warning(
                "step %d is saved again, after step %d was loaded: the one that is there is renamed to %s.abandoned-N",
                step,
                origin.step,
                step_folder(root, step),
            )
    since = 0.0 if origin is None else origin.newest
    return Retention(existing=existing, keep_last=config.keep_last, keep=partial(_keeps, config, step), since=since)


def _keeps(config: Config, step: int) -> bool:
    """Whether the checkpoint of ``step`` is one to keep for good."""
    every, keep = config.keep_every, config.keep
    return (every is not None and step % every == 0) or (keep is not None and bool(keep(step)))
