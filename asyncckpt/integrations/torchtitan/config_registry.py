"""Provide the configurations that ``--module asyncckpt.integrations.torchtitan --config llama3.llama3_8b`` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import ConfigManager

from asyncckpt.integrations.torchtitan.manager import AsyncckptManager


def switch(config: Any) -> Any:
    """Make a configuration of torchtitan save through asyncckpt. Synchronous saves become asynchronous.

    Args:
        config: Configuration of a ``Trainer``; its field ``checkpoint`` is replaced.

    Returns:
        The same configuration.

    Raises:
        TypeError: The configuration has another kind of manager, with behavior that ``AsyncckptManager`` lacks.
    """
    old = config.checkpoint
    if type(old) is not CheckpointManager.Config:
        raise TypeError(f"asyncckpt takes the place of CheckpointManager, not of {type(old).__qualname__}")
    fields = {field.name: getattr(old, field.name) for field in dataclasses.fields(old)}
    if old.async_mode == "disabled":
        del fields["async_mode"]
    config.checkpoint = AsyncckptManager.Config(**fields)
    return config


def __getattr__(name: str) -> Callable[[], Any]:
    """Return the configuration function for ``--config``: "llama3.llama3_8b" is ``llama3_8b`` of ``llama3``."""
    module, _, function = name.rpartition(".")
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; --config takes llama3.llama3_8b, say")

    def switched() -> Any:
        return switch(ConfigManager()._load_config(["--module", module, "--config", function])[0])

    return switched
