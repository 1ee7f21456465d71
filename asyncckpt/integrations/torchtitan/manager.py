"""The manager of checkpoints that a configuration of torchtitan names."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import sys
from concurrent import futures
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem

from asyncckpt.config import Config as EngineConfig
from asyncckpt.devices.captures import check_guarded_capture
from asyncckpt.engine.engine import Engine
from asyncckpt.errors import CheckpointError, StorageError
from asyncckpt.integrations.torchtitan.held import newest_held
from asyncckpt.integrations.torchtitan.steps import complete_steps, remove_older
from asyncckpt.link.messages import Claim
from asyncckpt.link.root_lock import check_job
from asyncckpt.loading.load import load
from asyncckpt.loading.memory_source import MemorySource, load_image
from asyncckpt.loading.source import is_stock, wait_for_attempts
from asyncckpt.publication import job_of_checkpoints
from asyncckpt.ranks.collectives import from_first, is_first
from asyncckpt.save_handle import Save
from asyncckpt.storage import absolute, refuse_address, replace_or_set_aside

logger = logging.getLogger(__name__)


class AsyncckptManager(CheckpointManager):  # type: ignore[misc]  # torchtitan has no types
    """Saves as torchtitan's ``CheckpointManager`` does, through our engine, and loads what either has saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]  # likewise
        """The fields of torchtitan's own; what else there is to choose the environment says (``Config.from_env``)."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async_with_pinned_mem"
        """When a save returns: when it is durable (``disabled``), when its tensors are copied (``async``), or at once
        (``async_with_pinned_mem``): then the next optimizer step waits for the copies."""

    def __init__(self, config: Config, *, base_folder: str = "", **parts: Any) -> None:
        """Start nothing yet.

        Args:
            config: What to do when.
            base_folder: Of the job; the checkpoints are in ``config.folder`` there.
            **parts: What is saved, as torchtitan's own manager takes it.

        Raises:
            StorageError: The folder is an address (``s3://``), or cannot be made.
            ValueError: A variable of the environment makes no sense; also as torchtitan's own raises.
        """
        quiet = copy.copy(config)  # so that there is neither a thread that purges nor a process group of its own
        quiet.keep_latest_k, quiet.async_mode = 0, "disabled"
        super().__init__(quiet, base_folder=base_folder, **parts)
        if not self.enable:
            return
        self.folder: str = absolute(filesystem.join(base_folder, config.folder))
        refuse_address(self.folder)
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
        self._is_first = is_first(None)  # the process group may be gone by the time that this is closed
        self._is_model_alone = False  # what is being saved
        self._saves: list[Save] = []  # that had not ended when the newest began, and that

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        structured_logger.add_step_tag("checkpoint_save")
        with structured_logger.log_trace_span("checkpoint_save"), torch.no_grad():
            self._maybe_wait_for_staging()  # to ask a model for its state may change what was asked for before
            # No training goes on from a model alone: those that one can go on from stay, as torchtitan leaves them.
            self._is_model_alone = last_step and self.last_save_model_only
            if last_step:
                futures.wait([save.future for save in self._saves])  # or this one could be skipped (Config.when_busy)
                self._save_last_step(curr_step)  # calls dcp_save, too
                return True
            place = self._create_checkpoint_id(curr_step)
            self.dcp_save(self._flattened_model_states_sd(), place, self.async_mode)
        return self._saves[-1].failure is None  # it may have been skipped, or its failure be only logged

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save one checkpoint; the methods of torchtitan's own call this.

        Args:
            state_dict: What to save.
            checkpoint_id: The folder. A checkpoint that is there is replaced in one step; anything else gets another
                name.
            async_mode: Whether to wait until it is durable; see ``Config.async_mode``.
            enable_garbage_collection: As torchtitan's own, for ``to_hf``.
            to_hf: As safetensors for Hugging Face: torchtitan's own code writes them, and the training waits.

        Returns:
            The future of the save; None where it has ended.

        Raises:
            CheckpointError: As ``Engine.save`` raises; an earlier save has failed, and nobody was told.
        """
        if to_hf:
            self._engine.wait()
            logger.warning("torchtitan itself writes %s for Hugging Face; it is not made in one step", checkpoint_id)
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        step = int(os.path.basename(checkpoint_id).removeprefix("step-"))
        save = self._engine.save(checkpoint_id, state_dict, step=step, existing=replace_or_set_aside(checkpoint_id))
        self._saves = [*(each for each in self._saves if not each.done()), save]
        if self.keep_latest_k > 0 and self._is_first and not self._is_model_alone:
            remove = partial(remove_older, self.folder, step, self.keep_latest_k)
            save.when_durable(remove, "removing older checkpoints")
        if async_mode is not AsyncMode.DISABLED:
            self.save_future = save.future
            return save.future
        if self._config.failure == "raise":
            save.result()
        futures.wait([save.future])
        return None

    def _maybe_wait_for_staging(self) -> None:
        copying = [save for save in self._saves if not save.staged()]
        check_guarded_capture(copies_are_under_way=bool(copying))
        for save in copying:
            save.synchronize_staging(self._config.timeout)

    def _wait_for_saving(self) -> None:
        self._engine.wait()
        self.save_future = None

    def _load(self, step: int = -1) -> bool:
        with torch.no_grad():
            from_first(partial(check_job, self.folder, self._config.job_id))
            if not self.load_only:  # else the worker is another job's
                if step == -1 and self._load_from_memory():
                    return True
                from_first(partial(wait_for_attempts, self.folder, self._config.timeout))
            found: bool = super()._load(step)
            return found

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load one checkpoint, and check every byte if it is ours. Others are for torchtitan's own ``dcp_load``.

        Args:
            state_dict, checkpoint_id, from_hf, from_quantized: As there.

        Raises:
            CheckpointError: As ``loading.load`` raises.
        """
        if from_hf or filesystem.is_remote(checkpoint_id) or from_first(partial(is_stock, checkpoint_id)):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        self._fill(state_dict, checkpoint_id)

    def _fill(self, states: dict[str, Any], path: str, source: MemorySource | None = None) -> None:
        # Each rank asks for the state of its own data loader, and leaves those of the others.
        load(states, path, source=source, progress=self._config.progress, warns=False)
        self.states[MODEL].load_state_dict(states)

    def _find_load_step(self, folder: str = "") -> int:
        complete = from_first(lambda: complete_steps(folder or self.folder))
        return complete[-1] if complete else -1

    def _load_from_memory(self) -> bool:
        """Load what the worker of a dead trainer holds, if that is the newest there is. Returns whether it was."""
        found = newest_held(self._engine, self.folder)
        if found is None:
            return False
        with closing(found):
            states = self._states_to_load(model_only=found.request.step == 0)
            if not load_image(partial(self._fill, states), found):
                return False
        logger.info("loaded step %s from memory", found.request.step)
        return True

    def _close(self) -> None:
        engine, error = getattr(self, "_engine", None), sys.exc_info()[1]
        if engine is None:
            return
        try:
            # A training that ends by an error is likely to be started again: its state stays in memory.
            engine.close(linger=isinstance(error, Exception))
        except CheckpointError as trouble:
            if error is None:
                raise
            logger.error("while the training ends by an error: %s", str(trouble))  # that one matters more
