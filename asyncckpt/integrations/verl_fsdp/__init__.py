"""verl's FSDP engine: its checkpoints are saved in the background, and can be loaded by another number of ranks.

    VERL_USE_EXTERNAL_MODULES=asyncckpt.integrations.verl_fsdp python -m verl.trainer.main_ppo ...

verl imports what that variable names in every process, before its own modules. To import this package replaces the
manager of the FSDP engine (``manager.py``), and has the trainers' driver name a step as the latest only when all of it
is durable (``driver.py``), each when verl imports the module in question. Nothing of verl is imported here.
"""

from __future__ import annotations

from typing import Any

from asyncckpt.integrations.verl_fsdp.on_import import on_import


def _replace_manager(engine: Any) -> None:
    from asyncckpt.integrations.verl_fsdp.manager import AsyncckptFSDPManager

    engine.FSDPCheckpointManager = AsyncckptFSDPManager


def _wrap_ray_trainer(module: Any) -> None:
    from asyncckpt.integrations.verl_fsdp.driver import wrap

    wrap(module.RayPPOTrainer)


def _wrap_trainer(module: Any) -> None:
    from asyncckpt.integrations.verl_fsdp.driver import wrap

    wrap(module.PPOTrainer)


on_import("verl.workers.engine.fsdp.transformer_impl", _replace_manager)
on_import("verl.trainer.ppo.ray_trainer", _wrap_ray_trainer)
on_import("verl.trainer.ppo.v1.trainer_base", _wrap_trainer)
on_import("verl.trainer.main_ppo_sync", _wrap_trainer)
