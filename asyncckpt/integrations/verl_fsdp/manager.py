"""The manager of checkpoints that verl's FSDP engine makes, one on each rank."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fs import is_non_local

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, StorageError
from asyncckpt.extension import (
    MANIFEST_NAME,
    Save,
    absolute_path,
    engines,
    from_first,
    job_of_checkpoints,
    on_all,
    storage_for,
)
from asyncckpt.integrations.capture import begin_save, capturing, replaced, told_to_all
from asyncckpt.integrations.verl_fsdp.contents import (
    extra_file,
    extra_name,
    load_state,
    model_state,
    optimizer_state,
    read_extra,
    stored_names,
)
from asyncckpt.integrations.verl_fsdp.deferred import DeferredStep
from asyncckpt.integrations.verl_fsdp.tracker import folder_of_tracker, latest_step, pointer_to

logger = logging.getLogger(__name__)

PUBLISH_VARIABLE = "ASYNC_CKPT_VERL_PUBLISH"
"""An environment variable: with "1" the weights of each checkpoint of the actor are published, as its step."""

_ACTOR = "actor"  # as verl's trainers call its folder
_made = itertools.count()


@dataclass(frozen=True)
class _Begun:
    """A checkpoint of this job for which older ones have not gone yet."""

    save: Save
    max_ckpt_to_keep: int | None

    def is_latest(self) -> bool:
        """Whether it is durable, and a job that is resumed would load it. Raises ``OSError``."""
        if not self.save.done() or self.save.failure is not None:
            return False
        folder = folder_of_tracker(str(self.save.path))
        return folder is None or latest_step(folder) == self.save.step


class AsyncckptFSDPManager(FSDPCheckpointManager):  # type: ignore[misc]  # verl has no types
    """Saves what verl's ``FSDPCheckpointManager`` saves, through our engine, and loads what either has saved."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Start nothing yet; the arguments are those of verl's own."""
        super().__init__(*args, **options)
        self._kind = f"verl's manager {next(_made)}"  # those of actor and critic may be in one process
        self._begun: list[_Begun] = []
        self._warned = False

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save one checkpoint, of all ranks.

        It gets its name when it is complete and durable. This returns then, or, for a ``DeferredStep``, as soon as the
        tensors are copied. Older ones go later, when verl's tracker has passed them.

        Args:
            local_path: Its folder. None: wait for those under way.
            hdfs_path: verl does not use it.
            global_step: The step it is of.
            max_ckpt_to_keep: As verl has it: how many of those that this job has saved stay.

        Raises:
            AssertionError: There is nothing to take what is to be saved from.
            CheckpointError: As ``Engine.save`` and ``Save.result`` raise; an earlier save failed, and nobody was told.
        """
        if local_path is None:
            engines.get().wait()
            self._remove_older()
            return
        if (reason := self._why_stock(local_path)) is not None:
            if not self._warned:
                logger.warning("checkpoints are saved by verl itself, and the training waits: %s", reason)
            self._warned = True
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
            return
        self._check("save", has_model=self.should_save_model, has_optimizer=self.should_save_optimizer)
        self._remove_older()
        step, place = int(global_step), absolute_path(local_path)
        publishes = self._begin_publishing(place)
        with told_to_all(place, step, None), capturing(os.path.basename(place), self._kind) as capture:
            self._capture_small_files(str(capture.folder), step)
            if state := self._state():
                capture.files.add_dcp_folder("", state)
            if self.should_save_extra:
                data = extra_file(self.lr_scheduler, self.get_rng_state())
                capture.files.add_bytes(extra_name(self.rank, self.world_size), data)
        is_deferred = isinstance(global_step, DeferredStep)
        parts = getattr(global_step, "parts", ())
        pointer = pointer_to(os.path.dirname(place), parts) if is_deferred else None
        save = begin_save(place, capture, step, None, pointer=pointer)
        self._begun.append(_Begun(save, max_ckpt_to_keep))
        if publishes:
            _publish(save, step)
        if not is_deferred:
            save.result()  # whoever asked names the step as the latest when this returns
            self._remove_older()

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load one checkpoint, that any number of ranks has saved, and check every byte. verl loads its own.

        Args:
            local_path: Its folder. None: do nothing.
            hdfs_path, del_local_after_load: As verl's own: copies that it has made of remote files go.

        Raises:
            AssertionError: There is nothing to load into.
            CheckpointError: As ``loading.load`` raises.
            ValueError: A checkpoint of adapters has some that the model has not.
        """
        path = None if local_path is None or is_non_local(local_path) else absolute_path(local_path)
        names = None if path is None else from_first(partial(stored_names, path))
        if path is None or names is None:
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        self._check("load", has_model=self.should_load_model, has_optimizer=self.should_load_optimizer)
        wanted = {"with_model": self.should_load_model, "with_optimizer": self.should_load_optimizer}
        load_state(path, names, self.model, self.optimizer, **wanted)
        if self.should_load_extra:
            schedule, rng = read_extra(path, self.rank, self.world_size)
            if rng is None:
                logger.info("fewer ranks have saved: the random numbers of this one are its own")
            else:
                self.load_rng_state(rng)
            if schedule is not None and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(schedule)
        torch.distributed.barrier()

    def remove_previous_save_local_path(self, path: str | Sequence[str]) -> None:
        """Remove checkpoints; those of ours lose their names first, and stay while somebody reads them."""
        for each in [path] if isinstance(path, str) else path:
            if os.path.lexists(os.path.join(each, MANIFEST_NAME)):
                try:
                    storage_for(each).remove_checkpoint(os.path.abspath(each))
                except StorageError as error:
                    logger.warning("an old checkpoint could not be removed: %s", error)
            else:
                super().remove_previous_save_local_path(each)

    def _check(self, what: str, *, has_model: bool, has_optimizer: bool) -> None:
        for name, is_wanted in (("model", has_model), ("optimizer", has_optimizer)):
            if is_wanted and getattr(self, name) is None:  # verl asserts it, in these words
                raise AssertionError(f"{name} must be provided when checkpoint_contents.{what} includes ['{name}']")

    def _begin_publishing(self, place: str) -> bool:
        """Whether rollouts are to have the weights out of the image of this save. Then its engine is one they find."""
        root = folder_of_tracker(place)
        if root is None or os.path.basename(place) != _ACTOR or not self.should_save_model:
            return False
        if os.environ.get(PUBLISH_VARIABLE) != "1":
            return False
        engines.get(job=job_of_checkpoints(root, Config.from_env().job_id))
        return True

    def _why_stock(self, local_path: str) -> str | None:
        """Why verl has to save itself; None: it need not."""
        if is_non_local(local_path):
            return f"{local_path} is remote"
        if self.should_save_optimizer and not isinstance(self.optimizer, torch.optim.Optimizer | None):
            return f"{type(self.optimizer).__qualname__} is no optimizer of torch's"
        return None

    def _state(self) -> dict[str, Any]:
        state = {}
        if self.should_save_model:
            # verl 0.8 knows no checkpoints of adapters alone.
            lora_only = getattr(self, "should_save_lora_only", False)
            state["model"] = model_state(self.model, lora_only=lora_only)
        if self.should_save_optimizer:
            state["optimizer"] = optimizer_state(self.model, self.optimizer)
        return state

    def _capture_small_files(self, folder: str, step: int) -> None:
        """Have verl write what it writes beside model, optimizer and schedule: configuration, tokenizer, weights for
        Hugging Face."""
        if self.should_save_hf_model:
            # Before all ranks gather the weights: whoever fails would not come.
            on_all(partial(self._have_verl_write, folder, step, []))
            self._have_verl_write(folder, step, ["hf_model"])
        else:
            self._have_verl_write(folder, step, [])

    def _have_verl_write(self, folder: str, step: int, contents: list[str]) -> None:
        with (
            replaced(self, "checkpoint_save_contents", contents),
            replaced(self, "register_checkpoint", lambda *_: None),
            # The ranks write to folders of their own, and who fails tells the others otherwise.
            replaced(torch.distributed, "barrier", lambda *_, **__: None),
        ):
            super().save_checkpoint(folder, global_step=step)

    def _remove_older(self) -> None:
        """Have verl remove what is older than the newest that a resumed job would load, which is durable."""
        passed = 0
        with contextlib.suppress(OSError):  # of the tracker: nothing goes then
            for number, each in enumerate(self._begun, 1):
                passed = number if each.is_latest() else passed
        for each in self._begun[:passed]:
            if self.rank == 0 and each.save.failure is None:
                path = str(each.save.path)
                # Saved again: verl would count it twice, and remove it as an older one than itself.
                if path in self.previous_saved_paths:
                    self.previous_saved_paths.remove(path)
                self.register_checkpoint(path, each.max_ckpt_to_keep)
        self._begun = self._begun[passed:]


def _publish(save: Save, step: int) -> None:
    """Let readers have the weights where they are staged. What is wrong with that is no fault of the checkpoint."""
    try:
        # A training that is resumed goes back, and so do its readers.
        engines.get().publish(save, step, roll_back=True)
    except CheckpointError as error:
        logger.warning("the weights of step %d are not published: %s", step, error)
