"""Make verl's trainers save in the background, and advance the tracker to a step when all its parts are durable.

A trainer tells the workers to save the actor and the critic, writes the state of its data loader, and then names the
step in the tracker, unless ``async_save`` is set. So this module sets ``async_save`` during a save. The type
``DeferredStep`` tells the workers that they need not wait until the step is durable.

A step has several parts: the checkpoints of actor and critic, saved by different workers, and the driver's own files.
At the end, the driver writes a note with the names of the parts to the folder of the step. Each worker tries to advance
the tracker when its part is durable. The driver tries when its note is durable. An attempt succeeds only if the note
and all parts exist. So the last attempt advances the tracker, even if the trainers are dead.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.extension import MANIFEST_NAME, Pointer, advance, storage_for, wait_for_attempts
from asyncckpt.integrations.capture import replaced

logger = logging.getLogger(__name__)


class DeferredStep(int):
    """A step that the caller does not name as the latest: the worker that completes the step names it.

    The driver of a job passes this type to the workers instead of ``int``, so they need not wait until the step is
    durable. For a plain ``int`` the workers must wait, because the caller then names the step at once.
    """

    parts: tuple[str, ...]
    """The folders that make up the step, such as ``actor`` and ``critic``."""

    def __new__(cls, step: int, parts: Sequence[str]) -> DeferredStep:
        new = super().__new__(cls, step)
        new.parts = tuple(parts)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.parts)


_TRACKER = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d+)")
_NOTE = "asyncckpt_parts.json"


def folder_of_tracker(path: str) -> str | None:
    """Return the folder with the tracker for a checkpoint; None if the checkpoint is in no folder of a step.

    Args:
        path: Path of the checkpoint: ``folder/global_step_10``, or ``folder/global_step_10/actor``.
    """
    above = os.path.dirname(path)
    if _STEP.fullmatch(os.path.basename(path)):
        return above
    return os.path.dirname(above) if _STEP.fullmatch(os.path.basename(above)) else None


def latest_step(folder: str) -> int | None:
    """Return the step that the tracker in ``folder`` names; None if it names no step. Raises ``OSError``."""
    try:
        with open(os.path.join(folder, _TRACKER), encoding="utf-8") as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def pointer_to(step_folder: str, parts: Sequence[str]) -> Pointer:
    """Return the tracker as a pointer to a step, which advances when its note and all its ``parts`` exist."""
    folder, name = os.path.split(step_folder)
    needs = tuple(os.path.join(step_folder, each) for each in (*parts, _NOTE))
    return Pointer(os.path.join(folder, _TRACKER), name.removeprefix("global_step_"), needs)


class StepTracker:
    """Advances the tracker of one folder for the driver of a job."""

    def __init__(self, folder: str, timeout: float) -> None:
        """Set the folder and the timeout.

        Args:
            folder: The folder of the tracker, and of the steps.
            timeout: Seconds to wait for the workers of a killed job.
        """
        self._folder, self._timeout = folder, timeout
        self._littered: list[str] = []
        """Folders of steps that have remains of killed workers."""

    def step_folder(self, step: int) -> str:
        """Return the folder in which verl has the checkpoints of ``step``."""
        return os.path.join(self._folder, f"global_step_{step}")

    def complete(self, step: int, parts: Sequence[str]) -> None:
        """Advance to ``step``, now or as soon as its parts exist. The driver must have written its own files before.

        Args:
            step: The step.
            parts: Names of folders in the step's folder. They appear when they are durable.

        Raises:
            OSError: The driver's own files cannot be made durable.
            StorageError: The tracker cannot be written.
        """
        folder = self.step_folder(step)
        _sync_files(folder, parts)
        advance(Pointer(os.path.join(folder, _NOTE), json.dumps(list(parts))))
        _sync(self._folder)
        if advance(pointer_to(folder, parts)):
            logger.info("step %d is durable, and the tracker file names it", step)
        self._clean_up()

    def catch_up(self) -> None:
        """Advance to the step that became complete last, if the previous job was killed before it could advance.

        Wait until the workers of the previous job finish writing. Raises ``StorageError`` on a timeout.
        """
        noted: list[tuple[int, str]] = []
        for name in filter(_STEP.fullmatch, storage_for(self._folder).names_in(self._folder)):
            folder = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, f".{_NOTE}.new"))  # from a driver that was killed while writing
            if _is_littered(folder):
                self._littered.append(folder)
            if (stamp := storage_for(folder).stamp(os.path.join(folder, _NOTE))) is not None:
                noted.append((stamp.modified, folder))
        for at, folder in sorted(noted):
            wait_for_attempts(folder, self._timeout)
            parts = json.loads(storage_for(folder).read(os.path.join(folder, _NOTE)))
            its = pointer_to(folder, parts)
            advance(Pointer(its.path, its.text, its.needs, at))
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove the remains of killed workers, once the remains are too old to belong to a live save.

        A save removes old remains only in its own folder. Without this method the remains would stay until their step
        is saved again.
        """
        storage, left = storage_for(self._folder), []
        for folder in self._littered:
            try:
                if _is_littered(folder):  # the folder may be gone
                    # Begin and discard a save, because the storage then removes old remains beside it.
                    path, attempt = os.path.join(folder, "nothing"), f"{secrets.token_hex(6)}-0"
                    storage.begin_checkpoint(path, attempt, 0, self._timeout).discard()
                if not _is_littered(folder):
                    continue
            except StorageError as error:
                logger.info("unfinished files in %s could not be removed: %s", folder, error)
            left.append(folder)
        self._littered = left


def _is_littered(folder: str) -> bool:
    return any(name.startswith(".") for name in storage_for(folder).names_in(folder))


def _sync_files(folder: str, but: Sequence[str]) -> None:
    """Make the files in ``folder`` durable, except the durable folders in ``but`` and its hidden folders."""
    for above, folders, names in os.walk(folder):
        if above == folder:
            # A part without a manifest was written by verl itself.
            durable = [name for name in but if os.path.exists(os.path.join(folder, name, MANIFEST_NAME))]
            folders[:] = [name for name in folders if name not in durable and not name.startswith(".")]
        for name in names:
            _sync(os.path.join(above, name))
        _sync(above)


def _sync(path: str) -> None:
    """Make a file durable, or the names in a folder. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have nothing to sync for a folder
            raise
    finally:
        os.close(fd)


_ENGINES = ("fsdp", "fsdp2", "veomni", "megatron", "mindspeed", "torchtitan")
_TRACKER_ATTRIBUTE = "_asyncckpt_tracker"
_PARTS = ("actor", "critic")  # as verl's trainers call their folders


def wrap(trainer_class: Any) -> None:
    """Make the trainers of a class save in the background. A derived class with its own save method keeps it.

    Args:
        trainer_class: ``RayPPOTrainer``, or a class that saves in the same way.
    """
    stock_save, stock_load = trainer_class._save_checkpoint, trainer_class._load_checkpoint

    @functools.wraps(stock_save)
    def save_checkpoint(self: Any) -> None:
        _save(self, functools.partial(stock_save, self))

    @functools.wraps(stock_load)
    def load_checkpoint(self: Any) -> Any:
        _tracker(self).catch_up()
        return stock_load(self)

    trainer_class._save_checkpoint, trainer_class._load_checkpoint = save_checkpoint, load_checkpoint


def _save(trainer: Any, stock: Callable[[], None]) -> None:
    groups, tracker, step = _groups(trainer), _tracker(trainer), int(trainer.global_steps)
    if groups is None:
        # All managers wait for this save, so verl can name the step.
        with _async_save(trainer.config.actor_rollout_ref.actor, False):
            stock()
        return
    # If a saved step is saved again, the tracker may already name it, so all workers wait for the save.
    is_there = os.path.lexists(tracker.step_folder(step))
    parts = _PARTS[: len(groups)]
    with contextlib.ExitStack() as replacements:
        for group, part in () if is_there else zip(groups, parts, strict=True):
            deferred = functools.partial(_save_deferred, group.save_checkpoint, part, parts)
            replacements.enter_context(replaced(group, "save_checkpoint", deferred))
        replacements.enter_context(_async_save(trainer.config.actor_rollout_ref.actor, True))
        stock()
    tracker.complete(step, parts)
    if step >= trainer.total_training_steps:  # nothing could name this step after the job's end
        for _ in range(2):  # first wait for the saves and raise failures, then remove old steps
            for group in groups:
                group.save_checkpoint(None)


def _save_deferred(
    save: Callable[..., Any],
    part: str,
    parts: tuple[str, ...],
    local_path: str,
    hdfs_path: str | None = None,
    global_step: int = 0,
    max_ckpt_to_keep: int | None = None,
) -> Any:
    if os.path.basename(local_path) != part:
        raise ValueError(f"this verl saves to {local_path}, where asyncckpt knows {part!r}: please report this")
    return save(local_path, hdfs_path, DeferredStep(global_step, parts), max_ckpt_to_keep=max_ckpt_to_keep)


@contextlib.contextmanager
def _async_save(actor: Any, value: bool) -> Iterator[None]:
    """Set ``async_save`` for verl's trainer. With True it writes no tracker, and expects no durable step."""
    from omegaconf import open_dict

    before = actor.checkpoint.get("async_save", False)
    with open_dict(actor.checkpoint):
        actor.checkpoint["async_save"] = value
    try:
        yield
    finally:
        with open_dict(actor.checkpoint):
            actor.checkpoint["async_save"] = before


def _groups(trainer: Any) -> list[Any] | None:
    """Return the worker groups that save; None if asyncckpt has no manager for an engine."""
    config, groups = trainer.config, [trainer.actor_rollout_wg]
    strategies = [config.actor_rollout_ref.actor.strategy]
    if trainer.use_critic:
        groups.append(trainer.critic_wg)
        strategies.append(config.critic.strategy)
    return groups if all(each in _ENGINES for each in strategies) else None


def _tracker(trainer: Any) -> StepTracker:
    known: StepTracker | None = vars(trainer).get(_TRACKER_ATTRIBUTE)
    if known is None:
        config = Config.from_env()
        folder = os.path.abspath(trainer.config.trainer.default_local_dir)
        known = StepTracker(folder, config.timeout + config.commit_timeout)
        setattr(trainer, _TRACKER_ATTRIBUTE, known)
    return known
