"""verl's FSDP engine: its checkpoints are saved in the background, and can be loaded by another number of ranks.

    VERL_USE_EXTERNAL_MODULES=asyncckpt.integrations.verl_fsdp python -m verl.trainer.main_ppo ...

verl imports what that variable names in every process, before its own modules. To import this package replaces the
manager of the FSDP engine (``manager.py``), and has the trainers' driver name a step as the latest only when all of it
is durable (``driver.py``), each when verl imports the module in question. Nothing of verl is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and notes those that somebody waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[Any], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As ``PathFinder``, for the modules that somebody waits for; None for all others."""
        call = self.waiting.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if call is not None else None
        if call is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            call(module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]  # of this module's loader alone
        return spec


_finder = _Finder()


def on_import(name: str, call: Callable[[Any], None]) -> None:
    """Call ``call`` with the module ``name``: now, if it is imported, else at the end of its import.

    Args:
        name: Of the module.
        call: What to call. What it raises the import raises.
    """
    module = sys.modules.get(name)
    # While it is being imported it has not all of its names yet; then its import was what has led here.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        call(module)
        return
    _finder.waiting[name] = call
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _replace_manager(engine: Any) -> None:
    from asyncckpt.integrations.verl_fsdp.manager import AsyncckptFSDPManager

    engine.FSDPCheckpointManager = AsyncckptFSDPManager


def _wrap_trainer(name: str, module: Any) -> None:
    from asyncckpt.integrations.verl_fsdp.driver import wrap

    wrap(getattr(module, name))


on_import("verl.workers.engine.fsdp.transformer_impl", _replace_manager)
on_import("verl.trainer.ppo.ray_trainer", partial(_wrap_trainer, "RayPPOTrainer"))
on_import("verl.trainer.ppo.v1.trainer_base", partial(_wrap_trainer, "PPOTrainer"))
on_import("verl.trainer.main_ppo_sync", partial(_wrap_trainer, "PPOTrainer"))
