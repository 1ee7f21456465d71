"""Engines for calls such as ``async_save``, where the caller has no object to close.

Each group of ranks has one engine. The first save starts the engine. Like all engines it is closed when the interpreter
ends, after the last save is written.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch.distributed as dist

from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
from asyncckpt.errors import CheckpointError, ClosedError
from asyncckpt.supervisor import note_loss

logger = logging.getLogger(__name__)


class Engines:
    """The engines that one kind of calls shares."""

    def __init__(self) -> None:
        # Keyed by the process group; None is the whole job, False is this process alone.
        self._engines: dict[dist.ProcessGroup | None | bool, Engine] = {}
        self._owner = os.getpid()
        self._of_others: list[object] = []
        self._unused: list[object] = []

    def get(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        alone: bool = False,
        config: Config | None = None,
        job: str | None = None,
    ) -> Engine:
        """Return the engine of these ranks. The first call makes the engine.

        Args:
            process_group: The ranks; None: the whole job.
            alone: Return the engine of this process alone, even if the job has more ranks.
            config: The configuration of a new engine; None: read it from the environment. If the engine exists and has
                another configuration, a warning is logged, and ``config`` is not used.
            job: The job of a new engine. Readers use it to find published versions; None: readers cannot find them.
        """
        if self._owner != os.getpid():  # a fork must not use, or garbage-collect, the engines of its parent
            self._of_others.append(self._engines)
            self._engines, self._owner = {}, os.getpid()
        for stale in [each for each, engine in self._engines.items() if engine.is_over()]:
            self._close(self._engines.pop(stale), "as its ranks are gone", linger=True)
        key = False if alone else process_group
        if key not in self._engines:
            self._engines[key] = Engine(config, process_group, alone=alone, job=job)
        engine = self._engines[key]
        if job not in (None, engine.job) and job not in self._unused:
            self._unused.append(job)
            logger.warning("the job of the first call stays, and that of a later one is ignored")
        # Warn once for each configuration, apart from its listeners: a lambda in the call is a new function each time.
        if config in (None, engine.config):
            return engine
        if config is not None and (bare := replace(config, on_event=())) not in self._unused:
            self._unused.append(bare)
            differing = {name for name, value in vars(config).items() if value != getattr(engine.config, name)}
            logger.warning(
                "the configuration of the first call stays, and these fields of a later one are ignored: %s",
                ", ".join(sorted(differing)),
            )
        return engine

    def has_worker(self) -> bool:
        """Return whether some engine has a worker that is alive."""
        return any(engine.worker is not None and engine.worker.alive for engine in self._engines.values())

    def close(self) -> None:
        """Close all engines. Log failures, and raise none: each caller has the handle of its save."""
        while self._engines:
            self._close(self._engines.popitem()[1], "at the end of the process")

    def abort(self) -> None:
        """Give up the saves of all engines, see ``Engine.abort``."""
        while self._engines:
            self._engines.popitem()[1].abort()

    def _close(self, engine: Engine, when: str, *, linger: bool = False) -> None:
        try:
            engine.close(linger=linger)
        except CheckpointError as error:
            if not error.is_logged:
                logger.error("closing an engine %s failed: %s", when, error)
            if linger and not isinstance(error, ClosedError):
                note_loss()


shared = Engines()
"""The engines for all calls that have no ``Engines`` of their own."""
