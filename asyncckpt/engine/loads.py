"""The loads of a checkpointer: from the memory of a dead trainer's worker, the local folder, or the root."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from asyncckpt.engine.engine import Engine
from asyncckpt.errors import CheckpointError, ClosedError, interrupts_as_they_are
from asyncckpt.events import Event
from asyncckpt.link.root_lock import check_job
from asyncckpt.loading.image_files import HeldImages
from asyncckpt.loading.load import Filled, load, read_plan
from asyncckpt.loading.memory_source import (
    FoundImages,
    MemorySource,
    choose_in_memory,
    find_images,
    held_candidates,
)
from asyncckpt.loading.source import Candidate
from asyncckpt.loading.tiers import Tiers
from asyncckpt.ranks.ranks import OneRank, Ranks, ranks_of
from asyncckpt.ranks.rounds import Call
from asyncckpt.staging.slot_copy import wait_for_copies
from asyncckpt.storage import whole_number
from asyncckpt.storage.history import Origin
from asyncckpt.threads import without_gc

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """Result of a load: the ``step``, and the duration in ``seconds``.

    ``source``: "memory", "local" (the folder in ``Config.local_root``) or "storage" (the root). ``nbytes``: number of
    bytes that this rank has read; 0 for a checkpoint of stock DCP.

    ``nbytes_from``: for a load from memory, the bytes from the memory of this host ("memory"), from the memory of other
    hosts ("peer"), and from "storage", for bytes that no memory held any more.

    ``missing``: names of the state dict that the checkpoint does not have; their values are unchanged
    (``strict=False``). ``unexpected``: names of the checkpoint that the state dict does not have.
    """

    step: int
    source: Literal["memory", "local", "storage"]
    seconds: float
    nbytes: int = 0
    nbytes_from: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class Loads:
    """Load the newest checkpoint, the same one on all ranks, from memory or from storage."""

    def __init__(self, engine: Engine, tiers: Tiers, process_group: ProcessGroup | None) -> None:
        """Load nothing yet.

        Args:
            engine: The engine that saves. It finds the images of a dead trainer's worker, and has the listeners.
            tiers: The folders of the checkpoints.
            process_group: The ranks that load together; None: the whole job.
        """
        self._engine, self._tiers, self._process_group = engine, tiers, process_group
        self._ranks: Ranks = OneRank()  # each call asks anew, because the job may begin after this
        self.origin: Origin | None = None
        """The point where this run continues; None: the run has loaded nothing."""

    def load(
        self,
        state_dict: dict[str, Any],
        step: SupportsIndex | None,
        *,
        memory: bool,
        fallback: bool,
        verify: bool,
        weights_only: bool,
        strict: bool,
    ) -> Loaded:
        """Load a checkpoint. For the arguments and the errors see ``Checkpointer.load``."""
        begun = time.perf_counter()
        self._ranks = ranks_of(self._process_group)
        about: dict[str, Any] = {"rank": self._ranks.rank, "path": self._tiers.root}
        number = None if step is None else whole_number(step, "step")
        fill = partial(load, state_dict, verify=verify, weights_only=weights_only, strict=strict)
        try:
            with interrupts_as_they_are():
                # With overlap, a save may still be copying the tensors that the load is about to fill.
                self._ranks.on_all(partial(wait_for_copies, self._engine.config.timeout))
                self._check_asked_by_all(number)
                loaded = self._load(fill, number, begun, memory=memory, fallback=fallback)
        except BaseException as error:
            about |= {"step": number, "seconds": time.perf_counter() - begun}
            self._engine.tell(Event(phase="load failed", error=f"{type(error).__name__}: {error}", **about))
            raise
        told = {name: getattr(loaded, name) for name in ("step", "source", "seconds", "nbytes")}
        self._engine.tell(Event(phase="loaded", **about, **told))
        logger.info("step %d was loaded from %s in %.2f s", loaded.step, loaded.source, loaded.seconds)
        return loaded

    def latest(self) -> int | None:
        """Return the step that ``load`` would load, or None."""
        self._ranks = ranks_of(self._process_group)
        self._check_local()
        if (images := self._images()) is not None:
            held = self._ranks.from_first(lambda: choose_in_memory(self._tiers.places, None, images))
            if held is not None:
                return held.request.step
        return self._ranks.from_first(partial(self._tiers.newest, self._engine.config.timeout))

    @without_gc
    def _load(
        self, fill: Callable[..., Filled], step: int | None, begun: float, *, memory: bool, fallback: bool
    ) -> Loaded:
        """Find a checkpoint, open it, fill the state, and remember the plan for the next save."""
        config = self._engine.config
        self._engine.plan_as(None)
        images = self._images() if memory else None
        for found in self._candidates(images, step, fallback=fallback):
            with found.tried(), found.opened() as source:
                # Read the plan first: it keeps the indexes of this rank, which the load reads too.
                plan = None if self._engine.has_plans else read_plan(source, self._ranks.rank)
                filled = fill(found.path, source=source, process_group=self._process_group, progress=config.progress)
                nbytes_from = found.nbytes_from()
        self._engine.plan_as(plan)
        goes_back = step is not None or fallback
        began = found.request.began if isinstance(found, MemorySource) else None
        self.origin = self._ranks.from_first(partial(self._origin, found.step, images, began, goes_back=goes_back))
        seconds = time.perf_counter() - begun
        return Loaded(found.step, found.tier, seconds, filled.nbytes, nbytes_from, filled.missing, filled.unexpected)

    def _candidates(self, images: FoundImages | None, step: int | None, *, fallback: bool) -> Iterator[Candidate]:
        """Yield the checkpoints to try, until one is loaded. Raises if none is."""
        config = self._engine.config
        if images is not None:
            choose = partial(choose_in_memory, self._tiers.places, step)
            for held in held_candidates(images, choose, config.transport, self._ranks):
                yield held
                if held.is_loaded:
                    return
        yield from self._tiers.candidates(step, config.timeout, self._ranks, fallback=fallback)

    def _origin(self, step: int, images: FoundImages | None, began: float | None, *, goes_back: bool) -> Origin:
        """Return the origin of a run that has loaded ``step``, when workers held ``images``. First rank only."""
        unfinished = [] if images is None else images.unfinished(self._tiers.roots[0], step)
        return self._tiers.origin(step, unfinished, goes_back=goes_back, began=began)

    def _check_asked_by_all(self, step: int | None) -> None:
        """Raise if the ranks do not load the same step, or if the root belongs to another job."""
        words = "loads the newest step" if step is None else f"loads step {step}"
        self._ranks.check_same(Call(words, words))
        self._ranks.from_first(partial(check_job, self._tiers.root, self._engine.config.job_id))
        self._check_local()

    def _check_local(self) -> None:
        if self._tiers.local is not None:
            self._ranks.from_first(self._tiers.check_local)

    def _images(self) -> FoundImages | None:
        """Return the images that the workers of dead trainers hold; None: the engine has no job to find workers by."""
        config, job = self._engine.config, self._engine.job
        return None if job is None else find_images(job, self._held(), config.address, self._ranks)

    def _held(self) -> HeldImages | None:
        try:
            return self._engine.held()
        except ClosedError:
            return None
        except CheckpointError as error:
            logger.warning("the state is not loaded from memory: %s", error)
            return None
