"""What becomes of other checkpoints when one is saved."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import Upload
from asyncckpt.format.write_request import Existing
from asyncckpt.storage import is_address, step_folder, storage_for
from asyncckpt.storage.history import Origin

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is to become of what stands at the place of a save, and beside it.

    ``keep_last``: how many of the newest steps stay, once it is committed; None: all. ``keep``: asked on the first rank
    whether this one is kept for good. ``since``, ``began``: see ``WriteRequest``. ``upload``: what follows the commit;
    asked there, too.
    """

    existing: Existing = "refuse"
    keep_last: int | None = None
    keep: Callable[[], bool] | None = None
    since: float = 0.0
    began: float = 0.0
    upload: Callable[[], Upload | None] | None = None


def retention_of(
    config: Config,
    origin: Origin | None,
    roots: Sequence[str],
    step: int,
    *,
    began: float = 0.0,
    upload: bool | None = None,
) -> Retention:
    """What a save of ``step`` does to other checkpoints, and whether it is uploaded.

    Args:
        config: Says how many stay, which for good, and which are uploaded.
        origin: Where the run goes on from; None: it has loaded nothing.
        roots: The folder of the steps; or the local one, and the one that steps are uploaded to.
        step: The one to be saved.
        began: When a run began that has loaded nothing, in seconds since the epoch.
        upload: Whether this one is; None: as ``config`` says.
    """
    root = roots[0]
    existing: Existing = "refuse"
    with contextlib.suppress(StorageError):  # the save says it better
        if origin is not None and origin.has_left(root, step):
            existing = "set aside"
            path = step_folder(root, step)
            # As a rule nothing comes of what a trainer that died had under way.
            is_there = is_address(root) or storage_for(root).exists(path)
            logger.log(
                logging.WARNING if is_there else logging.INFO,
                "step %d is saved again, after step %d was loaded: one that is there then is renamed to %s.abandoned-N",
                step,
                origin.step,
                path,
            )
    since, began = (began, began) if origin is None else (origin.newest, origin.began)
    if len(roots) == 1:
        return Retention(
            existing=existing, keep_last=config.keep_last, keep=partial(_keeps, config, step), since=since, began=began
        )
    ask = partial(_upload, config, origin, roots, step, upload)
    return Retention(existing=existing, keep_last=config.local_keep_last, since=since, began=began, upload=ask)


def _upload(
    config: Config, origin: Origin | None, roots: Sequence[str], step: int, asked: bool | None
) -> Upload | None:
    """The upload of ``step``, from the first of ``roots`` to the second; None: it is not uploaded."""
    keep = _keeps(config, step)
    is_due = keep or config.upload_every is None or step % config.upload_every == 0
    if asked is False or not (asked or is_due):
        return None
    return Upload(
        to=step_folder(roots[1], step),
        sets_aside=origin is not None and step in origin.left,
        must=keep or asked is True,
        keep_last=config.keep_last,
        keep=keep,
        timeout=config.commit_timeout,
    )


def _keeps(config: Config, step: int) -> bool:
    """Whether the checkpoint of ``step`` is one to keep for good."""
    every, keep = config.keep_every, config.keep
    return (every is not None and step % every == 0) or (keep is not None and bool(keep(step)))
