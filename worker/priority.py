"""How much the worker stands back for the training it serves."""

from __future__ import annotations

import logging

import psutil

logger = logging.getLogger(__name__)


def lower(nice: int, io_class: str) -> None:
    """Give this process ``nice`` (0 to 19) and the I/O class ``io_class``, see ``Config.io_class``.

    A host that refuses either gets a log line, not an error: a checkpoint matters more than its manners.
    """
    process = psutil.Process()
    try:
        if nice:
            process.nice(nice)
        if io_class == "best-effort":
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)
        elif io_class == "idle":
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
    except (psutil.Error, OSError) as error:
        logger.warning("the worker keeps its priority: %s", error)
