"""What is to be saved, as the engine is given it: a state dict, or a set of files, that all ranks save together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from asyncckpt.errors import UnsavableStateError, unless_interrupt
from asyncckpt.format.write_request import Existing
from asyncckpt.planning.dcp_planner import flat_names
from asyncckpt.planning.draft import Draft, DraftInput, make_plans
from asyncckpt.planning.file_set import DcpFolder, FileSet
from asyncckpt.planning.file_set_plan import FileSetContents, FileSetPlan, make_file_set_plan
from asyncckpt.planning.frozen import frozen_parameters
from asyncckpt.planning.plan import CheckpointPlan, StateDict
from asyncckpt.planning.replicas import Sample
from asyncckpt.planning.stored_plan import StoredPlan, restored_plan
from asyncckpt.planning.structure import StructureChanged, stateful_to_dict
from asyncckpt.ranks.group import Group
from asyncckpt.ranks.rounds import Call
from asyncckpt.storage import is_address, may_be_key

PREPARES = Call("prepares a save", "prepare")


def check_file_set_place(files: FileSet, path: str, existing: Existing) -> None:
    """Raise ``ValueError`` where a set of files cannot go; have its save fail where a store cannot have such names."""
    if existing == "join":
        raise ValueError("a set of files cannot join what is there: it comes in one step, or not at all")
    for name in files.contents if is_address(path) else ():
        if not may_be_key(name):
            reason = "cannot be the name of a file on an object store; give it another"
            files.fail(UnsavableStateError(f"{name!r} {reason}", path=path))


@dataclass(frozen=True)
class SaveInput(ABC):
    """What all ranks of ``group`` are to save, or to prepare for, under one ``number``.

    ``path``: where it goes; "": it is only prepared. ``call``: what this rank does, which all others have to do, too.
    ``check``: what it raises on any rank is raised on all, before anything is planned.
    """

    group: Group
    number: int
    path: str = field(default="", kw_only=True)
    call: Call = field(default=PREPARES, kw_only=True)
    check: Callable[[], object] = field(default=lambda: None, kw_only=True)

    @property
    @abstractmethod
    def key(self) -> Any:
        """Equal where the same is planned alike."""

    @property
    @abstractmethod
    def names(self) -> frozenset[str]:
        """Those of its plan, as far as they are known before."""

    def look(self, plans: Iterable[Any]) -> None:
        """Ask its values for their states, if it is for none of ``plans``, which have the same key: before any rank is
        asked, as what they say may take a collective of the caller's.
        """
        return  # there are none

    @abstractmethod
    def capture(self, plan: Any) -> Sequence[torch.Tensor]:
        """Its tensors, by a plan that has the same key. Raises ``StructureChanged`` where that is not for it."""

    def is_frozen_as(self, plan: Any) -> bool:
        """Return True if the parameters that modules have frozen are still those of ``plan``."""
        return True

    @abstractmethod
    def make_plan(self, assumed: tuple[str, ...]) -> CheckpointPlan | FileSetPlan:
        """Make a new plan; ``assumed``: ``Config.assume_unchanged``. Raises as ``make_plans``."""

    def restore_plan(self, stored: StoredPlan, assumed: tuple[str, ...]) -> CheckpointPlan | None:
        """Return the plan of a checkpoint, if it is for this; None: this has to be planned.

        Args:
            stored: What is known of that plan.
            assumed: ``Config.assume_unchanged``.

        Raises:
            UnsavableStateError: A value cannot be saved.
        """
        return None

    @abstractmethod
    def sample(self, plan: Any) -> Sample:
        """Samples of values that may be replicas: all ranks that have one are to have the same."""

    asks = True
    """Whether the ranks ask each other which plan to take, also where constant structure is promised."""

    @property
    def pickle_bytes(self) -> tuple[int, ...]:
        """As of ``WriteRequest``."""
        return ()

    @property
    def small_files(self) -> tuple[tuple[str, bytes], ...]:
        """As of ``WriteRequest``."""
        return ()


@dataclass(frozen=True)
class StateToSave(SaveInput):
    """A state dict.

    ``given``: this rank's part; ``Stateful`` values are asked for theirs. ``planner``: DCP's or the user's; None: DCP's
    default. ``separate``: values whose names begin with it are stored in a file of their own; "": none.
    """

    given: StateDict
    planner: SavePlanner | None
    separate: str = ""
    asks = False
    _captured: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict, init=False)  # by the plan's number

    @cached_property
    def state(self) -> StateDict:
        """Without ``Stateful`` values."""
        return stateful_to_dict(self.given)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of the parameters that modules have frozen."""
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
            except unless_interrupt(Exception):  # to be raised where all ranks hear of it
                pass
            return
        # To look for ``Stateful`` values takes as long as to compare the structure, so only where that is another.
        _ = self.state

    def capture(self, plan: Any) -> Sequence[torch.Tensor]:
        if (known := self._captured.get(plan.number)) is not None:
            return known
        tensors: Sequence[torch.Tensor] = plan.capture(self.state, self.planner)
        return tensors

    def is_frozen_as(self, plan: Any) -> bool:
        # A state that was captured as it was given has no modules, and says nothing of what is frozen.
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
    """A set of files, of which all ranks plan some together."""

    files: FileSet

    def __post_init__(self) -> None:
        shared = [name for name, content in self.files.contents.items() if isinstance(content, DcpFolder)]
        words = f"{self.call.words} as files, of which all ranks have {shared}"
        object.__setattr__(self, "call", Call(words, f"{self.call.key} {shared}"))

    @cached_property
    def contents(self) -> FileSetContents:
        """The set, taken apart. Raises what this rank's part failed with."""
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
    """What is to be saved.

    Args:
        group, number, path, call, check: As of ``SaveInput``.
        state: A set of files, or a state dict.
        planner, separate: As of ``StateToSave``; of no matter for files.
    """
    if isinstance(state, FileSet):
        return FilesToSave(group, number, state, path=path, call=call, check=check)
    return StateToSave(group, number, state, planner, separate, path=path, call=call, check=check)
