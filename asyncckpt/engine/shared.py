"""The engines behind calls such as ``async_save``, which have no object to close: one for each group of ranks, started
by the first save, and closed as all engines are when the interpreter ends, after the last save is written.
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
    """The engines of one kind of calls."""

    def __init__(self) -> None:
        # By the process group; None stands for the whole job, False for this process alone.
        self._engines: dict[dist.ProcessGroup | None | bool, Engine] = {}
        self._owner = os.getpid()
        self._of_others: list[object] = []
        self._unused: list[Config] = []

    def get(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        alone: bool = False,
        config: Config | None = None,
        job: str | None = None,
    ) -> Engine:
        """The engine of these ranks, which is made by the first call.

        Args:
            process_group: The ranks; None: the whole job.
            alone: This process, whatever the job.
            config: For an engine that has to be made; None: what the environment says. Another one than that of an
                engine that is there is not used, with a warning.
            job: Of an engine that has to be made: by this text readers find what it publishes; None: they do not.
        """
        if self._owner != os.getpid():  # a fork has none yet: the engines are those of the process it was forked from
            self._of_others.append(self._engines)
            self._engines, self._owner = {}, os.getpid()
        for stale in [each for each, engine in self._engines.items() if engine.is_over()]:
            self._close(self._engines.pop(stale), "as its ranks are gone", linger=True)
        key = False if alone else process_group
        if key not in self._engines:
            self._engines[key] = Engine(config, process_group, alone=alone, job=job)
        engine = self._engines[key]
        # A function that is written in the call is another one each time.
        if config in (None, engine.config):
            return engine
        if config is not None and (bare := replace(config, on_event=())) not in self._unused:
            self._unused.append(bare)
            differing = {name for name, value in vars(config).items() if value != getattr(engine.config, name)}
            logger.warning(
                "these ranks save by a configuration of an earlier call, which stays; of a later one is not used: %s",
                ", ".join(sorted(differing)),
            )
        return engine

    def has_worker(self) -> bool:
        """Whether any of them has a worker that lives."""
        return any(engine.worker is not None and engine.worker.alive for engine in self._engines.values())

    def close(self) -> None:
        """Close them all. What was lost is logged: whoever asked for it has had a handle."""
        while self._engines:
            self._close(self._engines.popitem()[1], "at the end of the process")

    def abort(self) -> None:
        """Give up their saves, see ``Engine.abort``."""
        while self._engines:
            self._engines.popitem()[1].abort()

    def _close(self, engine: Engine, when: str, *, linger: bool = False) -> None:
        try:
            engine.close(linger=linger)
        except CheckpointError as error:
            logger.error("while closing %s: %s", when, error)
            if linger and not isinstance(error, ClosedError):
                note_loss()


shared = Engines()
"""Of all calls that have none of their own."""
