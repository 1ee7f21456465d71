"""Choose the plan of a save: one that is kept, if all ranks have it, or a new one that all ranks make together.

A save is given a state dict or a set of files, and all ranks save it together (``SaveInput``).
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from asyncckpt.config import Config
from asyncckpt.devices.captures import check_not_capturing
from asyncckpt.errors import (
    CheckpointError,
    StructureChangedError,
    UnsavableStateError,
    UntrustedValueError,
    WorkerDiedError,
    unless_interrupt,
)
from asyncckpt.format.write_request import ANY_PLAN, Existing
from asyncckpt.link.client import WorkerClient
from asyncckpt.loading.direct_load import some
from asyncckpt.loading.unpickle import load_object
from asyncckpt.planning.dcp_plan import DcpFolder
from asyncckpt.planning.draft import StoredPlan
from asyncckpt.planning.file_set import FileSet
from asyncckpt.planning.plan import Contents, Plan, make_plan, restore_plan
from asyncckpt.planning.replicas import Sample
from asyncckpt.planning.structure import StateDict, StructureChanged
from asyncckpt.planning.torch_file_plan import TorchFileContents
from asyncckpt.ranks.group import Group, RankPlace, copied_ranks, own_domain
from asyncckpt.ranks.rounds import Call, check_same_call
from asyncckpt.staging.buffer import StagingBuffer, copy_bytes
from asyncckpt.staging.buffer_pool import BufferPool
from asyncckpt.storage import is_address, may_be_key
from asyncckpt.supervisor import Supervisor

logger = logging.getLogger(__name__)

PREPARES = Call("prepares a save", "prepare")


def check_file_set_place(files: FileSet, path: str, existing: Existing) -> None:
    """Raise ``ValueError`` if a set of files cannot go to ``path``. Fail its save if an object store refuses a name."""
    if existing == "join":
        raise ValueError("a set of files cannot be added to an existing folder, because it is committed in one step")
    for name in files.contents if is_address(path) else ():
        if not may_be_key(name):
            reason = "cannot be the name of a file on an object store; give it another"
            files.fail(UnsavableStateError(f"{name!r} {reason}", path=path))


@dataclass
class SaveInput:
    """The input of a save of all ranks, or of its preparation.

    Attributes:
        group: The ranks.
        number: The number of the save.
        given: The content. The ranks plan its folders of DCP together.
        path: The path of the checkpoint; "": the save is only prepared.
        call: The call of this rank; all ranks must make the same call.
        check: Called before planning; an error on one rank is raised on all ranks.
    """

    group: Group
    number: int
    given: FileSet | DcpFolder | TorchFileContents
    path: str = ""
    call: Call = PREPARES
    check: Callable[[], object] = lambda: None
    _captured: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict)  # by ``look``, by number of plan

    @property
    def asks(self) -> bool:
        """Whether the ranks agree on a plan in each save despite ``Config.assume_constant_structure``."""
        return isinstance(self.given, FileSet)

    @cached_property
    def contents(self) -> Contents:
        """The contents. Raises the error of this rank's part, if it has one."""
        return Contents.of(self.given)

    def look(self, plans: Sequence[Plan]) -> None:
        """Ask ``Stateful`` values for their states, unless one of ``plans`` fits. All ``plans`` have the same key.

        Call this before the ranks ask each other anything, because a value may run a collective of the caller.
        """
        for plan in plans:
            try:
                self._captured[plan.number] = plan.capture(self.contents, is_raw=True)
            except StructureChanged:
                continue
            except unless_interrupt(Exception):  # ``capture`` raises it again, where all ranks learn of it
                pass
            return
        # Only for another structure, because finding ``Stateful`` values takes as long as comparing the structure.
        for folder in self.contents.folders().values():
            _ = folder.state

    def capture(self, plan: Plan) -> Sequence[torch.Tensor]:
        """Return the tensors by a plan with the same key. Raises ``StructureChanged`` if the plan does not fit."""
        if (known := self._captured.get(plan.number)) is not None:
            return known
        return plan.capture(self.contents)

    def is_frozen_as(self, plan: Plan) -> bool:
        """Return True if the same parameters of modules are frozen as in ``plan``."""
        # A state that was captured as given has no modules, and does not tell what is frozen.
        return plan.number in self._captured or plan.is_frozen_as(self.contents)


def save_input(
    group: Group,
    number: int,
    state: StateDict | FileSet,
    planner: SavePlanner | None = None,
    separate: str = "",
    path: str = "",
    call: Call = PREPARES,
    check: Callable[[], object] = lambda: None,
) -> SaveInput:
    """Return the input of a save.

    Args:
        group, number, path, call, check: See ``SaveInput``.
        state: A set of files, or a state dict.
        planner, separate: See ``DcpFolder``; ignored for a set of files.
    """
    if not isinstance(state, FileSet):
        return SaveInput(group, number, DcpFolder(state, planner, separate), path, call, check)
    shared = [name for name, content in state.contents.items() if isinstance(content, DcpFolder)]
    call = Call(f"{call.words} as files, of which all ranks have {shared}", f"{call.key} {shared}")
    return SaveInput(group, number, state, path, call, check)


# Maximum number of values to try, and bytes of each. Unpickling a value takes some 50 us.
_MOST_TRIED = 1000
_MOST_BYTES_TRIED = 1 << 20

# Maximum time to wait for the end of a worker. A call of ``save`` waits meanwhile, so it is short.
_DEATH_S = 2.0


class Captured(NamedTuple):
    """A captured state: the memory for it, and its tensors in the order of the plan. The plan has its objects.

    ``pickle_bytes``, ``small_files``: see ``WriteRequest``. ``is_new``: the plan was made for this save. ``sample``:
    values for the ranks to compare; None: there is only one rank.
    """

    buffer: StagingBuffer
    tensors: Sequence[torch.Tensor]
    pickle_bytes: tuple[int, ...] = ()
    small_files: tuple[tuple[str, bytes], ...] = ()
    is_new: bool = False
    sample: Sample | None = None


class _Offer(NamedTuple):
    """The plan that a rank offers: the number of a kept plan, the attempt of a stored plan, or None.

    ``call``: the call of the rank.
    """

    plan: int | str | None
    call: Call


def _warn_untrusted(plan: Plan, path: str) -> None:
    """Log the names of values that a load would refuse to unpickle, so that users learn this before a crash."""
    refused = []
    for name, data in islice(plan.own_pickles(), _MOST_TRIED):
        if len(data) > _MOST_BYTES_TRIED:
            continue
        try:
            load_object(io.BytesIO(data), name, "", weights_only=True)
        except UntrustedValueError:
            refused.append(name)
        except CheckpointError:  # unpickling may need something that does not exist yet
            continue
    if refused:
        logger.warning(
            "%d values of %s are of kinds that could run code when they are loaded: %s; a load refuses them without"
            " weights_only=False; save numbers, text and tensors instead",
            len(refused),
            path or "the prepared state",
            some(refused),
        )


@dataclass
class PlanSelection:
    """Choose among the plans in ``buffers``, or make a new one. The memory belongs to the worker of ``supervisor``."""

    config: Config
    buffers: BufferPool
    supervisor: Supervisor
    stored: StoredPlan | None = None
    """The plan of the checkpoint that this job was resumed from, until a save has used or replaced the plan."""

    def for_all(self, wanted: SaveInput, *, prepares: bool = False) -> Captured:
        """Capture a state by a plan that all ranks have, or by a new plan that they make together.

        ``prepares``: the save is only prepared, and the ranks agree even with ``assume_constant_structure``.

        Raises ``UnsavableStateError``, ``OutOfMemoryError``, ``RankFailedError``, ``WorkerDiedError``,
        ``SaveTimeoutError``; ``StructureChangedError`` if the structure changed despite ``assume_constant_structure``.
        """
        try:
            check_not_capturing()
            key = wanted.contents.key
            wanted.look([known.plan for known in self.buffers.known if known.key == key])
        except Exception:
            if not wanted.group.alone:  # the others wait in a collective, without our timeout
                with contextlib.suppress(CheckpointError):
                    wanted.group.connect_worker(self.supervisor.running)
            raise
        client = wanted.group.connect_worker(self.supervisor.running)
        try:
            found = self._found_by_all(wanted, client, prepares)
        except WorkerDiedError as error:
            if wanted.group.alone or wanted.group.rank > 0 or error.rank != 0:
                raise
            # The first rank's worker may have died long before, unnoticed until now. Then nothing is lost. The first
            # rank starts another worker, and asks again. The other ranks wait meanwhile.
            logger.warning("the ranks agree on a plan again, with another worker on rank 0: %s", str(error))
            client.wait_for_end(_DEATH_S)
            client = wanted.group.connect_worker(self.supervisor.running)
            found = self._found_by_all(wanted, client, prepares)
        if not isinstance(found, Captured):
            assumed = tuple(self.config.assume_unchanged)
            plan = found or make_plan(wanted.contents, wanted.group, wanted.number, assumed)
            found = self._placed_by_all(wanted, client, plan)
        if self.stored is not None and self.stored.names <= found.buffer.plan.names:
            self.stored = None  # a save has used the plan, or never will
        contents = wanted.contents
        sample = None if wanted.group.alone else found.buffer.plan.sample(contents, wanted.number)
        small = tuple(contents.small.items())
        return found._replace(pickle_bytes=contents.pickle_bytes, small_files=small, sample=sample)

    @property
    def has_plans(self) -> bool:
        """Whether a save was planned."""
        return bool(self.buffers.known)

    def plan_as(self, stored: StoredPlan | None) -> None:
        """Use a checkpoint's plan for the first save, if it fits on all ranks."""
        self.stored = None if self.has_plans else stored

    def _found_by_all(self, wanted: SaveInput, client: WorkerClient, prepares: bool) -> Captured | Plan | None:
        """Return the state captured by a plan that all ranks keep, or the plan of a checkpoint that fits on all ranks.

        Return None if the ranks have to make a new plan. With constant structure the ranks do not ask each other,
        except to prepare a save.
        """
        is_constant = self.config.assume_constant_structure and not (wanted.asks or prepares)
        asks = not (wanted.group.alone or (is_constant and self.buffers.known))
        may_plan = asks or wanted.group.alone
        found: Captured | Plan | None = None

        def find() -> _Offer:
            nonlocal found
            wanted.check()
            if (found := self._kept(wanted, client, may_plan=may_plan)) is not None:
                return _Offer(found.buffer.plan.number, wanted.call)
            if self.stored is not None and may_plan:  # otherwise other ranks may not have it
                assumed = tuple(self.config.assume_unchanged)
                found = restore_plan(wanted.contents, self.stored, wanted.group, wanted.number, assumed)
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
        """Capture the state by a plan that this rank keeps; None if no plan fits.

        ``may_plan``: a new plan may be made. If not, a plan fits even if other parameters are frozen, because frozen
        names are only a hint, and no part of the structure.
        """

        def capture(plan: Plan) -> Sequence[torch.Tensor]:
            if may_plan and not wanted.is_frozen_as(plan):
                raise StructureChanged("other parameters are frozen now")
            return wanted.capture(plan)

        kept = self.buffers.find(wanted.contents.key, capture, client)
        return None if kept is None else Captured(*kept)

    def _check_new(self, wanted: SaveInput) -> None:
        """Raise if a planned state has another structure now, despite ``assume_constant_structure``."""
        names = wanted.contents.names
        if any(names & known.plan.names for known in self.buffers.known):
            raise StructureChangedError(
                "the state has the names of an earlier state in another structure (a name, dtype, shape or placement"
                " differs), and assume_constant_structure was promised; call prepare with it on all ranks first, or"
                " do not promise that"
            )

    def _placed_by_all(self, wanted: SaveInput, client: WorkerClient, plan: Plan) -> Captured:
        """Capture the state by a new plan, which replaces a kept plan for the same names in another form."""
        group, number = wanted.group, wanted.number
        if self.config.replicas and plan.is_state:
            place = RankPlace(own_domain(self.config.domain), copy_bytes(plan))
            decide = partial(copied_ranks, replicas=self.config.replicas)
            plan.copied_ranks = group.ask_all("copies", number, lambda: place, decide)
        made: list[StagingBuffer] = []

        def allocate() -> None:
            made.append(self.buffers.make(wanted.contents.key, plan, client))

        _warn_untrusted(plan, wanted.path)
        try:
            group.ask_all("memory", number, allocate, lambda each: each)
            tensors = wanted.capture(plan)
            self.buffers.keep(wanted.contents.key, made[0])
        except BaseException as error:
            for buffer in made:
                buffer.close()
            if isinstance(error, StructureChanged):
                raise UnsavableStateError(f"the state dict changes while it is looked at: {error}") from error
            raise
        return Captured(made[0], tensors, is_new=True)
