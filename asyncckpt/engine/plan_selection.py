"""Which plan a state is saved by: one that is kept, if all ranks have it, or a new one that all ranks make together."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from asyncckpt.config import Config
from asyncckpt.devices.captures import check_not_capturing
from asyncckpt.engine.save_input import SaveInput
from asyncckpt.errors import (
    CheckpointError,
    StructureChangedError,
    UnsavableStateError,
    UntrustedValueError,
    WorkerDiedError,
)
from asyncckpt.format.write_request import ANY_PLAN
from asyncckpt.link.client import WorkerClient
from asyncckpt.loading.direct_load import some
from asyncckpt.loading.unpickle import load_object
from asyncckpt.planning.file_set_plan import FileSetPlan
from asyncckpt.planning.plan import CheckpointPlan
from asyncckpt.planning.replicas import NOTHING, Sample
from asyncckpt.planning.stored_plan import StoredPlan
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.planning.torch_file_plan import TorchFileContents, TorchFilePlan
from asyncckpt.ranks.address import own_domain
from asyncckpt.ranks.group import Group
from asyncckpt.ranks.ring import RankPlace, copied_ranks
from asyncckpt.ranks.rounds import Call, check_same_call
from asyncckpt.staging.buffer import StagingBuffer, copy_bytes
from asyncckpt.staging.buffer_pool import BufferPool
from asyncckpt.supervisor import Supervisor

logger = logging.getLogger(__name__)

# To unpickle one takes some 50 us.
_MOST_TRIED = 1000
_MOST_BYTES_TRIED = 1 << 20

# How long the end of a worker may take to be noticed.
_NOTICE_S = 2.0


class Captured(NamedTuple):
    """What is to be staged: the memory for it, and its tensors in the order of the plan, which has its objects.

    ``pickle_bytes``, ``small_files``: as of ``WriteRequest``. ``is_new``: the plan was made for this save. ``sample``:
    of what the ranks compare.
    """

    buffer: StagingBuffer
    tensors: Sequence[torch.Tensor]
    pickle_bytes: tuple[int, ...] = ()
    small_files: tuple[tuple[str, bytes], ...] = ()
    is_new: bool = False
    sample: Sample = NOTHING


class _Offer(NamedTuple):
    """By what a rank can save: the number of a ``plan`` that it keeps, the attempt that stored one, or None.

    ``call``: what it does.
    """

    plan: int | str | None
    call: Call


def _warn_untrusted(plan: CheckpointPlan | FileSetPlan, path: str) -> None:
    """Say which values a load would refuse, unless it is told to run code: after a crash is late to learn that."""
    refused = []
    for name, data in islice(plan.objects.own_pickles(), _MOST_TRIED):
        if len(data) > _MOST_BYTES_TRIED:
            continue
        try:
            load_object(io.BytesIO(data), name, "", weights_only=True)
        except UntrustedValueError:
            refused.append(name)
        except CheckpointError:  # it may need what is not there yet
            continue
    if refused:
        logger.warning(
            "%d values of %s are of kinds that could run code when they are loaded: %s; asyncckpt's load will refuse"
            " them unless it is given weights_only=False; save what they are made of (numbers, text, tensors) to do"
            " without",
            len(refused),
            path or "the state that is prepared",
            some(refused),
        )


@dataclass
class PlanSelection:
    """Of one engine: out of the plans that ``buffers`` keeps, in memory of the worker that ``supervisor`` gives."""

    config: Config
    buffers: BufferPool
    supervisor: Supervisor
    stored: StoredPlan | None = None
    """That of the checkpoint which this job goes on from, until there is a plan for what is in it."""

    def for_all(self, wanted: SaveInput, *, prepares: bool = False) -> Captured:
        """The memory and the tensors of what all ranks save, as they have planned it.

        ``prepares``: it is only prepared, and all ranks are asked, whatever was promised.

        Raises ``UnsavableStateError``, ``OutOfMemoryError``, ``RankFailedError``, ``WorkerDiedError``,
        ``SaveTimeoutError``; ``StructureChangedError`` where ``assume_constant_structure`` was promised in vain.
        """
        try:
            check_not_capturing()
            wanted.look([known.plan for known in self.buffers.known if known.key == wanted.key])
        except Exception:
            if not wanted.group.alone:  # at first the others wait for it, in a collective that has not our timeout
                with contextlib.suppress(CheckpointError):
                    wanted.group.connect_worker(self.supervisor.running)
            raise
        client = wanted.group.connect_worker(self.supervisor.running)
        try:
            found = self._found_by_all(wanted, client, prepares)
        except WorkerDiedError as error:
            if wanted.group.alone or wanted.group.rank > 0 or error.rank != 0:
                raise
            # The first rank's worker may have died long before, and only now be missed: then nothing is lost but the
            # time to start another, for which the other ranks wait. So the first rank asks again.
            logger.warning("asking again: %s", str(error))
            client.wait_for_end(_NOTICE_S)
            client = wanted.group.connect_worker(self.supervisor.running)
            found = self._found_by_all(wanted, client, prepares)
        if not isinstance(found, Captured):
            plan = found or wanted.make_plan(tuple(self.config.assume_unchanged))
            found = self._placed_by_all(wanted, client, plan)
        if self.stored is not None and self.stored.names <= found.buffer.plan.names:
            self.stored = None  # it was taken, or never will be
        sample = wanted.sample(found.buffer.plan)
        return found._replace(pickle_bytes=wanted.pickle_bytes, small_files=wanted.small_files, sample=sample)

    def plan_as(self, read: Callable[[], StoredPlan | None]) -> None:
        """Plan what comes first as a checkpoint was planned, if all ranks can. ``read``: gives that plan, or None."""
        self.stored = None if self.buffers.known else read()

    def for_file(self, contents: TorchFileContents, group: Group, number: int) -> Captured:
        """The same for the contents of a single file.

        Args:
            contents: What is in it.
            group: This process alone.
            number: That of the save.
        """
        check_not_capturing()
        client = group.connect_worker(self.supervisor.running)
        key, pickle_bytes = ("file", *contents.key), (len(contents.pickle),)
        found = self.buffers.find(key, lambda plan: plan.capture(contents), client)
        if found is not None:
            return Captured(*found, pickle_bytes)
        plan = TorchFilePlan.of(contents, number)
        buffer = self.buffers.make(key, plan, client)
        try:
            self.buffers.keep(key, buffer)
            return Captured(buffer, plan.capture(contents), pickle_bytes, is_new=True)
        except BaseException:
            buffer.close()
            raise

    def _found_by_all(
        self, wanted: SaveInput, client: WorkerClient, prepares: bool
    ) -> Captured | CheckpointPlan | None:
        """By a plan that all ranks have, or by that of a checkpoint, which is to be placed; None: all have to plan.

        With constant structure no rank is asked, but to prepare.
        """
        is_constant = self.config.assume_constant_structure and not (wanted.asks or prepares)
        asks = not (wanted.group.alone or (is_constant and self.buffers.known))
        may_plan = asks or wanted.group.alone
        found: Captured | CheckpointPlan | None = None

        def find() -> _Offer:
            nonlocal found
            wanted.check()
            if (found := self._kept(wanted, client, may_plan=may_plan)) is not None:
                return _Offer(found.buffer.plan.number, wanted.call)
            if self.stored is not None and may_plan:  # else others may not have it
                found = wanted.restore_plan(self.stored, tuple(self.config.assume_unchanged))
            if self.stored is None or found is None:
                return _Offer(None, wanted.call)
            return _Offer(self.stored.attempt, wanted.call)

        def decide(offers: list[_Offer]) -> list[bool]:
            plans, calls = zip(*offers, strict=True)
            check_same_call(calls)
            return [None not in plans and len({*plans} - {ANY_PLAN}) <= 1] * len(plans)

        if asks:
            all_have_it = wanted.group.ask_all("agree", wanted.number, find, decide)
        else:
            all_have_it = find().plan is not None
            if not all_have_it and not wanted.group.alone:
                self._check_new(wanted)
        return found if all_have_it else None

    def _kept(self, wanted: SaveInput, client: WorkerClient, *, may_plan: bool) -> Captured | None:
        """Capture what is wanted by a plan that this rank has; None if there is none that fits.

        ``may_plan``: a new plan may be made. Else a plan fits whatever is frozen: that is a hint, and no structure.
        """

        def capture(plan: Any) -> Sequence[torch.Tensor]:
            if may_plan and not wanted.is_frozen_as(plan):
                raise StructureChanged("other parameters are frozen now")
            return wanted.capture(plan)

        kept = self.buffers.find(wanted.key, capture, client)
        return None if kept is None else Captured(*kept)

    def _check_new(self, wanted: SaveInput) -> None:
        """Constant structure is promised and the state has none of those planned: refuse it, if it is one changed."""
        names = wanted.names
        if any(names & known.plan.names for known in self.buffers.known):
            raise StructureChangedError(
                "the state has the names of one that was saved before, in another structure (a name, dtype, shape or"
                " placement differs), and assume_constant_structure was promised; call prepare with it on all ranks"
                " first, or do not promise that"
            )

    def _placed_by_all(self, wanted: SaveInput, client: WorkerClient, plan: CheckpointPlan | FileSetPlan) -> Captured:
        """By a plan that is new here, which takes the place of one for the same names in another form."""
        group, number = wanted.group, wanted.number
        if self.config.replicas and isinstance(plan, CheckpointPlan):
            place = RankPlace(own_domain(self.config.domain), copy_bytes(plan))
            decide = partial(copied_ranks, replicas=self.config.replicas)
            plan.copied_ranks = group.ask_all("copies", number, lambda: place, decide)
        made: list[StagingBuffer] = []

        def allocate() -> None:
            made.append(self.buffers.make(wanted.key, plan, client))

        _warn_untrusted(plan, wanted.path)
        try:
            group.ask_all("memory", number, allocate, lambda each: each)
            tensors = wanted.capture(plan)
            self.buffers.keep(wanted.key, made[0])
        except BaseException as error:
            for buffer in made:
                buffer.close()
            if isinstance(error, StructureChanged):
                raise UnsavableStateError(f"the state dict changes while it is looked at: {error}") from error
            raise
        return Captured(made[0], tensors, is_new=True)
