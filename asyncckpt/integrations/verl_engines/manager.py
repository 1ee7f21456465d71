"""Save the checkpoints of all engines of verl in one way: a class that stands before each manager of verl.

The manager of verl saves as usual, but to a scratch folder. ``capture`` keeps its tensors and files, and the engine
saves them as one checkpoint. A subclass may add to this, or save another form.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.fs import is_non_local

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, StorageError
from asyncckpt.extension import MANIFEST_NAME, Save, absolute_path, engines, job_of_checkpoints, storage_for
from asyncckpt.integrations.capture import Capture, begin_save, capturing, replaced, told_to_all
from asyncckpt.integrations.verl_engines.driver import DeferredStep, folder_of_tracker, latest_step, pointer_to

logger = logging.getLogger(__name__)

PUBLISH_VARIABLE = "ASYNC_CKPT_VERL_PUBLISH"
"""Environment variable. If "1", the weights of each actor checkpoint are published; the step is the version."""

_ACTOR = "actor"  # as verl's trainers call its folder
_made = itertools.count()


@dataclass(frozen=True)
class _Begun:
    """A checkpoint of this job, for which older checkpoints are not removed yet."""

    save: Save
    max_ckpt_to_keep: int | None

    def is_latest(self) -> bool:
        """Return whether the checkpoint is durable and a resumed job would load it. Raises ``OSError``."""
        if not self.save.done() or self.save.failure is not None:
            return False
        folder = folder_of_tracker(str(self.save.path))
        return folder is None or latest_step(folder) == self.save.step


class AsyncManager(BaseCheckpointManager):  # type: ignore[misc]  # verl has no types
    """Saves through our engine, with the files of the manager of verl that follows in a class's bases."""

    _has_weights = False
    """Whether readers of weights understand the checkpoints."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Start no worker yet. The arguments are the same as for verl's own manager."""
        super().__init__(*args, **options)
        self._kind = f"verl's manager {next(_made)}"  # the managers of actor and critic may be in one process
        self._begun: list[_Begun] = []
        self._warned = False

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save one checkpoint, with all ranks.

        The checkpoint gets its name when it is complete and durable. This method returns at that time, or, for a
        ``DeferredStep``, as soon as the tensors are copied. Older checkpoints are removed later, when verl's tracker
        has passed them.

        Args:
            local_path: The checkpoint's folder. If None, only wait for the saves under way.
            hdfs_path: Unused by verl.
            global_step: The training step.
            max_ckpt_to_keep: As for verl: the number of this job's checkpoints to keep.

        Raises:
            AssertionError: Something to save is missing.
            CheckpointError: As ``Engine.save`` and ``Save.result`` raise; or an earlier save failed, unreported so far.
        """
        if local_path is None:
            engines.get().wait()
            self._remove_older()
            return
        if (reason := self._why_stock(local_path, hdfs_path)) is not None:
            if not self._warned:
                logger.warning("checkpoints are saved by verl itself, and the training waits: %s", reason)
            self._warned = True
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
            return
        self._remove_older()
        step, place = int(global_step), absolute_path(local_path)
        publishes = self._begin_publishing(place)
        with told_to_all(place, step, None), capturing(os.path.basename(place), self._kind) as capture:
            self._capture(capture, step)
        is_deferred = isinstance(global_step, DeferredStep)
        parts = getattr(global_step, "parts", ())
        pointer = pointer_to(os.path.dirname(place), parts) if is_deferred else None
        save = begin_save(place, capture, step, None, pointer=pointer)
        self._begun.append(_Begun(save, max_ckpt_to_keep))
        if publishes:
            _publish(save, step)
        if not is_deferred:
            save.result()  # the caller names the step as the latest when this returns
            self._remove_older()

    def remove_previous_save_local_path(self, path: str | Sequence[str]) -> None:
        """Remove checkpoints. A checkpoint of ours is renamed first, and stays while readers read it."""
        for each in [path] if isinstance(path, str) else path:
            if os.path.lexists(os.path.join(each, MANIFEST_NAME)):
                try:
                    storage_for(each).remove_checkpoint(os.path.abspath(each))
                except StorageError as error:
                    logger.warning("an old checkpoint could not be removed: %s", error)
            else:
                super().remove_previous_save_local_path(each)

    def _begin_publishing(self, place: str) -> bool:
        """Return whether to publish the weights of this save. If so, make sure that rollouts find the job's engine."""
        root = folder_of_tracker(place)
        if root is None or os.path.basename(place) != _ACTOR or not self.should_save_model:
            return False
        if not self._has_weights or os.environ.get(PUBLISH_VARIABLE) != "1":
            return False
        engines.get(job=job_of_checkpoints(root, Config.from_env().job_id))
        return True

    def _why_stock(self, local_path: str, hdfs_path: str | None) -> str | None:
        """Return the reason why verl has to save by itself; None if asyncckpt can save."""
        return f"{local_path} is remote" if is_non_local(local_path) else None

    def _capture(self, capture: Capture, step: int) -> None:
        """Add everything of this rank to ``capture``."""
        self.have_verl_write(str(capture.folder), step)

    def have_verl_write(self, folder: str, step: int) -> None:
        """Make verl save to ``folder``, without a barrier and without removing older checkpoints."""
        with (
            replaced(self, "register_checkpoint", lambda *_: None),
            # No barrier is needed: each rank writes to its own folder, and told_to_all reports a failure to all ranks.
            replaced(torch.distributed, "barrier", lambda *_, **__: None),
        ):
            super().save_checkpoint(folder, global_step=step)

    def _remove_older(self) -> None:
        """Make verl remove the checkpoints older than the newest durable one that a resumed job would load."""
        passed = 0
        with contextlib.suppress(OSError):  # if the tracker cannot be read, nothing is removed
            for number, each in enumerate(self._begun, 1):
                passed = number if each.is_latest() else passed
        for each in self._begun[:passed]:
            if self.rank == 0 and each.save.failure is None:
                path = str(each.save.path)
                # Otherwise verl would count a step that is saved again twice, and remove the new checkpoint as old.
                if path in self.previous_saved_paths:
                    self.previous_saved_paths.remove(path)
                self.register_checkpoint(path, each.max_ckpt_to_keep)
        self._begun = self._begun[passed:]


def _publish(save: Save, step: int) -> None:
    """Publish the staged weights to readers. An error in publishing does not fail the checkpoint."""
    try:
        # A resumed training goes back to older versions, so its readers must go back, too.
        engines.get().publish(save, step, roll_back=True)
    except CheckpointError as error:
        logger.warning("the weights of step %d are not published: %s", step, error)
