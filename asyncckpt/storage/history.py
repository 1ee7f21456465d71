"""The checkpoints of a root in the order of their creation: the newest checkpoint, and retention.

Step numbers do not give this order, because a training may go back to an older step and continue from there. Its
earlier checkpoints with later step numbers are then older than its new checkpoints, and count as left behind.

A run may have several roots, the nearest first. For example, a run saves to a local root, and uploads some steps to
another root. A copy has the time of creation of its original.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from asyncckpt.errors import DamagedCheckpointError, FormatError, StorageError
from asyncckpt.format.manifest import MANIFEST_NAME, Manifest, Upload
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.storage import (
    is_address,
    named_steps,
    remove_old_checkpoint,
    split_place,
    step_folder,
    step_of,
    storage_for,
)
from asyncckpt.storage.storage import FileStamp

logger = logging.getLogger(__name__)

Stamps: TypeAlias = Mapping[str, FileStamp | None]

# Number of manifests to cache, so that a process reads each manifest once.
_KEPT = 4096
# By root, for object stores: the latest time of creation, and the time of the last listing of all checkpoints.
_last_created: dict[str, tuple[float, float]] = {}
_LOOK_EVERY_S = 300.0


class StoredStep(NamedTuple):
    """The checkpoint in the folder of a step.

    ``created``, ``keep``, ``began``, ``attempt`` and ``upload`` are copied from the manifest. ``created`` is None if
    the manifest is missing, damaged, or names another step.
    """

    step: int
    created: float | None
    keep: bool
    modified: int
    """Time of modification of the manifest, or of the newest file if the manifest is unreadable. In nanoseconds, by the
    clock of the storage."""
    roots: tuple[str, ...]
    """The roots that hold this checkpoint, the nearest first."""
    began: float = 0.0
    attempt: str = ""
    upload: Upload | None = None


@dataclass(frozen=True)
class Origin:
    """The point where a run continues: the ``step`` that it has loaded.

    ``newest`` is the time of creation of the newest checkpoint at load time. Checkpoints of this run are newer.
    ``left`` are the later steps. The run leaves a later step behind when it saves the same number again.
    ``unfinished`` are attempts of dead trainers at later steps, with their paths. Until the first save of the run,
    these attempts may still be committed. ``began`` is the time when the training that saved the step began. The run
    continues this training.
    """

    step: int
    newest: float
    left: frozenset[int]
    unfinished: tuple[tuple[str, str], ...] = ()
    began: float = 0.0

    def has_left(self, root: str, step: int) -> bool:
        """Return whether the run has left behind the checkpoint at ``step``.

        Do not ask an object store, because a save would wait for the answer. Raises ``StorageError``.
        """
        if step not in self.left or is_address(root):
            return step in self.left
        found, path = _look(root, step), step_folder(root, step)
        attempts = [attempt for place, attempt in self.unfinished if place == path]
        if found is None:
            return bool(attempts)  # an attempt may still be committed
        if found.created is None or found.created <= self.newest:
            return True
        return any(storage_for(path).is_finalized(path, attempt) for attempt in attempts)


def history(*places: str, strict: bool = True) -> list[StoredStep]:
    """Return all non-empty steps at ``places`` (see ``split_place``) in the order of their creation.

    A step with an unreadable manifest counts as the newest if its number or its files are newer than the newest known
    step. A caller that takes the newest step then sees the error. Otherwise such a step counts as the oldest. If
    several places have a step, the newest checkpoint counts.

    Raises ``StorageError``, also if a single step cannot be read. Without ``strict``, such a step is skipped with a
    warning.
    """
    by_step: dict[int, StoredStep] = {}
    for each in itertools.chain.from_iterable(_stored_steps(place, strict) for place in places):
        by_step[each.step] = _newer(by_step[each.step], each) if each.step in by_step else each
    found = [by_step[step] for step in sorted(by_step)]
    known = sorted((each for each in found if each.created is not None), key=lambda each: (each.created, each.step))
    unknown = [each for each in found if each.created is None]
    newest = known[-1] if known else None
    late = [each for each in unknown if newest is None or each.step > newest.step or each.modified > newest.modified]
    return [*(each for each in unknown if each not in late), *known, *late]


def _stored_steps(place: str, strict: bool) -> list[StoredStep]:
    root, only = split_place(place)
    if only is not None:
        return [] if (found := _look(root, only, strict)) is None else [found]
    stamps = storage_for(root).stamps_in(root, MANIFEST_NAME)
    steps = (
        named_steps(root) if stamps is None else sorted(step for each in stamps if (step := step_of(each)) is not None)
    )
    return [each for step in steps if (each := _look(root, step, strict, stamps)) is not None]


def _newer(one: StoredStep, other: StoredStep) -> StoredStep:
    """Return the newer of two checkpoints with the same step number. ``one`` is under a nearer root."""
    if other.created is None or one.created == other.created:
        return one if other.created is None else one._replace(roots=one.roots + other.roots)
    return other if one.created is None or one.created < other.created else one


def stored_step(step: int, *roots: str) -> StoredStep | None:
    """Return the entry of ``step``, as in ``history``; None if its folder is empty. Raises ``StorageError``."""
    found = [each for root in roots if (each := _look(root, step)) is not None]
    return functools.reduce(_newer, found) if found else None


def newest_step(*roots: str) -> int | None:
    """Return the step that was created last, complete or not. Raises ``StorageError``.

    A folder gets the name of a step only when its checkpoint is complete. A missing file was lost later, and the caller
    must learn of this loss.
    """
    found = history(*roots)
    return found[-1].step if found else None


def older_step(step: int, *roots: str) -> StoredStep | None:
    """Return the step created last before ``step``, complete or not. Raises ``StorageError``."""
    found = history(*roots)
    place = next((at for at, each in enumerate(found) if each.step == step), 0)
    return found[place - 1] if place else None


def origin_of(
    step: int,
    *roots: str,
    unfinished: Sequence[WriteRequest] = (),
    goes_back: bool = True,
    began: float | None = None,
) -> Origin:
    """Return the origin of a run that has loaded ``step``. ``unfinished``: see ``Origin``. Raises ``StorageError``.

    ``began``: as in ``Origin``, for a step loaded from memory; None: read it from the manifest.

    ``goes_back``: the user may have chosen an older step. If False, newer steps have appeared while this process loaded
    the newest step, as in an evaluation of a running training.
    """
    found = history(*roots, strict=False)
    newest = max((each.created for each in found if each.created is not None), default=0.0)
    places = {each.step: at for at, each in enumerate(found)}
    newer = sorted(each.step for each in found[places.get(step, len(found)) + 1 :] if each.step > step)
    if newer:
        logger.log(
            logging.WARNING if goes_back else logging.INFO,
            "step %d is loaded, and the steps %s are newer: new saves count as newer than these, and retention"
            " removes these first",
            step,
            ", ".join(map(str, newer)),
        )
    left = {each.step for each in found if each.step > step} | {each.step for each in unfinished if each.step}
    if began is None:
        began = found[places[step]].began if step in places else 0.0
    return Origin(step, newest, frozenset(left), tuple((each.path, each.attempt) for each in unfinished), began)


def time_of_creation(root: str, since: float = 0.0) -> float:
    """Return the current time in seconds since the epoch, raised above ``since`` and all checkpoints under ``root``.

    The clocks of hosts differ, so checkpoints may be dated in the future. Raises ``StorageError``.

    An object store is listed only occasionally, because normally only this process creates checkpoints there.
    """
    now = time.monotonic()
    created, looked = _last_created.get(root, (0.0, -math.inf))
    known = [created]
    if now - looked > _LOOK_EVERY_S:
        known += [each.created for each in history(root, strict=False) if each.created is not None]
        looked = now
    created = max(time.time(), math.nextafter(max((since, *known)), math.inf))
    if is_address(root):
        _last_created[root] = created, looked
    return created


def was_removed(request: WriteRequest) -> bool:
    """Return whether a committed checkpoint was removed by hand.

    Return True if its place is empty and no later step exists. If a later step existed, retention could have removed
    the checkpoint. Return False if storage does not answer.
    """
    try:
        if storage_for(request.path).exists(request.path):
            return False
        return request.step is None or max(named_steps(os.path.dirname(request.path)), default=-1) < request.step
    except StorageError as error:
        logger.warning("the check whether %s was removed failed: %s", request.path, error)
        return False


def prune(root: str, keep_last: int, is_recent: Callable[[int], bool]) -> None:
    """Remove old checkpoints of the training that has created the newest checkpoint. Earlier trainings are not touched.

    A checkpoint also stays if its manifest has ``keep`` set, or cannot be read. A checkpoint that cannot be removed, or
    is being read, is left for the next call. Raises nothing.

    Args:
        root: The folder of the steps.
        keep_last: Number of checkpoints to keep, by time of creation.
        is_recent: Return whether a step was just committed. A recent step always stays.
    """
    try:
        found = history(root)
    except StorageError as error:  # pruning is optional: keep all checkpoints
        logger.warning("old checkpoints could not be listed: %s", error)
        return
    known = [each for each in found if each.created is not None]
    own = [each for each in known if each.created is not None and each.created >= known[-1].began]
    for each in own[:-keep_last]:
        if each.keep:
            continue
        # Removal takes long, so the run may have saved this step again meanwhile. Look at the folder first, then ask
        # ``is_recent``: a commit in between is recent.
        there = _look(root, each.step, strict=False)
        if there is None or there.created != each.created or is_recent(each.step):
            continue
        path = step_folder(root, each.step)
        if each.step > known[-1].step:
            logger.warning("%s is removed: the training has resumed from an older step", path)
        remove_old_checkpoint(path)


def _look(root: str, step: int, strict: bool = True, stamps: Stamps | None = None) -> StoredStep | None:
    """Return the entry of ``step``; None if its folder is empty. ``stamps``: stamps of the manifests, if known.

    Raises ``StorageError`` if ``strict``.
    """
    try:
        return _look_closely(root, step, stamps)
    except StorageError as error:
        if strict:
            raise
        logger.warning("a checkpoint that cannot be read is left out: %s", error)
        return None


def _look_closely(root: str, step: int, known: Stamps | None) -> StoredStep | None:
    storage, folder = storage_for(root), step_folder(root, step)
    path = os.path.join(folder, MANIFEST_NAME)
    stamp = storage.stamp(path) if known is None else known.get(os.path.basename(folder))
    if stamp is not None:
        try:
            return _read(path, step, stamp)._replace(roots=(root,))
        except (DamagedCheckpointError, FormatError, StorageError) as error:
            logger.info("the order of a checkpoint among the others is not known: %s", error)
    elif is_address(root):
        return None  # without a record there is no checkpoint on an object store
    stamps = [storage.stamp(os.path.join(folder, name)) for name in storage.names_in(folder)]
    modified = max((each.modified for each in stamps if each is not None), default=None)
    return None if modified is None else StoredStep(step, None, True, modified, (root,))


@functools.lru_cache(_KEPT)
def _read(path: str, step: int, stamp: FileStamp) -> StoredStep:
    """Read the manifest ``path``. The ``stamp`` is part of the cache's key, so a changed manifest is read again."""
    manifest = Manifest.parse(storage_for(path).read(path), path)
    if manifest.step not in (None, step):
        raise DamagedCheckpointError(f"this is the manifest of step {manifest.step}", path=path, step=step)
    facts = manifest.began, manifest.attempt, manifest.upload
    return StoredStep(step, manifest.created, manifest.keep, stamp.modified, (), *facts)
