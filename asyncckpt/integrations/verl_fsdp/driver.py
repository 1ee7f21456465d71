"""The driver of a job of verl's: its trainers save in the background, and a step is named when all of it is durable.

A trainer has the workers save the actor and the critic, writes the state of its data loader, and then names the step in
the tracker, unless ``async_save`` says that somebody else does. So ``async_save`` is set meanwhile, and the type of the
step tells the workers that they need not wait (``deferred.py``). The tracker is advanced by the last that completes the
step (``tracker.py``).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from asyncckpt.config import Config
from asyncckpt.integrations.capture import replaced
from asyncckpt.integrations.verl_fsdp.deferred import DeferredStep
from asyncckpt.integrations.verl_fsdp.tracker import StepTracker

_FSDP = ("fsdp", "fsdp2")
_TRACKER = "_asyncckpt_tracker"
_PARTS = ("actor", "critic")  # as verl's trainers call their folders


def wrap(trainer_class: Any) -> None:
    """Have the trainers of a class save in the background. Trainers with a save of their own keep it.

    Args:
        trainer_class: ``RayPPOTrainer``, or one that saves as it does.
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
    groups, tracker, step = _fsdp_groups(trainer), _tracker(trainer), int(trainer.global_steps)
    if groups is None:
        stock()
        return
    # A step that is saved again is replaced while its tracker may name it, so all wait until that is done.
    is_there = os.path.lexists(tracker.step_folder(step))
    parts = _PARTS[: len(groups)]
    with contextlib.ExitStack() as replacements:
        for group, part in () if is_there else zip(groups, parts, strict=True):
            deferred = functools.partial(_save_deferred, group.save_checkpoint, part, parts)
            replacements.enter_context(replaced(group, "save_checkpoint", deferred))
        replacements.enter_context(_not_naming_it(trainer.config.actor_rollout_ref.actor))
        stock()
    tracker.complete(step, parts)
    if step >= trainer.total_training_steps:  # the job ends, and with it all who could name this step
        for _ in range(2):  # waits for the saves, and raises what has failed; then removes what is too old now
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
def _not_naming_it(actor: Any) -> Iterator[None]:
    """Have the trainer leave the tracker alone, and tell its callbacks that the step may not be durable yet."""
    from omegaconf import open_dict

    before = actor.checkpoint.get("async_save", False)
    with open_dict(actor.checkpoint):
        actor.checkpoint["async_save"] = True
    try:
        yield
    finally:
        with open_dict(actor.checkpoint):
            actor.checkpoint["async_save"] = before


def _fsdp_groups(trainer: Any) -> list[Any] | None:
    """Those who save; None: one of them is no FSDP engine, and may name the step itself."""
    config, groups = trainer.config, [trainer.actor_rollout_wg]
    strategies = [config.actor_rollout_ref.actor.strategy]
    if trainer.use_critic:
        groups.append(trainer.critic_wg)
        strategies.append(config.critic.strategy)
    return groups if all(each in _FSDP for each in strategies) else None


def _tracker(trainer: Any) -> StepTracker:
    known: StepTracker | None = vars(trainer).get(_TRACKER)
    if known is None:
        config = Config.from_env()
        folder = os.path.abspath(trainer.config.trainer.default_local_dir)
        known = StepTracker(folder, config.timeout + config.commit_timeout)
        setattr(trainer, _TRACKER, known)
    return known
