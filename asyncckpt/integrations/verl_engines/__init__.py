"""Save the checkpoints of verl's engines in the background, and name a step when all its parts are durable.

    VERL_USE_EXTERNAL_MODULES=asyncckpt.integrations.verl_engines python -m verl.trainer.main_ppo ...

verl imports the modules in that variable in every process, before its own modules. Importing this package replaces the
managers of the engines (``fsdp.py``, ``megatron.py``, ``torchtitan.py``). It also wraps the trainers, so that a step
becomes the latest only when the whole step is durable (``driver.py``). Each replacement happens when verl imports the
module in question. This package itself imports no module of verl.
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
    """Finds modules as Python does, and calls the functions that wait for a module."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[Any], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of ``PathFinder`` for a module with a waiting function; None for all others."""
        call = self.waiting.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if call is not None else None
        if call is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            call(module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]  # only for the loader of this module
        return spec


_finder = _Finder()


def on_import(name: str, call: Callable[[Any], None]) -> None:
    """Call ``call`` with the module ``name``: now, if it is imported, else at the end of its import.

    Args:
        name: Name of the module.
        call: The function to call. The import raises its errors.
    """
    module = sys.modules.get(name)
    # If the import of the module is still running, and has led here, the module lacks some names.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        call(module)
        return
    _finder.waiting[name] = call
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _replace_fsdp(engine: Any) -> None:
    from asyncckpt.integrations.verl_engines.fsdp import AsyncckptFSDPManager

    engine.FSDPCheckpointManager = AsyncckptFSDPManager


def _replace_veomni(engine: Any) -> None:
    from asyncckpt.integrations.verl_engines.fsdp import AsyncckptVeOmniManager

    engine.FSDPCheckpointManager = AsyncckptVeOmniManager


def _replace_megatron(engine: Any) -> None:
    from asyncckpt.integrations.verl_engines.megatron import AsyncckptMegatronManager

    engine.MegatronCheckpointManager = AsyncckptMegatronManager


def _replace_torchtitan(engine: Any) -> None:
    from asyncckpt.integrations.verl_engines.torchtitan import wrap

    wrap(engine.TorchTitanEngine)


def _wrap_trainer(name: str, module: Any) -> None:
    from asyncckpt.integrations.verl_engines.driver import wrap

    wrap(getattr(module, name))


on_import("verl.workers.engine.fsdp.transformer_impl", _replace_fsdp)
on_import("verl.workers.engine.veomni.transformer_impl", _replace_veomni)
on_import("verl.workers.engine.megatron.transformer_impl", _replace_megatron)
on_import("verl.workers.engine.torchtitan.transformer_impl", _replace_torchtitan)
on_import("verl.trainer.ppo.ray_trainer", partial(_wrap_trainer, "RayPPOTrainer"))
on_import("verl.trainer.ppo.v1.trainer_base", partial(_wrap_trainer, "PPOTrainer"))
on_import("verl.trainer.main_ppo_sync", partial(_wrap_trainer, "PPOTrainer"))
