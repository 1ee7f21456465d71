"""Choose the plan of a save: one that is kept, if all ranks have it, or a new one that all ranks make together.

A save is given a state dict or a set of files, and all ranks save it together (``SaveInput``).
"""

from __future__ import annotations

import contextlib
import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

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
from asyncckpt.planning.draft import Draft, DraftInput, StoredPlan, make_plans, restored_plan
from asyncckpt.planning.file_set import DcpFolder, FileSet
from asyncckpt.planning.file_set_plan import FileSetContents, FileSetPlan, make_file_set_plan
from asyncckpt.planning.frozen import frozen_parameters
from asyncckpt.planning.metadata import flat_names
from asyncckpt.planning.plan import CheckpointPlan, StateDict
from asyncckpt.planning.replicas import Sample
from asyncckpt.planning.structure import StructureChanged, stateful_to_dict
from asyncckpt.planning.torch_file_plan import TorchFileContents, TorchFilePlan
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
        raise ValueError("a set of files cannot join what is there: it comes in one step, or not at all")
    for name in files.contents if is_address(path) else ():
        if not may_be_key(name):
            reason = "cannot be the name of a file on an object store; give it another"
            files.fail(UnsavableStateError(f"{name!r} {reason}", path=path))


@dataclass(frozen=True)
class SaveInput(ABC):
    """The input of a save of all ranks of ``group``, or of its preparation, under one ``number``.

    ``path``: the path of the checkpoint; "": the save is only prepared. ``call``: the call of this rank; all ranks must
    make the same call. ``check``: called before planning; an error on one rank is raised on all ranks.
    """

    group: Group
    number: int
    path: str = field(default="", kw_only=True)
    call: Call = field(default=PREPARES, kw_only=True)
    check: Callable[[], object] = field(default=lambda: None, kw_only=True)

    @property
    @abstractmethod
    def key(self) -> Any:
        """Return a key. Inputs with equal keys may fit the same plan."""

    @property
    @abstractmethod
    def names(self) -> frozenset[str]:
        """Return the names that a plan of this input will have, as far as they are known."""

    def look(self, plans: Iterable[Any]) -> None:
        """Ask ``Stateful`` values for their states, unless one of ``plans`` fits. All ``plans`` have the same key.

        Call this before the ranks ask each other anything, because a value may run a collective of the caller.
        """
        return  # there are no ``Stateful`` values

    @abstractmethod
    def capture(self, plan: Any) -> Sequence[torch.Tensor]:
        """Return the tensors by a plan with the same key. Raises ``StructureChanged`` if the plan does not fit."""

    def is_frozen_as(self, plan: Any) -> bool:
        """Return True if the same parameters of modules are frozen as in ``plan``."""
        return True

    @abstractmethod
    def make_plan(self, assumed: tuple[str, ...]) -> CheckpointPlan | FileSetPlan:
        """Make a new plan; ``assumed``: ``Config.assume_unchanged``. Raises as ``make_plans``."""

    def restore_plan(self, stored: StoredPlan, assumed: tuple[str, ...]) -> CheckpointPlan | None:
        """Return the plan of a checkpoint, or None if the plan does not fit.

        Args:
            stored: The plan as the checkpoint has it.
            assumed: ``Config.assume_unchanged``.

        Raises:
            UnsavableStateError: A value cannot be saved.
        """
        return None

    @abstractmethod
    def sample(self, plan: Any) -> Sample:
        """Return samples of values that may be replicas. The ranks compare the samples."""

    asks = True
    """If true, the ranks agree on a plan in each save, even with ``assume_constant_structure``."""

    @property
    def pickle_bytes(self) -> tuple[int, ...]:
        """Return the sizes of pickles, see ``WriteRequest``."""
        return ()

    @property
    def small_files(self) -> tuple[tuple[str, bytes], ...]:
        """Return the small files, see ``WriteRequest``."""
        return ()


@dataclass(frozen=True)
class StateToSave(SaveInput):
    """A state dict.

    ``given``: this rank's part, with ``Stateful`` values. ``planner``: DCP's or the user's; None: DCP's default.
    ``separate``: a prefix of names; values with this prefix are stored in a file of their own; "": no prefix.
    """

    given: StateDict
    planner: SavePlanner | None
    separate: str = ""
    asks = False
    _captured: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict, init=False)  # by number of plan

    @cached_property
    def state(self) -> StateDict:
        """Return the state dict, with each ``Stateful`` value replaced by its state."""
        return stateful_to_dict(self.given)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Return the names of the frozen parameters of modules."""
        return frozen_parameters(self.given)

    @property
    def key(self) -> Any:
        return DraftInput(self.given, self.planner, self.separate).key

    @property
    def names(self) -> frozenset[str]:
        return flat_names(self.state, self.planner)

    def look(self, plans: Iterable[Any]) -> None:
        for plan in plans:
            try:
                self._captured[plan.number] = plan.capture(self.given, self.planner, is_raw=True)
            except StructureChanged:
                continue
            except unless_interrupt(Exception):  # ``capture`` raises it again, where all ranks learn of it
                pass
            return
        # Only for another structure, because finding ``Stateful`` values takes as long as comparing the structure.
        _ = self.state

    def capture(self, plan: Any) -> Sequence[torch.Tensor]:
        if (known := self._captured.get(plan.number)) is not None:
            return known
        tensors: Sequence[torch.Tensor] = plan.capture(self.state, self.planner)
        return tensors

    def is_frozen_as(self, plan: Any) -> bool:
        # A state that was captured as given has no modules, and does not tell what is frozen.
        return plan.number in self._captured or plan.frozen == self.frozen

    def make_plan(self, assumed: tuple[str, ...]) -> CheckpointPlan:
        draft = self._draft(assumed)
        make_plans([draft], self.group, self.number)
        plan: CheckpointPlan = draft.plan
        return plan

    def restore_plan(self, stored: StoredPlan, assumed: tuple[str, ...]) -> CheckpointPlan | None:
        return restored_plan(self._draft(assumed), stored, self.number)

    def _draft(self, assumed: tuple[str, ...]) -> Draft:
        given = DraftInput(self.state, self.planner, self.separate, frozen=self.frozen, assumed=assumed)
        return Draft(given, self.group.rank, self.group.world_size)

    def sample(self, plan: Any) -> Sample:
        found: Sample = plan.sample(lambda: self.state, self.number)
        return found


@dataclass(frozen=True)
class FilesToSave(SaveInput):
    """A set of files. The ranks plan some of them together."""

    files: FileSet

    def __post_init__(self) -> None:
        shared = [name for name, content in self.files.contents.items() if isinstance(content, DcpFolder)]
        words = f"{self.call.words} as files, of which all ranks have {shared}"
        object.__setattr__(self, "call", Call(words, f"{self.call.key} {shared}"))

    @cached_property
    def contents(self) -> FileSetContents:
        """Return the contents of the set. Raises the error of this rank's part, if it has one."""
        if self.files.error is not None:
            raise self.files.error
        return FileSetContents(self.files)

    @property
    def key(self) -> Any:
        return "files", *self.contents.key

    @property
    def names(self) -> frozenset[str]:
        return self.contents.names

    def capture(self, plan: Any) -> Sequence[torch.Tensor]:
        tensors: Sequence[torch.Tensor] = plan.capture(self.contents)
        return tensors

    def make_plan(self, assumed: tuple[str, ...]) -> FileSetPlan:
        return make_file_set_plan(self.contents, self.group, self.number, assumed)

    def sample(self, plan: Any) -> Sample:
        found: Sample = plan.sample(self.contents, self.number)
        return found

    @property
    def pickle_bytes(self) -> tuple[int, ...]:
        return self.contents.pickle_bytes

    @property
    def small_files(self) -> tuple[tuple[str, bytes], ...]:
        return tuple(self.contents.small.items())


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
        planner, separate: See ``StateToSave``; ignored for files.
    """
    if isinstance(state, FileSet):
        return FilesToSave(group, number, state, path=path, call=call, check=check)
    return StateToSave(group, number, state, planner, separate, path=path, call=call, check=check)


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


def _warn_untrusted(plan: CheckpointPlan | FileSetPlan, path: str) -> None:
    """Log the names of values that a load would refuse to unpickle, so that users learn this before a crash."""
    refused = []
    for name, data in islice(plan.objects.own_pickles(), _MOST_TRIED):
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
            "%d values of %s are of kinds that could run code when they are loaded: %s; asyncckpt's load will refuse"
            " them unless it is given weights_only=False; save what they are made of (numbers, text, tensors) to do"
            " without",
            len(refused),
            path or "the state that is prepared",
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
            wanted.look([known.plan for known in self.buffers.known if known.key == wanted.key])
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
            logger.warning("asking again: %s", str(error))
            client.wait_for_end(_DEATH_S)
            client = wanted.group.connect_worker(self.supervisor.running)
            found = self._found_by_all(wanted, client, prepares)
        if not isinstance(found, Captured):
            plan = found or wanted.make_plan(tuple(self.config.assume_unchanged))
            found = self._placed_by_all(wanted, client, plan)
        if self.stored is not None and self.stored.names <= found.buffer.plan.names:
            self.stored = None  # a save has used the plan, or never will
        sample = None if wanted.group.alone else wanted.sample(found.buffer.plan)
        return found._replace(pickle_bytes=wanted.pickle_bytes, small_files=wanted.small_files, sample=sample)

    def plan_as(self, read: Callable[[], StoredPlan | None]) -> None:
        """Use a checkpoint's plan for the first save, if it fits on all ranks. ``read`` returns that plan, or None."""
        self.stored = None if self.buffers.known else read()

    def for_file(self, contents: TorchFileContents, group: Group, number: int) -> Captured:
        """Capture the contents of a single file.

        Args:
            contents: The object in the file.
            group: This process alone.
            number: The number of the save.
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
        """Return the state captured by a plan that all ranks keep, or the plan of a checkpoint that fits on all ranks.

        Return None if the ranks have to make a new plan. With constant structure the ranks do not ask each other,
        except to prepare a save.
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
            if self.stored is not None and may_plan:  # otherwise other ranks may not have it
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
        """Capture the state by a plan that this rank keeps; None if no plan fits.

        ``may_plan``: a new plan may be made. If not, a plan fits even if other parameters are frozen, because frozen
        names are only a hint, and no part of the structure.
        """

        def capture(plan: Any) -> Sequence[torch.Tensor]:
            if may_plan and not wanted.is_frozen_as(plan):
                raise StructureChanged("other parameters are frozen now")
            return wanted.capture(plan)

        kept = self.buffers.find(wanted.key, capture, client)
        return None if kept is None else Captured(*kept)

    def _check_new(self, wanted: SaveInput) -> None:
        """Raise if a planned state has another structure now, despite ``assume_constant_structure``."""
        names = wanted.names
        if any(names & known.plan.names for known in self.buffers.known):
            raise StructureChangedError(
                "the state has the names of one that was saved before, in another structure (a name, dtype, shape or"
                " placement differs), and assume_constant_structure was promised; call prepare with it on all ranks"
                " first, or do not promise that"
            )

    def _placed_by_all(self, wanted: SaveInput, client: WorkerClient, plan: CheckpointPlan | FileSetPlan) -> Captured:
        """Capture the state by a new plan, which replaces a kept plan for the same names in another form."""
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
