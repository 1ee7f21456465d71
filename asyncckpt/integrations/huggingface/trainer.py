"""Save the checkpoints of Hugging Face's Trainer, and of its derived classes, in the background.

``_save_checkpoint`` runs unchanged, but writes to a scratch folder (see ``capture.py``). The engine saves these files
as one folder, which gets the name ``checkpoint-N`` when all files are durable. The states of a save:

    captured, staged (``_save_checkpoint`` returns) -> ended, on any thread -> settled, on the thread that trains

The worker removes older checkpoints beyond ``save_total_limit`` as soon as a save is durable. Settling a save calls its
callbacks and pushes to the Hub. Saves are settled at the end of a step, before the next save, and in
``_finalize_training``, which waits for all saves.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import transformers.trainer
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import sort_checkpoints

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, SaveDroppedError
from asyncckpt.extension import Rotation, Save, engines
from asyncckpt.integrations.capture import (
    Capture,
    begin_save,
    capturing,
    lock_for_worker,
    replaced,
    told_to_all,
    wait_for_dead_trainer,
)
from asyncckpt.integrations.huggingface import generation

logger = logging.getLogger(__name__)

_PREFIX = "checkpoint-"
_STATE = "trainer_state.json"
_SENTINEL = "checkpoint-is-incomplete.txt"  # written by transformers' trainer_jit_checkpoint.py before it saves


def enable(trainer: Trainer, config: Config | None = None) -> None:
    """Have ``trainer`` save its checkpoints in the background from now on. A second call changes nothing.

    All ranks must call this function before they look for a checkpoint to resume from. The function waits until the
    worker of a killed trainer has written its staged checkpoints to the same ``output_dir``.

    Args:
        trainer: Any trainer that derives from transformers' Trainer. With DeepSpeed, XLA, SageMaker's model parallelism
            or ``save_on_each_node`` the trainer keeps saving by itself, with a warning.
        config: Config of the job's engine, if this is its first save; None: from the environment.

    Raises:
        TypeError: ``trainer`` lacks methods of transformers 5.
    """
    missing = [name for name in ("_save_checkpoint", "_finalize_training") if not hasattr(trainer, name)]
    if missing or not hasattr(transformers.trainer, "rotate_checkpoints"):
        raise TypeError(f"{type(trainer).__name__} is no Trainer of transformers 5, or of one that asyncckpt knows")
    if not isinstance(getattr(trainer._save_checkpoint, "__self__", None), _TrainerSaves):
        wait_for_dead_trainer(trainer.args.output_dir, config)
        _TrainerSaves(trainer, config)


@dataclass
class _Unsettled:
    """A save that is not settled yet: the trainer has not called its callbacks."""

    save: Save
    state: Any
    """A copy of the trainer's state at the save."""
    best_before: str | None
    best: str | None
    """The best checkpoint, as of this save."""
    calls: list[Callable[[], object]] = field(default_factory=list)
    """Functions that the training thread calls when the save is durable."""


class _TrainerSaves:
    """The saves of one trainer. The public methods replace those of the trainer and of its callback handler."""

    def __init__(self, trainer: Any, config: Config | None) -> None:
        self._trainer, self._config = trainer, config
        self._unsettled: list[_Unsettled] = []
        self._has_saved = False
        self._unannounced: _Unsettled | None = None
        self._warned = False
        self._handler = trainer.callback_handler
        self._stock_save, self._stock_finalize = trainer._save_checkpoint, trainer._finalize_training
        self._stock_train = trainer.train
        self._stock_on_save, self._stock_on_step_end = self._handler.on_save, self._handler.on_step_end
        trainer._save_checkpoint, trainer._finalize_training = self.save_checkpoint, self.finalize_training
        self._handler.on_save, self._handler.on_step_end = self.on_save, self.on_step_end
        trainer.train = self.train
        if generation.has_buffer(trainer):
            self._stock_load_rng, trainer._load_rng_state = trainer._load_rng_state, self.load_rng_state

    def train(self, *args: Any, **options: Any) -> Any:
        """Wait until all saves have ended, then call the trainer's own method.

        The training may resume from a checkpoint of an earlier training that ended by an exception.
        """
        self._unsettled, self._has_saved, self._unannounced = [], False, None
        if generation.has_buffer(self._trainer):
            generation.reset(self._trainer)
        try:
            engines.get(config=self._config).wait()
        except CheckpointError as error:
            if not error.is_logged:
                logger.warning("an earlier training in this process ended with a failed save: %s", error)
        return self._stock_train(*args, **options)

    def save_checkpoint(self, model: Any, trial: Any) -> None:
        """Call the trainer's own method, and return when all tensors are staged."""
        trainer, self._unannounced = self._trainer, None
        if (reason := _why_stock(trainer)) is not None:
            if not self._warned:
                logger.warning("checkpoints are saved by the trainer itself, and the training waits: %s", reason)
            self._warned = True
            self._stock_save(model, trial)
            return
        run_dir = trainer._get_output_dir(trial)
        place = os.path.join(run_dir, f"{_PREFIX}{trainer.state.global_step}")
        os.makedirs(run_dir, exist_ok=True)
        lock_for_worker(run_dir, self._config)
        is_urgent = _is_urgent(place)  # first, because this frees the place for a pending save of the same step
        # All ranks have to call their callbacks at the same point, because callbacks may communicate.
        self._settle(wait=trainer.args.world_size > 1 and any(each.calls for each in self._unsettled))
        best_before = trainer.state.best_model_checkpoint
        rotations: list[dict[str, Any]] = []
        pushes: list[str] = []
        of_save = trainer.state.global_step, self._config
        with (
            told_to_all(place, *of_save),
            capturing(os.path.basename(place)) as capture,
            self._redirected(capture, run_dir, rotations, pushes),
        ):
            self._stock_save(model, trial)
            if generation.has_buffer(trainer):
                generation.save(trainer, capture.folder)
        rotation = self._rotation(run_dir, place, **rotations[-1]) if rotations else None
        save = begin_save(place, capture, *of_save, rotation=rotation)
        state = copy.copy(trainer.state)
        state.log_history = list(state.log_history)  # the training goes on appending to its own list
        new = _Unsettled(save, state, best_before, trainer.state.best_model_checkpoint)
        new.calls += [partial(self._push, new.state, place) for _ in pushes]
        self._has_saved, self._unannounced = True, new
        self._unsettled.append(new)
        if is_urgent:
            save.result()

    def load_rng_state(self, checkpoint: str | None) -> None:
        """Call the trainer's own method, just before the first step of a resumed training. Restore the block, too."""
        self._stock_load_rng(checkpoint)
        generation.load(self._trainer, checkpoint)

    def finalize_training(self, *args: Any, **options: Any) -> Any:
        """Wait until all saves have ended and old checkpoints are removed, then call the trainer's own method.

        The trainer's own method may load the best checkpoint.
        """
        self._settle(wait=True)
        if self._has_saved:
            engines.get(config=self._config).wait()  # raises an unreported failure
        self._has_saved, self._unannounced = False, None
        return self._stock_finalize(*args, **options)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        """Call the callback handler's own method, then settle saves that have ended."""
        control = self._stock_on_step_end(args, state, control, **others)
        if args.world_size == 1:
            self._settle(wait=False)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        """Call the callback handler's own method, or defer the callbacks until the save under way is durable."""
        new, self._unannounced = self._unannounced, None
        if new is None:
            return self._stock_on_save(args, state, control, **others)
        control.should_save = False
        if any(type(callback).on_save is not TrainerCallback.on_save for callback in self._handler.callbacks):
            call = partial(self._handler.call_event, "on_save", args, new.state, control, **others)
            new.calls.append(call)
        return control

    def _settle(self, *, wait: bool) -> None:
        """Settle the saves that have ended; with ``wait``, all. The engine later raises any failure, on all ranks."""
        while self._unsettled and (wait or self._unsettled[0].save.done()):
            ended = self._unsettled.pop(0)
            if (failure := ended.save.future.exception()) is None:
                for call in ended.calls:
                    call()
            else:
                if isinstance(failure, SaveDroppedError):  # any other failure is logged already
                    logger.warning("there is no %s: %s", ended.save.path, failure)
                self._forget_best(ended)

    def _forget_best(self, failed: _Unsettled) -> None:
        """Restore the previous best checkpoint, because the save of the new best one has failed."""
        if failed.best is None or os.path.abspath(failed.best) != failed.save.path:
            return
        for other in (*self._unsettled, self._trainer.state):
            for name in ("best_before", "best", "best_model_checkpoint"):
                if getattr(other, name, None) == failed.best:
                    setattr(other, name, failed.best_before)

    def _rotation(
        self, run_dir: str, place: str, save_total_limit: int | None = None, use_mtime: bool = False, **_: object
    ) -> Rotation | None:
        """Return the checkpoints that transformers' ``rotate_checkpoints`` would remove once ``place`` exists.

        The best checkpoint is kept. The previous best checkpoint is also kept while the save of the best one may fail.
        """
        if save_total_limit is None or save_total_limit <= 0:
            return None
        under_way = [each for each in self._unsettled if not each.save.done()]
        best = [self._trainer.state.best_model_checkpoint]
        best += [name for each in under_way for name in (each.best_before, each.best)]
        kept = {os.path.abspath(path) for path in (place, *filter(None, best))}
        found = [*sort_checkpoints(run_dir, use_mtime=use_mtime), *(each.save.path for each in under_way)]
        others = [path for path in dict.fromkeys(map(os.path.abspath, found)) if path not in kept]
        # A checkpoint that was set aside has the number of its replacement, and is removed first.
        others.sort(key=lambda path: ".abandoned-" not in os.path.basename(path))
        return Rotation(tuple(others), max(0, save_total_limit - len(kept)))

    def _push(self, state: Any, folder: str) -> None:
        """Push a checkpoint to the Hub, with the state of its own step."""
        with replaced(self._trainer, "state", state):
            self._trainer._push_from_checkpoint(folder)

    @contextlib.contextmanager
    def _redirected(
        self, capture: Capture, run_dir: str, rotations: list[dict[str, Any]], pushes: list[str]
    ) -> Iterator[None]:
        """Redirect the trainer's saves to the scratch folder, and record its rotations and pushes."""
        trainer, root = self._trainer, capture.folder.parent
        stock_rotate = transformers.trainer.rotate_checkpoints

        def rotate(output_dir: Any, save_total_limit: int | None = None, **options: Any) -> None:
            if Path(output_dir) == root:
                rotations.append({**options, "save_total_limit": save_total_limit})
            else:
                stock_rotate(output_dir, save_total_limit, **options)

        best = f"{_PREFIX}{trainer.state.best_global_step}"
        if os.path.isdir(os.path.join(run_dir, best)):  # the trainer checks that the folder exists
            (root / best).mkdir(exist_ok=True)
        with (
            replaced(trainer, "_get_output_dir", lambda *_, **__: str(root)),
            replaced(trainer, "_push_from_checkpoint", pushes.append),
            replaced(transformers.trainer, "rotate_checkpoints", rotate),
        ):
            try:
                yield
            finally:
                if (found := trainer.state.best_model_checkpoint) == str(root / best):
                    trainer.state.best_model_checkpoint = os.path.join(run_dir, best)
            if found != trainer.state.best_model_checkpoint and (capture.folder / _STATE).exists():
                trainer.state.save_to_json(str(capture.folder / _STATE))


def _is_urgent(place: str) -> bool:
    """Return whether transformers' ``enable_jit_checkpoint`` saves, because the process is about to be killed.

    An urgent save must be complete when it returns. This function removes transformers' sentinel file at ``place``. The
    sentinel is not needed, because the folder gets its name only when it is complete.
    """
    sentinel = os.path.join(place, _SENTINEL)
    if not os.path.exists(sentinel):
        return False
    with contextlib.suppress(FileNotFoundError):  # another rank has removed the file
        os.remove(sentinel)
    return True


def _why_stock(trainer: Any) -> str | None:
    """Return the reason why the trainer has to save by itself; None if asyncckpt can save."""
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed writes files of its own"
    if trainer.args.save_on_each_node and trainer.args.world_size > 1:
        return "save_on_each_node makes several checkpoints of one name"
    if transformers.trainer.is_torch_xla_available() or transformers.trainer.is_sagemaker_mp_enabled():
        return "XLA and SageMaker's model parallelism write files of their own"
    return None
