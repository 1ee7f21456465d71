"""The engines behind this package's calls, and how they are configured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
from asyncckpt.engine.shared import Engines

_engines = Engines()
_config: Config | None = None
_priorities: dict[str, Any] = {}


def configure(config: Config | None) -> None:
    """Make engines with ``config`` from now on; None: with what the environment says."""
    global _config
    _config = config
    _priorities.clear()


def prioritize(cpu_priority: int | None, io_priority: int | None) -> None:
    """Set the priorities, in nvrx's terms, of the workers that are started from now on; None leaves one as it is.

    ``cpu_priority`` is a niceness, 0 to 19. ``io_priority`` is a class of ionice: 0 leaves it as it is; 3 is idle; 2 is
    best-effort, of which ours is the lowest level, and so is 1, because real time would delay the trainer's own I/O.
    """
    if cpu_priority is not None:
        _priorities["nice"] = cpu_priority
    if io_priority is not None:
        if io_priority not in range(4):
            raise ValueError(f"io_priority is a class of ionice, 0 to 3, not {io_priority!r}")
        _priorities["io_class"] = ("none", "best-effort", "best-effort", "idle")[io_priority]


def engine(process_group: dist.ProcessGroup | None = None) -> Engine:
    """The engine for the ranks of ``process_group`` (None: of the whole job)."""
    return _engines.get(process_group, config=replace(_config or Config.from_env(), **_priorities))


def close() -> None:
    """Write what is staged, end the workers, give the memory back."""
    _engines.close()


def abort() -> None:
    """End the workers at once. What they had to write is lost."""
    _engines.abort()
