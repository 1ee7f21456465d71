"""Retention: the effects of a save on other checkpoints."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import Upload
from asyncckpt.format.write_request import Existing, Pointer, Rotation
from asyncckpt.storage import is_address, step_folder, storage_for
from asyncckpt.storage.history import Origin

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules of a save for the thing that exists at its path, and for the checkpoints beside it.

    ``pointer``, ``rotation``: applied after the commit. ``keep_last``: the number of newest steps to keep after the
    commit; None: all. ``keep``: called on the first rank; returns whether to keep this checkpoint for good. ``since``,
    ``began``: see ``WriteRequest``. ``upload``: called on the first rank; returns the upload after the commit, if any.
    """

    existing: Existing = "refuse"
    keep_last: int | None = None
    keep: Callable[[], bool] | None = None
    since: float = 0.0
    began: float = 0.0
    upload: Callable[[], Upload | None] | None = None
    pointer: Pointer | None = None
    rotation: Rotation | None = None


def retention_of(
    config: Config,
    origin: Origin | None,
    roots: Sequence[str],
    step: int,
    *,
    began: float = 0.0,
    upload: bool | None = None,
) -> Retention:
    """Return the retention for a save of ``step``.

    Args:
        config: The configuration, with the rules for retention and uploads.
        origin: The point where the run continues; None: the run has loaded nothing.
        roots: The folder of the steps; with a local folder: the local folder, and the folder for uploads.
        step: The step to save.
        began: The time when a run without a load began, in seconds since the epoch.
        upload: Whether to upload this step; None: as ``config`` says.
    """
    root = roots[0]
    existing: Existing = "refuse"
    with contextlib.suppress(StorageError):  # the save raises a better error
        if origin is not None and origin.has_left(root, step):
            existing = "set aside"
            path = step_folder(root, step)
            # An unfinished save of a dead trainer is rarely committed later, and needs no warning.
            is_there = is_address(root) or storage_for(root).exists(path)
            logger.log(
                logging.WARNING if is_there else logging.INFO,
                "step %d is saved again, after step %d was loaded: an existing checkpoint is renamed to %s.abandoned-N",
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
    """Return the upload of ``step`` from the first to the second of ``roots``, or None for no upload."""
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
    """Return whether to keep the checkpoint of ``step`` for good."""
    every, keep = config.keep_every, config.keep
    return (every is not None and step % every == 0) or (keep is not None and bool(keep(step)))
