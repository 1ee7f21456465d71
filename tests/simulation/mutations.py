"""Mutations of the machines: each takes one rule away, or breaks it, and the simulator has to notice."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

COMMIT = {
    "the first rank finalizes without one of the ranks": (
        "if len(self.reports) == self.begun.ranks:",
        "if len(self.reports) >= self.begun.ranks - 1:",
    ),
    "the first rank counts a report that came twice": (
        "        self.reports.setdefault(rank, report)\n        if len(self.reports) == self.begun.ranks:",
        "        self.reports.setdefault(rank, report)\n        self.count = getattr(self, 'count', 0) + 1\n"
        "        if self.count >= self.begun.ranks:",
    ),
    "a save is finalized before an older one": (
        "oldest = next(iter(self._saves.values()), None)",
        "oldest = next((each for each in self._saves.values() if each.state is CommitState.READY), None)",
    ),
    "a save fails while it is finalized": (
        "case CommitState.OPEN, PartFailed(_, error) | RankFailed(_, error):",
        "case CommitState.OPEN | CommitState.FINALIZING, PartFailed(_, error) | RankFailed(_, error):",
    ),
    "a save fails while what follows it is done": (
        "case CommitState.OPEN, PartFailed(_, error) | RankFailed(_, error):",
        "case CommitState.OPEN | CommitState.FOLLOWING, PartFailed(_, error) | RankFailed(_, error):",
    ),
    "a save that has begun fails by no other rank": (
        "case CommitState.OPEN, PartFailed(_, error) | RankFailed(_, error):",
        "case CommitState.OPEN, PartFailed(_, error):",
    ),
    "the first rank takes an error of storage for the end": (
        "case CommitState.FINALIZING, Finalized(_, StorageError() as error):\n"
        "                return self._resolve(error)",
        "case CommitState.FINALIZING, Finalized(_, StorageError() as error):\n                return self.fail(error)",
    ),
    "the first rank takes an error of storage for success": (
        "case CommitState.FINALIZING, Finalized(_, StorageError() as error):\n"
        "                return self._resolve(error)",
        "case CommitState.FINALIZING, Finalized(_, StorageError()):\n                return self._follow()",
    ),
    "the first rank hears nothing of an error of its own": (
        "case CommitState.FINALIZING, Finalized(_, CheckpointError() as error):\n"
        "                return self.fail(error)",
        "case CommitState.FINALIZING, Finalized(_, CheckpointError()):\n                return []",
    ),
    "the first rank forgets what storage has said": (
        "case CommitState.RESOLVING, Resolved(_, True):\n                return self._follow()",
        "case CommitState.RESOLVING, Resolved(_, True):\n                return []",
    ),
    "the first rank takes an unknown outcome for a failure": (
        "case CommitState.RESOLVING, Resolved(_, None, error):  # the others ask storage themselves\n"
        "                return self._end(CommitState.UNKNOWN, error)",
        "case CommitState.RESOLVING, Resolved(_, None, error):\n"
        "                return [Conclude(self.number, error), *self._end(CommitState.FAILED, self.failure)]",
    ),
    "the first rank concludes an unknown outcome as a failure": (
        "case CommitState.RESOLVING, Resolved(_, None, error):  # the others ask storage themselves\n"
        "                return self._end(CommitState.UNKNOWN, error)",
        "case CommitState.RESOLVING, Resolved(_, None, error):\n"
        "                return [Conclude(self.number, self.failure), *self._end(CommitState.UNKNOWN, error)]",
    ),
    "the first rank has no deadline": (
        "        if self.state is not CommitState.OPEN or now < self.deadline:\n            return []\n        missing",
        "        if True:\n            return []\n        missing",
    ),
    "the first rank's deadline also ends what is being finalized": (
        "        if self.state is not CommitState.OPEN or now < self.deadline:",
        "        if now < self.deadline:",
    ),
    "the first rank concludes before what follows a save is done": (
        "    def _follow(self) -> list[CommitAction]:\n        self.state = CommitState.FOLLOWING\n"
        "        return [FollowUp(self.number)]",
        "    def _follow(self) -> list[CommitAction]:\n        self.state = CommitState.FOLLOWING\n"
        "        return [FollowUp(self.number), Conclude(self.number, None), Tell(self.number, None)]",
    ),
    "the pointer is advanced before the checkpoint is final": (
        "        return [Finalize(self.number, [self.reports[rank] for rank in range(self.begun.ranks)])]",
        "        return [FollowUp(self.number), Finalize(self.number, [*self.reports.values()])]",
    ),
    "the reports are in the order of their arrival": (
        "[self.reports[rank] for rank in range(self.begun.ranks)]",
        "[*self.reports.values()]",
    ),
    "a failed part stays": (
        "part = DiscardPart(self.number) if state is CommitState.FAILED else KeepPart(self.number)",
        "part = KeepPart(self.number)",
    ),
    "a part of unknown outcome is discarded": (
        "part = DiscardPart(self.number) if state is CommitState.FAILED else KeepPart(self.number)",
        "part = KeepPart(self.number) if state is CommitState.COMMITTED else DiscardPart(self.number)",
    ),
    "another rank that was not heard of fails without telling": (
        "return [SendFailure(self.number, error), *self._end(CommitState.FAILED, error)]",
        "self.state = CommitState.FAILED\n                return []",
    ),
    "a rank that has reported gives up with the first rank": (
        "case CommitState.REPORTED, FirstLost(_, error):\n"
        "                return [SendFailure(self.number, error), *self._resolve(error)]",
        "case CommitState.REPORTED, FirstLost(_, error):\n"
        "                return [SendFailure(self.number, error), *self._end(CommitState.FAILED, error)]",
    ),
    "a rank that has reported takes the loss of the first rank for success": (
        "case CommitState.REPORTED, FirstLost(_, error):\n"
        "                return [SendFailure(self.number, error), *self._resolve(error)]",
        "case CommitState.REPORTED, FirstLost():\n                return self._end(CommitState.COMMITTED, None)",
    ),
    "a rank that has reported waits for ever": (
        "if self.state not in (CommitState.OPEN, CommitState.REPORTED) or now < self.deadline + self.begun.grace:",
        "if self.state is not CommitState.OPEN or now < self.deadline + self.begun.grace:",
    ),
    "a rank that has not reported waits for ever": (
        "if self.state not in (CommitState.OPEN, CommitState.REPORTED) or now < self.deadline + self.begun.grace:",
        "if self.state is not CommitState.REPORTED or now < self.deadline + self.begun.grace:",
    ),
    "a rank resolves again and again": (
        "if self.state not in (CommitState.OPEN, CommitState.REPORTED) or now < self.deadline + self.begun.grace:\n"
        "            return []\n",
        "if self.state is CommitState.RESOLVING:\n            return self._resolve(CheckpointError('again'))\n"
        "        if now < self.deadline + self.begun.grace:\n            return []\n",
    ),
    "an outcome that comes while storage is asked is forgotten, and so is what storage says": (
        "case CommitState.REPORTED | CommitState.RESOLVING, Outcome(_, error):",
        "case CommitState.RESOLVING, Outcome():\n                self.state = CommitState.REPORTED\n"
        "                self.deadline += 1e9\n"
        "            case CommitState.REPORTED, Outcome(_, error):",
    ),
    "an outcome is taken for success": (
        "return self._end(CommitState.FAILED if error is not None else CommitState.COMMITTED, error)",
        "return self._end(CommitState.COMMITTED, None)",
    ),
    "storage says no, and the rank takes it for yes": (
        "return self._end(CommitState.FAILED, self.failure)\n            case CommitState.RESOLVING, Resolved(",
        "return self._end(CommitState.COMMITTED, None)\n            case CommitState.RESOLVING, Resolved(",
    ),
    "what comes before a save begins is forgotten": (
        "self._early.setdefault(save, []).append(event)",
        "pass",
    ),
    "only the last of what comes before a save begins is kept": (
        "self._early.setdefault(save, []).append(event)",
        "self._early[save] = [event]",
    ),
    "a rank that is gone is waited for": (
        "self._gone.setdefault(rank, error)\n            case TrainerGone",
        "pass\n            case TrainerGone",
    ),
    "a rank that is gone has its reports forgotten": (
        "in save.missing():\n                    if save.state is CommitState.OPEN and (error",
        "in range(save.begun.ranks):\n                    if save.state is CommitState.OPEN and (error",
    ),
    "a save that has ended is kept": (
        "if save.state not in _ENDED}",
        "if True}",
    ),
    "what is written after the end stays": (
        "elif isinstance(event, (PartWritten, PartFailed)):\n                    yield DiscardPart(event.save)",
        "",
    ),
    "the worker leaves with saves that have not ended": (
        "if self._close is not None and not self._saves and not self._has_left:",
        "if self._close is not None and not self._has_left:",
    ),
    "the worker waits for the others for ever": (
        "self._has_left = len(self._left) >= self._close.others or now >= self._leaves_at",
        "self._has_left = len(self._left) >= self._close.others",
    ),
    "the worker waits for the others not at all": (
        "self._has_left = len(self._left) >= self._close.others or now >= self._leaves_at",
        "self._has_left = True",
    ),
    "silent ranks are lost although nothing was started again": (
        "and save.state is CommitState.OPEN and self._is_restarted:",
        "and save.state is CommitState.OPEN:",
    ),
    "a silent rank is never lost": (
        "and save.state is CommitState.OPEN and self._is_restarted:",
        "and False:",
    ),
    "a worker that was stopped takes the others for silent": (
        "                self._awake_since = now\n",
        "                pass\n",
    ),
}
"""By what a mutation does: a text of ``asyncckpt/protocol/commit.py``, and what stands there instead."""


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """Return a copy of a module in which the text ``new`` stands in the place of ``old``."""
    source = inspect.getsource(module)
    if source.count(old) < 1:
        raise ValueError(f"there is no {old!r} in {module.__name__} any more")
    copy = ModuleType(f"{module.__name__}_mutated")
    sys.modules[copy.__name__] = copy  # for its dataclasses
    exec(compile(source.replace(old, new, 1), copy.__name__, "exec"), copy.__dict__)
    return copy
