"""Load each version of a trainer's weights into vLLM engines from shared memory, by the weight transfer "asyncckpt".

vLLM finds ``register`` by itself, as a plugin of the group "vllm.general_plugins". ``worker.py`` runs in the engine's
workers. With a ``WeightPublisher`` in any trainer, a rollout process uses ``updater.py``. A trainer that drives its
engines through vLLM's own interface uses ``trainer.py``.

This package imports vLLM only when vLLM is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging

logger = logging.getLogger(__name__)

BACKEND = "asyncckpt"

_TRANSFER = "vllm.distributed.weight_transfer"
# The names that ``worker.py`` and ``trainer.py`` need. The interface has changed between versions, under one name.
_NEEDED = {
    f"{_TRANSFER}.factory": ("WeightTransferEngineFactory", "WeightTransferTrainerFactory"),
    f"{_TRANSFER}.base": ("TrainerInitInfo", "TrainerWeightTransferEngine", "WeightSource", "WeightTransferEngine"),
}
_METHODS = {"init_transfer_engine", "start_weight_update", "update_weights", "receive_weights", "finish_weight_update"}
_ARGUMENTS = ["self", "config", "vllm_config", "device", "model"]


def register() -> bool:
    """Make "asyncckpt" a backend of vLLM's weight transfer, for engines and for trainers. Safe to call again.

    Returns:
        Whether the backend is registered. If this vLLM lacks the interface, or has another one, a warning is logged and
        the result is False. vLLM then refuses the backend by its name.
    """
    if (lack := _lack()) is not None:
        logger.warning(
            "this vLLM has no weight transfer %r: %s; reload_weights works with it, see docs/vllm.md", BACKEND, lack
        )
        return False
    factories = importlib.import_module(f"{_TRANSFER}.factory")
    for factory, module, name in (
        (factories.WeightTransferEngineFactory, "worker", "SharedMemoryWeightTransferEngine"),
        (factories.WeightTransferTrainerFactory, "trainer", "SharedMemoryTrainerEngine"),
    ):
        with contextlib.suppress(ValueError):  # registered already: a process may load plugins twice
            factory.register_engine(BACKEND, f"{__name__}.{module}", name)
    return True


def _lack() -> str | None:
    """Return a text that says which name or argument this vLLM lacks; None if the interface is complete."""
    for module, names in _NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            return f"there is no {module} ({error})"
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            return f"there is no {missing[0]} in {module}"
    engine = importlib.import_module(f"{_TRANSFER}.base").WeightTransferEngine
    if missing := sorted(name for name in _METHODS if not hasattr(engine, name)):
        return f"its WeightTransferEngine has no {missing[0]}"
    arguments = list(inspect.signature(engine.__init__).parameters)
    if arguments != _ARGUMENTS:
        return f"its WeightTransferEngine is made from {', '.join(arguments[1:])}"
    return None
