"""Which plan a state is saved by: one that is kept, if all ranks have it, or a new one that all ranks make together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from asyncckpt.config import Config
from asyncckpt.errors import StructureChangedError, UnsavableStateError, WorkerDiedError
from asyncckpt.planning.draft import flat_names, make_plan
from asyncckpt.planning.plan import StateDict
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.planning.torch_file_plan import TorchFileContents, TorchFilePlan
from asyncckpt.ranks.group import Group
from asyncckpt.staging.buffer import BufferPool, StagingBuffer
from asyncckpt.worker.client import WorkerClient

logger = logging.getLogger(__name__)

# How long the end of a worker may take to be noticed.
_NOTICE_S = 2.0


class Captured(NamedTuple):
    """What is to be staged: the memory for it, and its tensors in the order of the plan, which has its objects.

    ``pickle_bytes``: of a single file, how long its pickle is.
    """

    buffer: StagingBuffer
    tensors: Sequence[torch.Tensor]
    pickle_bytes: int = 0


class PlanSelection:
    """Of one engine, out of the plans that ``buffers`` keeps."""

    def __init__(self, config: Config, buffers: BufferPool, running: Callable[[Group], WorkerClient]) -> None:
        """``running`` gives the worker, which it starts where there is none; it has met those of the other ranks."""
        self._config = config
        self._buffers = buffers
        self._running = running

    def for_state(
        self, group: Group, number: int, state: StateDict, planner: SavePlanner | None, check: Callable[[], object]
    ) -> Captured:
        """The memory and the tensors of a state dict, as all ranks have planned it.

        The first rank asks again where its worker died meanwhile. That may have died long before, and only now be
        missed: then nothing is lost but the time to start another, for which the other ranks wait.

        Args:
            group: The ranks, which all do this.
            number: Of the save, the same on all ranks.
            state: This rank's part, without ``Stateful`` values.
            planner: DCP's or the user's; None: DCP's default.
            check: What it raises on any rank is raised on all, before anything is planned.

        Raises:
            UnsavableStateError: A value cannot be saved.
            StructureChangedError: ``assume_constant_structure`` was promised, and does not hold.
            OutOfMemoryError: There is no memory for it.
            RankFailedError: Another rank failed, or is gone.
            WorkerDiedError, SaveTimeoutError: The worker is gone, or an answer took too long.
        """
        client = self._running(group)
        try:
            found = self._kept_by_all(group, number, state, planner, client, check)
        except WorkerDiedError as error:
            if group.alone or group.rank > 0 or error.rank != 0:
                raise
            logger.warning("asking again: %s", str(error))
            client.wait_for_end(_NOTICE_S)
            client = self._running(group)
            found = self._kept_by_all(group, number, state, planner, client, check)
        return found or self._planned_by_all(group, number, state, planner, client)

    def for_file(self, group: Group, number: int, contents: TorchFileContents) -> Captured:
        """The same for the contents of a single file, which is of this process alone."""
        client, nbytes = self._running(group), len(contents.pickle)
        found = self._buffers.find(contents.key, lambda plan: plan.capture(contents), client)
        if found is not None:
            return Captured(*found, nbytes)
        plan = TorchFilePlan.of(contents, number)
        buffer = self._buffers.make(contents.key, plan, client)
        self._buffers.keep(contents.key, buffer)
        return Captured(buffer, plan.capture(contents), nbytes)

    def _kept_by_all(
        self,
        group: Group,
        number: int,
        state: StateDict,
        planner: SavePlanner | None,
        client: WorkerClient,
        check: Callable[[], object],
    ) -> Captured | None:
        """By a plan that all ranks have; None: all have to plan. With constant structure no rank is asked."""
        found: Captured | None = None

        def find() -> Captured | None:
            check()
            kept = self._buffers.find(_key_of(planner), lambda plan: plan.capture(state, planner), client)
            return None if kept is None else Captured(*kept)

        if group.alone or (self._config.assume_constant_structure and self._buffers.known):
            found = find()
            if found is None and not group.alone:
                self._check_new(state, planner)
            return found

        def local() -> int:
            nonlocal found
            found = find()
            return found.buffer.plan.number if found is not None else 0

        def decide(plans: list[int]) -> list[bool]:
            return [plans[0] > 0 and plans.count(plans[0]) == len(plans)] * len(plans)

        return found if group.ask_all("agree", number, local, decide) else None

    def _check_new(self, state: StateDict, planner: SavePlanner | None) -> None:
        """Constant structure is promised and ``state`` has none of those planned: refuse it, if it is one changed."""
        names = flat_names(state, planner)
        if any(names & known.plan.names for known in self._buffers.known):
            raise StructureChangedError(
                "the state has the names of one that was saved before, in another structure (a name, dtype, shape or"
                " placement differs), and assume_constant_structure was promised; call prepare with it on all ranks"
                " first, or do not promise that"
            )

    def _planned_by_all(
        self, group: Group, number: int, state: StateDict, planner: SavePlanner | None, client: WorkerClient
    ) -> Captured:
        """By a new plan, which takes the place of one for the same names in another form."""
        key = _key_of(planner)
        plan = make_plan(state, planner, group, number)
        made: list[StagingBuffer] = []

        def allocate() -> int:
            made.append(self._buffers.make(key, plan, client))
            return len(made[0].saves)

        try:
            least = group.ask_all("memory", number, allocate, lambda slots: [min(slots)] * len(slots))
            made[0].limit(least)
            tensors = plan.capture(state, planner)
        except StructureChanged as error:
            raise UnsavableStateError(f"the state dict changes while it is looked at: {error}") from error
        except BaseException:
            for buffer in made:
                buffer.close()
            raise
        self._buffers.keep(key, made[0])
        return Captured(made[0], tensors)


def _key_of(planner: SavePlanner | None) -> Any:
    """Equal for planners that plan alike."""
    if planner is None or type(planner) is DefaultSavePlanner:
        planner = planner or DefaultSavePlanner()
        return planner.flatten_state_dict, planner.flatten_sharded_tensors, planner.dedup_save_to_lowest_rank
    return type(planner)
