"""Provide the checkpoint manager that a configuration of torchtitan names, and list the checkpoints in its folder."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem

from asyncckpt.config import Config as EngineConfig
from asyncckpt.errors import CheckpointError, StorageError
from asyncckpt.extension import (
    METADATA_NAME,
    Claim,
    Engine,
    Rotation,
    Save,
    absolute_path,
    check_job,
    held_checkpoints,
    is_stock,
    job_of_checkpoints,
    load,
    ranks_of,
    replace_or_set_aside,
    storage_for,
    synchronize_staging,
    wait_for_attempts,
)

logger = logging.getLogger(__name__)

# Step numbers have no padding, as in torchtitan. Unlike torchtitan, ignore hidden folders: they are incomplete.
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_HF_INDEX = "model.safetensors.index.json"


def complete_steps(folder: str) -> list[int]:
    """Return the steps that torchtitan can load, ascending. Raises ``StorageError``."""
    storage = storage_for(folder)
    return [
        step
        for step, path in _named_steps(folder)
        if any(storage.exists(os.path.join(path, mark)) for mark in (METADATA_NAME, _HF_INDEX))
    ]


def older_checkpoints(folder: str, step: int, under_way: Sequence[str]) -> tuple[str, ...]:
    """Return the checkpoints before ``step`` in the order of their removal. Incomplete folders are removed first.

    Checkpoints of later steps, from before the training went back, are kept: torchtitan resumes from the highest step.

    Args:
        folder: The folder with the checkpoints.
        step: The step that is about to be saved.
        under_way: Paths of saves that have not ended.
    """
    try:
        complete, found = complete_steps(folder), dict(_named_steps(folder))
    except StorageError as error:
        logger.warning("old checkpoints could not be listed: %s", error)
        return ()
    found |= {int(path.rpartition("-")[2]): path for path in under_way}
    incomplete = found.keys() - set(complete) - {number for number, path in found.items() if path in under_way}
    order = sorted(found, key=lambda number: (number not in incomplete, number))
    return tuple(found[number] for number in order if number < step)


def newest_held(folder: str, images: Sequence[Any]) -> Any:
    """Return the newest image in memory, unless a newer checkpoint is in storage; None if there is no such image.

    Args:
        folder: The folder with the checkpoints.
        images: The images, from ``held_checkpoints``.

    Raises:
        StorageError: The folder cannot be listed.
    """
    newest = max(complete_steps(folder), default=-1)
    for each in images:
        request, step = each.request, each.request.step or 0
        if step < newest or request.path != os.path.join(folder, f"step-{step}"):
            continue
        if storage_for(request.path).is_finalized(request.path, request.attempt):
            return each
        if step > newest and not each.committed:  # otherwise the checkpoint was removed or replaced
            return each
    return None


def _named_steps(folder: str) -> list[tuple[int, str]]:
    found = [(_STEP.fullmatch(name), name) for name in storage_for(folder).names_in(folder)]
    return sorted((int(step[1]), os.path.join(folder, name)) for step, name in found if step)


class AsyncckptManager(CheckpointManager):  # type: ignore[misc]  # torchtitan has no types
    """Saves as torchtitan's ``CheckpointManager`` does, but through our engine. Loads checkpoints of both managers."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]  # likewise
        """The fields of torchtitan's own configuration. The environment sets other options (``Config.from_env``)."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async_with_pinned_mem"
        """When a save returns: when the checkpoint is durable (``disabled``), when the tensors are copied (``async``),
        or at once (``async_with_pinned_mem``). In the last mode the next optimizer step waits for the copies."""

    def __init__(self, config: Config, *, base_folder: str = "", **parts: Any) -> None:
        """Make the folder and the engine. The first save starts the worker.

        Args:
            config: The configuration.
            base_folder: The job's folder. The checkpoints are in its subfolder ``config.folder``.
            **parts: The objects to save, as for torchtitan's own manager.

        Raises:
            StorageError: The folder is an address (``s3://``), or cannot be made.
            ValueError: An environment variable is invalid, or as torchtitan's own manager raises.
        """
        quiet = copy.copy(config)  # so that torchtitan starts neither a purging thread nor another process group
        quiet.keep_latest_k, quiet.async_mode = 0, "disabled"
        super().__init__(quiet, base_folder=base_folder, **parts)
        if not self.enable:
            return
        self.folder: str = absolute_path(filesystem.join(base_folder, config.folder))
        if not self.load_only:
            try:
                os.makedirs(self.folder, exist_ok=True)
            except OSError as error:
                raise StorageError(f"making the folder failed: {error.strerror}", path=self.folder) from error
        self.async_mode, self.keep_latest_k = AsyncMode(config.async_mode), config.keep_latest_k
        overlaps = self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM
        self._config = own = dataclasses.replace(EngineConfig.from_env(), overlap=overlaps)
        job, claim = job_of_checkpoints(self.folder, own.job_id), Claim(self.folder, own.job_id)
        self._engine = Engine(own, job=job, claim=claim)
        self.save_future: futures.Future[Any] | None = None
        self._is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self._is_model_alone = False  # whether the current save has only the model
        self._saves: list[Save] = []  # the newest save, and older ones not ended when it began

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        structured_logger.add_step_tag("checkpoint_save")
        with structured_logger.log_trace_span("checkpoint_save"), torch.no_grad():
            self._maybe_wait_for_staging()  # getting a model's state may change the state that is being copied
            # A checkpoint of the model alone cannot resume training, so it removes no older ones, as in torchtitan.
            self._is_model_alone = last_step and self.last_save_model_only
            if last_step:
                for save in list(self._saves):  # otherwise Config.when_busy may skip this save
                    save.future.exception()
                self._save_last_step(curr_step)  # calls dcp_save, too
                return True
            place = self._create_checkpoint_id(curr_step)
            self.dcp_save(self._flattened_model_states_sd(), place, self.async_mode)
        return self._saves[-1].failure is None  # a skipped or failed save may not raise

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save one checkpoint; the methods of torchtitan's own manager call this.

        Args:
            state_dict: The state to save.
            checkpoint_id: The folder. An existing checkpoint there is replaced in one step. Any other contents are
                renamed.
            async_mode: Whether to wait until the checkpoint is durable; see ``Config.async_mode``.
            enable_garbage_collection: As for torchtitan's own method, with ``to_hf``.
            to_hf: Save as safetensors for Hugging Face. torchtitan's own code writes the files, and the training waits.

        Returns:
            The future of the save; None if the save has ended.

        Raises:
            CheckpointError: As ``Engine.save`` raises; or an earlier save has failed, unreported so far.
        """
        if to_hf:
            self._engine.wait()
            logger.warning("torchtitan itself writes %s for Hugging Face; it is not made in one step", checkpoint_id)
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        step = int(os.path.basename(checkpoint_id).removeprefix("step-"))
        self._saves = [each for each in self._saves if not each.done()]
        rotation = None
        if self.keep_latest_k > 0 and not self._is_model_alone and self._is_first:
            older = older_checkpoints(self.folder, step, [save.path for save in self._saves])
            rotation = Rotation(older, self.keep_latest_k - 1)
        existing = replace_or_set_aside(checkpoint_id)
        save = self._engine.save(checkpoint_id, state_dict, step=step, existing=existing, rotation=rotation)
        self._saves.append(save)
        if async_mode is not AsyncMode.DISABLED:
            self.save_future = save.future
            return save.future
        if self._config.failure == "raise":
            save.result()
        save.future.exception()  # waits
        return None

    def _maybe_wait_for_staging(self) -> None:
        synchronize_staging(self._saves, self._config.timeout)

    def _wait_for_saving(self) -> None:
        self._engine.wait()
        self.save_future = None

    def _load(self, step: int = -1) -> bool:
        with torch.no_grad():
            ranks_of().from_first(partial(check_job, self.folder, self._config.job_id))
            if not self.load_only:  # otherwise the worker belongs to another job
                if step == -1 and self._load_from_memory():
                    return True
                ranks_of().from_first(partial(wait_for_attempts, self.folder, self._config.timeout))
            found: bool = super()._load(step)
            return found

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load one checkpoint, and check every byte if it is ours. torchtitan's own ``dcp_load`` loads all others.

        Args:
            state_dict, checkpoint_id, from_hf, from_quantized: As for torchtitan's own method.

        Raises:
            CheckpointError: As ``loading.load`` raises.
        """
        if from_hf or filesystem.is_remote(checkpoint_id) or ranks_of().from_first(partial(is_stock, checkpoint_id)):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        self._fill(state_dict, checkpoint_id)

    def _fill(self, states: dict[str, Any], path: str, source: Any = None) -> None:
        # Each rank loads only its own data loader's state, so do not warn about unused names.
        load(states, path, source=source, progress=self._config.progress, warns=False)
        self.states[MODEL].load_state_dict(states)

    def _find_load_step(self, folder: str = "") -> int:
        complete = ranks_of().from_first(lambda: complete_steps(folder or self.folder))
        return complete[-1] if complete else -1

    def _load_from_memory(self) -> bool:
        """Load the image that a dead trainer's worker holds, if it is the newest state. Return whether it is."""

        for held in held_checkpoints(self._engine, partial(newest_held, self.folder)):
            with held.tried(), held.opened() as source:
                self._fill(self._states_to_load(model_only=held.step == 0), held.path, source)
                logger.info("step %s was loaded from memory", held.step)
                return True
        return False

    def _close(self) -> None:
        engine, error = getattr(self, "_engine", None), sys.exc_info()[1]
        if engine is None:
            return
        try:
            # Keep the state in memory after an error, because the training is likely to be restarted.
            engine.close(linger=isinstance(error, Exception))
        except CheckpointError as trouble:
            if error is None:
                raise
            if not trouble.is_logged:  # and not raised, because the training's error matters more
                logger.error("closing the saves of a failed training failed: %s", str(trouble))
