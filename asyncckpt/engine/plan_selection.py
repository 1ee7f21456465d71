"""Which plan a state is saved by: one that is kept, if all ranks have it, or a new one that all ranks make together."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import NamedTuple

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
from asyncckpt.planning.settling import Settling
from asyncckpt.planning.stored_plan import StoredPlan
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.planning.torch_file_plan import TorchFileContents, TorchFilePlan
from asyncckpt.ranks.address import own_domain
from asyncckpt.ranks.group import Group, RankPlace, copied_ranks
from asyncckpt.ranks.rounds import Call, check_same_call
from asyncckpt.staging.buffer import StagingBuffer, copy_bytes
from asyncckpt.staging.buffer_pool import BufferPool
from asyncckpt.staging.copy_threads import CopyThreads
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

    ``call``: what it does. ``heard``, ``has_settled``: the number of the
    last save by that plan that it knows to be durable, and whether it would be good to plan anew for what that says.
    """

    plan: int | str | None
    call: Call
    heard: int = 0
    has_settled: bool = False


class _Choice(IntEnum):
    """What all ranks do: take the plan that they have, make another of the same state, or plan."""

    KEPT = 0
    SETTLED = 1
    NEW = 2


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


def _next_settling(plan: CheckpointPlan) -> Settling | None:
    return plan.settling.next_for(plan.files)


@dataclass
class PlanSelection:
    """Of one engine: out of the plans that ``buffers`` keeps, in memory of the worker that ``supervisor`` gives."""

    config: Config
    buffers: BufferPool
    supervisor: Supervisor
    threads: CopyThreads
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
            plan = found or wanted.make_plan(self._settling(wanted))
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
        found: Captured | CheckpointPlan | None = None

        def find() -> _Offer:
            nonlocal found
            wanted.check()
            if (found := self._kept(wanted, client)) is not None:
                plan = found.buffer.plan
                offer = _Offer(plan.number, wanted.call)
                if isinstance(plan, CheckpointPlan):
                    offer = offer._replace(heard=plan.settling.heard, has_settled=_next_settling(plan) is not None)
                return offer
            if self.stored is not None and (asks or wanted.group.alone):  # else others may not have it
                found = wanted.restore_plan(self.stored, self._settling(wanted))
            if self.stored is None or found is None:
                return _Offer(None, wanted.call)
            return _Offer(self.stored.attempt, wanted.call)

        def decide(offers: list[_Offer]) -> list[int]:
            plans, calls, heard, has_settled = zip(*offers, strict=True)
            check_same_call(calls)
            choice = _Choice.NEW
            if None not in plans and len({*plans} - {ANY_PLAN}) <= 1:
                choice = _Choice.SETTLED if any(has_settled) and len({*heard}) == 1 else _Choice.KEPT
            return [choice.value] * len(plans)

        if asks:
            choice = wanted.group.ask_all("agree", wanted.number, find, decide)
        elif wanted.group.alone:
            (choice,) = decide([find()])
        else:
            choice = _Choice.NEW if find().plan is None else _Choice.KEPT
            if choice is _Choice.NEW:
                self._check_new(wanted)
        if choice == _Choice.SETTLED and isinstance(found, Captured) and isinstance(found.buffer.plan, CheckpointPlan):
            plan = found.buffer.plan
            plan.settling = _next_settling(plan) or plan.settling
        return found if choice == _Choice.KEPT else None

    def _settling(self, wanted: SaveInput) -> Settling:
        """What is known of what does not change in the state, whatever its structure was so far."""
        found = Settling()
        for known in reversed(self.buffers.known):
            if known.key == wanted.key and isinstance(known.plan, CheckpointPlan) and known.plan.names == wanted.names:
                found = known.plan.settling
        # Who finds out that something has changed after all has to be able to say so to all ranks, and before the copy.
        may_say = not self.config.overlap and (wanted.group.alone or not self.config.assume_constant_structure)
        return replace(
            found,
            shares=may_say and not self.config.replicas,
            assumed=() if self.config.replicas else tuple(self.config.assume_unchanged),
        )

    def _has_changed(self, wanted: SaveInput, found: Captured) -> bool:
        """Whether anything has that slots share; what was promised not to raises ``UnsavableStateError``."""
        plan = found.buffer.plan
        if not isinstance(plan, CheckpointPlan) or not plan.layout.shared_bytes:
            return False
        settling, is_first = plan.settling, found.buffer.is_unused
        plan.since_check += 1
        is_checked = is_first or plan.since_check >= self.config.check_unchanged_every
        names = found.buffer.changed(found.tensors, self.threads, with_promised=is_checked)
        plan.since_check = 0 if is_checked else plan.since_check
        if names and is_first and found.buffer.refill():
            return False
        broken = [name for name in names if settling.is_assumed(name)]
        if broken and not is_first:  # else they are those of a trainer before this
            plan.broken_promise = (
                f"changed, and Config.assume_unchanged promises that they do not: {some(broken)}; take out what names"
                " them there, as checkpoints since the last check may have older values of them"
            )
            raise UnsavableStateError(plan.broken_promise)
        plan.settling = settling.without(names) if names else settling
        return bool(names)

    def _kept(self, wanted: SaveInput, client: WorkerClient) -> Captured | None:
        """By a plan that this rank has, and that is still good."""
        kept = self.buffers.find(wanted.key, wanted.capture, client)
        if kept is None or self._has_changed(wanted, found := Captured(*kept)):
            return None
        plan = found.buffer.plan
        if isinstance(plan, CheckpointPlan) and plan.settling.is_to_be_learned and self.config.link_unchanged:
            # The worker would say so only after this save, which would then be written in its old layout.
            plan.settling.note_compared(plan.files, plan.spans_of(found.buffer.unchanged(found.tensors, self.threads)))
        return found

    def _check_new(self, wanted: SaveInput) -> None:
        """Constant structure is promised and the state has none of those planned: refuse it, if it is one changed."""
        names = wanted.names
        for known in self.buffers.known:
            if isinstance(known.plan, CheckpointPlan) and known.plan.broken_promise and names & known.plan.names:
                raise UnsavableStateError(known.plan.broken_promise)
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
            if made[0].changed(tensors, self.threads):  # it was that of a trainer before this
                made[0].close()
                made[0] = self.buffers.make(wanted.key, plan, client)
            self.buffers.keep(wanted.key, made[0])
        except BaseException as error:
            for buffer in made:
                buffer.close()
            if isinstance(error, StructureChanged):
                raise UnsavableStateError(f"the state dict changes while it is looked at: {error}") from error
            raise
        return Captured(made[0], tensors, is_new=True)
