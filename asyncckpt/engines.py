"""The engines that the calls of this process share: one for each group of ranks, started by the first save.

For functions that are called in the place of stock ones, without an object to close: they are configured by the
environment (``Config.from_env``), and closed when the interpreter ends, after the last save is written.
"""

from __future__ import annotations

import atexit
import logging

import torch.distributed as dist

from asyncckpt.config import Config
from asyncckpt.engine import Engine
from asyncckpt.errors import CheckpointError

logger = logging.getLogger(__name__)

# By the process group; None stands for the whole job, False for this process alone.
_engines: dict[dist.ProcessGroup | None | bool, Engine] = {}


def shared_engine(process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> Engine:
    """The engine for the ranks of ``process_group`` (None: the whole job), or for this process ``alone``."""
    key = False if alone else process_group
    if key not in _engines:
        if not _engines:
            atexit.register(close_shared)
        _engines[key] = Engine(Config.from_env(), process_group, alone=alone)
    return _engines[key]


def close_shared() -> None:
    """Close them all; what went wrong is logged."""
    atexit.unregister(close_shared)
    while _engines:
        _, engine = _engines.popitem()
        try:
            engine.close()
        except CheckpointError as error:
            logger.error("a checkpoint was lost at the end of the process: %s", error)
