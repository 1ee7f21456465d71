"""The engines behind this package's calls, and how they are to be set up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from asyncckpt.config import Config
from asyncckpt.engine import Engine
from asyncckpt.engines import Engines

_engines = Engines()
_config: Config | None = None
_choice: dict[str, Any] = {}


def configure(config: Config) -> None:
    """What the engines that are made from now on shall be like (else: as the environment says)."""
    global _config
    _config = config
    _choice.clear()


def prioritise(cpu_priority: int | None, io_priority: int | None) -> None:
    """How far the workers that are started from now on stand back, in nvrx's terms.

    ``cpu_priority`` is a niceness, 0 to 19. ``io_priority`` is a class of ionice: 0 leaves it as it is; 3 is idle; 2 is
    best-effort, of which ours is the lowest level, and so is 1, because real time would take the trainer's own turn.
    """
    if cpu_priority is not None:
        _choice["nice"] = cpu_priority
    if io_priority is not None:
        if io_priority not in range(4):
            raise ValueError(f"io_priority is a class of ionice, 0 to 3, not {io_priority!r}")
        _choice["io_class"] = ("none", "best-effort", "best-effort", "idle")[io_priority]


def engine(process_group: dist.ProcessGroup | None = None) -> Engine:
    """The engine for the ranks of ``process_group`` (None: of the whole job)."""
    return _engines.get(process_group, config=replace(_config or Config.from_env(), **_choice))


def close() -> None:
    """Write what is staged, end the workers, give the memory back."""
    _engines.close()


def abort() -> None:
    """End the workers at once. What they had to write is lost."""
    _engines.abort()
