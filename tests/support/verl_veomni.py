"""verl's VeOmni engine with the model of ``verl_training``, which VeOmni does not build. VeOmni is a stand-in."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from support import verl_training

_impl: Any = importlib.import_module("verl.workers.engine.veomni.transformer_impl")
_impl.load_veomni_model_to_gpu = lambda model: None  # there is no GPU


class Engine(_impl.VeOmniEngine):  # type: ignore[misc]  # verl has no types
    """verl's engine with its own way to build and train the model."""

    enable_routing_replay = False
    engine_config = SimpleNamespace(moe_load_balance_monitor_interval=0)
    __init__ = verl_training.Engine.__init__
    _build_model_optimizer = verl_training.Engine._build_model_optimizer
    to, train, state, random = (getattr(verl_training.Engine, name) for name in ("to", "train", "state", "random"))
    stock, wait, until_failed = (getattr(verl_training.Engine, name) for name in ("stock", "wait", "until_failed"))
