"""Mutations of the machines: each takes one rule away, or breaks it, and the simulator has to notice."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from unittest import mock

from asyncckpt.protocol import commit, replication, saves, trainer, worker_life
from simulation.saves import Machines

COMMIT = {
    "the first rank finalizes without one of the ranks": (
        "if len(self.reports) == len(self._members()):",
        "if len(self.reports) >= len(self._members()) - 1:",
    ),
    "the first rank counts a report that came twice": (
        "        self.reports.setdefault(rank, report)\n        if len(self.reports) == len(self._members()):",
        "        self.reports.setdefault(rank, report)\n        self.count = getattr(self, 'count', 0) + 1\n"
        "        if self.count >= len(self._members()):",
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
        "case CommitState.RESOLVING, Resolved(_, None, error):\n"
        "                return [ConcludeUnknown(self.number), *self._end(CommitState.UNKNOWN, error)]",
        "case CommitState.RESOLVING, Resolved(_, None, error):\n"
        "                return [Conclude(self.number, error), *self._end(CommitState.FAILED, self.failure)]",
    ),
    "the first rank concludes an unknown outcome as a failure": (
        "case CommitState.RESOLVING, Resolved(_, None, error):\n"
        "                return [ConcludeUnknown(self.number), *self._end(CommitState.UNKNOWN, error)]",
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
        "        return [Finalize(self.number, [self.reports[rank] for rank in self._members()])]",
        "        return [FollowUp(self.number), Finalize(self.number, [*self.reports.values()])]",
    ),
    "the reports are in the order of their arrival": (
        "[self.reports[rank] for rank in self._members()]",
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
        "if self.state not in (CommitState.OPEN, CommitState.REPORTED) or now < self.deadline + late_s:",
        "if self.state is not CommitState.OPEN or now < self.deadline + late_s:",
    ),
    "a rank that has not reported waits for ever": (
        "if self.state not in (CommitState.OPEN, CommitState.REPORTED) or now < self.deadline + late_s:",
        "if self.state is not CommitState.REPORTED or now < self.deadline + late_s:",
    ),
    "a rank resolves again and again": (
        "if self.state not in (CommitState.OPEN, CommitState.REPORTED) or now < self.deadline + late_s:\n"
        "            return []\n",
        "if self.state is CommitState.RESOLVING:\n            return self._resolve(CheckpointError('again'))\n"
        "        if now < self.deadline + late_s:\n            return []\n",
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
    "the first rank is gone with its trainer": (
        "            case TrainerGone():\n",
        "            case TrainerGone():\n                self._gone.setdefault(0, CheckpointError('gone', rank=0))\n",
    ),
    "a rank that is gone is waited for": (
        "self._gone.setdefault(rank, error)\n            case TrainerGone",
        "pass\n            case TrainerGone",
    ),
    "a rank that is gone has its reports forgotten": (
        "min((rank for rank in self._gone if rank not in save.reports), default=None)",
        "min(self._gone, default=None)",
    ),
    "a save that has ended is kept": (
        "if save.state in _ENDED]",
        "if False]",
    ),
    "what is written after the end stays": (
        "                return [DiscardPart(save)]\n",
        "                return []\n",
    ),
    "the worker leaves with saves that have not ended": (
        "if self._finish is not None and oldest is None:",
        "if self._finish is not None:",
    ),
    "the worker waits for the others for ever": (
        "if len(self._left) >= others or now >= self._leaves_at:",
        "if len(self._left) >= others:",
    ),
    "the worker waits for the others not at all": (
        "if len(self._left) >= others or now >= self._leaves_at:",
        "if True:",
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
        "            self._awake_since = now\n        if",
        "            pass\n        if",
    ),
}
"""By what a mutation does: a text of ``asyncckpt/protocol/commit.py``, and what stands there instead."""


PARTIES = {
    "the first rank does not wait for the parties": (
        "return range(self.begun.ranks + len(self.begun.parties))",
        "return range(self.begun.ranks)",
    ),
    "the first rank ignores the failure of a party": (
        "case CommitState.OPEN, PartFailed(_, error) | RankFailed(_, error):",
        "case CommitState.OPEN, PartFailed(_, error):",
    ),
    "a party takes a missing report for success": (
        "return self._resolve(RankFailedError(_NOT_JOINED))",
        "return self._end(CommitState.COMMITTED, None)",
    ),
    "a party that has reported has no deadline": (
        "if self.state not in (CommitState.OPEN, CommitState.REPORTED) or now < self.deadline + late_s:",
        "if self.state is not CommitState.OPEN or now < self.deadline + late_s:",
    ),
    "a party fails without asking storage": (
        "case CommitState.REPORTED, FirstLost(_, error):\n"
        "                return [SendFailure(self.number, error), *self._resolve(error)]",
        "case CommitState.REPORTED, FirstLost(_, error):\n"
        "                return [SendFailure(self.number, error), *self._end(CommitState.FAILED, error)]",
    ),
    "a party takes an unfinished step for final": (
        "case CommitState.REPORTED, PartyLooked(_, True):",
        "case CommitState.REPORTED, PartyLooked():",
    ),
}
IMAGE = {
    "the writer is idle before it has ended its part": (
        "            case LetGo(save):\n",
        "            case LetGo(save):\n                self.writer_is_idle = True\n",
    ),
    "an image that is followed is not completed": (
        "actions += [HoldImage(save), CompleteImage(save)]",
        "actions.append(HoldImage(save))",
    ),
    "an image is taken for complete while it arrives": (
        "actions.append(WriteImage(save))",
        "actions += [CompleteImage(save), WriteImage(save)]",
    ),
    "a slot is freed although the trainer still copies": (
        "                    self.states[save] = ImageState.UNWRITTEN\n                else:",
        "                    self._free(save, actions)\n                else:",
    ),
    "a slot that nobody writes is not freed when it is staged": (
        "                actions.append(HoldImage(save))\n                self._free(save, actions)",
        "                actions.append(HoldImage(save))",
    ),
    "a slot that nobody writes is not freed when its save is cancelled": (
        "case ImageState.ARRIVING | ImageState.UNWRITTEN | ImageState.STAGED as state:",
        "case ImageState.ARRIVING | ImageState.STAGED as state:",
    ),
    "a slot is freed while the writer follows it": (
        "case ImageState.ARRIVING | ImageState.UNWRITTEN | ImageState.STAGED as state:",
        "case ImageState.ARRIVING | ImageState.UNWRITTEN | ImageState.STAGED | ImageState.FOLLOWED as state:",
    ),
    "a slot is freed while it is written": (
        "case ImageState.ARRIVING | ImageState.UNWRITTEN | ImageState.STAGED as state:",
        "case ImageState.ARRIVING | ImageState.UNWRITTEN | ImageState.STAGED | ImageState.WRITING as state:",
    ),
    "a staged save cannot be cancelled": (
        "case ImageState.ARRIVING | ImageState.UNWRITTEN | ImageState.STAGED as state:",
        "case ImageState.ARRIVING | ImageState.UNWRITTEN as state:",
    ),
    "a save that is cancelled is still written": (
        "                if state is ImageState.STAGED:\n                    self._staged.remove(save)\n",
        "",
    ),
    "a cancelled save does not fail": (
        "                actions.append(PartFailed(save, event.reason))\n",
        "",
    ),
    "the writer does not hear of a cancelled save": (
        "                actions.append(StopWriting(save, event.reason))\n",
        "",
    ),
    "a cancelled save that is followed has a free slot": (
        "actions.append(AnswerCancel(save, in_time=True, slot_free=False))",
        "actions.append(AnswerCancel(save, in_time=True, slot_free=True))",
    ),
    "a save that is being written is cancelled": (
        "actions.append(AnswerCancel(save, in_time=False, slot_free=True))",
        "actions.append(AnswerCancel(save, in_time=True, slot_free=True))",
    ),
    "two images are written at once": (
        "        while self.writer_is_idle and self._staged:",
        "        while self._staged:",
    ),
    "the writer is never idle again": (
        "                self._slots.writer_is_idle = True\n",
        "                pass\n",
    ),
    "the newest image is written first": ("self._staged.pop(0)", "self._staged.pop()"),
    "a save that has ended is written": (
        "            if is_open(save):\n                self.writer_is_idle",
        "            if True:\n                self.writer_is_idle",
    ),
    "a slot whose save has ended is not freed": (
        "            else:\n                self._free(save, actions)\n        for save",
        "        for save",
    ),
    "what a dead trainer has staged is lost": (
        "                    if save in staged:",
        "                    if False:",
    ),
    "what a dead trainer has not staged is taken for staged": (
        "                    if save in staged:",
        "                    if True:",
    ),
    "what a dead trainer has not staged does not fail": (
        "                actions.append(PartFailed(save, RankFailedError(_LEFT)))\n",
        "",
    ),
    "the writer waits for a dead trainer": (
        "                actions.append(StopWriting(save, RankFailedError(_LEFT)))",
        "                pass",
    ),
}
"""The same for ``asyncckpt/protocol/saves.py``."""

TRAINER = {
    "a slot is taken from the save before": (
        "return found is None or (found.stage is Stage.FREE and found.outcome is not EndState.OPEN)",
        "return True",
    ),
    "saves that are written and not committed pile up": (
        "return found is None or (found.stage is Stage.FREE and found.outcome is not EndState.OPEN)",
        "return found is None or found.stage is Stage.FREE",
    ),
    "an interrupted caller does not wait for the copy": (
        "actions.append(StopCopy(number))",
        "actions += [StopCopy(number), ReleaseTensors(number)]",
    ),
    "an interrupt does not stop the copy": ("            actions.append(StopCopy(number))", "            pass"),
    "an interrupted save waits for a slot": (
        "        if save.stage is Stage.WAITING:\n            self._fail(number, error, actions)",
        "        if save.stage is Stage.WAITING:\n            pass",
    ),
    "a save waits for a slot for ever": ("now - save.since >= limit_s", "now - save.since >= 1e9"),
    "a worker that has stopped is waited for": ("actions.append(KillWorker())", "pass"),
    "a worker that is slow is killed": (
        "max(save.since, self._progress_at) + save.wanted.limit_s",
        "save.since + 0.5",
    ),
    "what a dead worker has committed is taken for lost": (
        "if is_staged and not event.left and not self._is_given_up:",
        "if False:",
    ),
    "the slots of a dead worker stay in use": (
        "            if save.stage in (Stage.STAGED, Stage.CANCELLING):\n                save.stage = Stage.FREE",
        "            if save.stage in (Stage.STAGED, Stage.CANCELLING):\n                pass",
    ),
    "a save waits for a slot of a dead worker": (
        "            if save.stage is Stage.WAITING:\n                self._fail(number, event.error, actions)",
        "            if save.stage is Stage.WAITING:\n                pass",
    ),
    "the copies of a dead worker's images are waited for": (
        "                self._on_replicated(number, event.error, actions)",
        "                pass",
    ),
    "a slot that the writer still reads is free": (
        "if event.in_time and event.slot_free:",
        "if event.in_time:",
    ),
    "what was cancelled too late has failed": (
        "if event.in_time and save is not None and save.reason is not None:",
        "if save is not None and save.reason is not None:",
    ),
    "a withdrawn save is cancelled while it is copied": (
        "if save.stage is Stage.STAGED and save.wanted.decision is not None:",
        "if save.wanted.decision is not None:",
    ),
    "a save is replaced while it is copied": (
        "if under_way[its].stage is Stage.STAGED and its not in save.asked:",
        "if its not in save.asked:",
    ),
    "the newest save is too late to be replaced, and no other is": (
        "                else:\n                    self._replace(number, actions)",
        "                else:\n                    pass",
    ),
    "the worker does not hear that the copy failed": (
        "            save.stage = Stage.CANCELLING\n            actions.append(AskCancel(number, error))",
        "            save.stage = Stage.CANCELLING",
    ),
    "a save that no worker knows is cancelled": (
        "if told and self._gone is None:",
        "if self._gone is None:",
    ),
    "the caller of a failed save waits": (
        "        actions.append(ReleaseTensors(number))\n        if told",
        "        if told",
    ),
    "a save ends twice": (
        "if save is not None and save.is_open:\n            save.outcome",
        "if save is not None:\n            save.outcome",
    ),
    "what was found out is forgotten": (
        "                    self.saves[number].outcome = EndState.OPEN",
        "                    pass",
    ),
    "an image that is copied is not handed over": (
        "            actions.append(HandOver(number))",
        "            pass",
    ),
    "a save overtakes another that waits for a slot": (
        "oldest = next((save for save in self.saves.values() if save.stage is Stage.WAITING), None)",
        "oldest = next((save for save in [*self.saves.values()][::-1] if save.stage is Stage.WAITING), None)",
    ),
    "a save skips although a slot is free": (
        "if len(under_way) >= event.slots:",
        "if len(under_way) >= 0:",
    ),
}
"""The same for ``asyncckpt/protocol/trainer.py``."""


LIFE = {
    "a trainer attaches beside another": (
        "if self.state is LifeState.SERVING or self._next is not None or asked.session != self.session:",
        "if self._next is not None or asked.session != self.session:",
    ),
    "two trainers are next": (
        "if self.state is LifeState.SERVING or self._next is not None or asked.session != self.session:",
        "if self.state is LifeState.SERVING or asked.session != self.session:",
    ),
    "a trainer attaches that has seen an older session": (
        "if self.state is LifeState.SERVING or self._next is not None or asked.session != self.session:",
        "if self.state is LifeState.SERVING or self._next is not None:",
    ),
    "a session has the number of the one before": ("        self.session += 1\n", ""),
    "one that does not fit attaches": (
        "        if asked.trouble is not None:\n            return [Refuse(asked.peer, asked.trouble)]\n",
        "",
    ),
    "one attaches to a worker that is to leave": ("        if self.is_to_leave:\n", "        if False:\n"),
    "nobody attaches to a worker that lingers": (
        "if self.state is LifeState.LINGERING:\n            return [TellRestarted(), *self._begin(asked)]",
        "if self.state is LifeState.LINGERING:\n            return [TellRestarted()]",
    ),
    "one that is gone is next": (
        "                if self.next_peer == peer:\n                    self._next = None\n"
        "                    return [LookAgain(peer)]\n",
        "",
    ),
    "the next one stays the next": (
        "        self._next = None\n        return [BeginSession",
        "        return [BeginSession",
    ),
    "the next one is forgotten": (
        "        if self._next is not None:\n            return self._begin(self._next)\n",
        "",
    ),
    "a worker with a trainer is made to leave": (
        "if self.state is LifeState.SERVING or self._next is not None:\n            return [] if",
        "if self._next is not None:\n            return [] if",
    ),
    "a worker with a next trainer is made to leave": (
        "if self.state is LifeState.SERVING or self._next is not None:\n            return [] if",
        "if self.state is LifeState.SERVING:\n            return [] if",
    ),
    "a worker that lingers is not made to leave": ("if self.state is LifeState.LINGERING else []", "if False else []"),
    "a worker whose trainer has closed lingers": (
        "if self.is_to_leave or not self._linger:",
        "if self._is_retired or not self._linger:",
    ),
    "a worker that is not to linger does": ("if self.is_to_leave or not self._linger:", "if self.is_to_leave:"),
    "a worker lingers as the trainer before has asked": (
        "self.state, self._linger = LifeState.SERVING, asked.linger",
        "self.state = LifeState.SERVING",
    ),
    "a worker does not wait for its first trainer": (
        "(not holds and self.session > 0) or self.lingers_s(now) == 0",
        "not holds or self.lingers_s(now) == 0",
    ),
    "a worker that holds nothing lingers": (
        "if (not holds and self.session > 0) or self.lingers_s(now) == 0:",
        "if self.lingers_s(now) == 0:",
    ),
    "a worker lingers for ever": (
        "if (not holds and self.session > 0) or self.lingers_s(now) == 0:",
        "if not holds and self.session > 0:",
    ),
    "a worker lingers as if somebody were connected": (
        "                self._peers.discard(peer)\n",
        "                pass\n",
    ),
    "a worker forgets that it was asked to retire": (
        "        self._is_retired = True\n",
        "",
    ),
    "one attaches to a worker whose trainer has closed": (
        "        if self.is_to_leave:\n            return [Refuse(",
        "        if self.state is LifeState.LEAVING:\n            return [Refuse(",
    ),
    "nobody attaches": (
        "if self.state is LifeState.SERVING or self._next is not None or asked.session != self.session:",
        "if True:",
    ),
    "the session before is not told of the next": (
        "        self._next = asked\n        return [TellRestarted()]",
        "        self._next = asked\n        return []",
    ),
    "a session is told of a trainer that is sent away": (
        "            return [LookAgain(asked.peer)]\n        if asked",
        "            return [TellRestarted(), LookAgain(asked.peer)]\n        if asked",
    ),
    "a worker leaves although somebody is connected": (
        "return self._linger if self._peers else max(",
        "return max(",
    ),
}
"""The same for ``asyncckpt/protocol/worker_life.py``."""


REPLICATION = {
    "a copy is overwritten before it is known whether its save is replicated": (
        "if self._newest_images[source].save <= self._known():",
        "if True:",
    ),
    "a save that has ended lets copies of an older one be overwritten": (
        "return min(self._saves, default=self._newest + 1) - 1",
        "return max(min(self._saves, default=self._newest + 1), self._newest) - 1",
    ),
    "no copy is overwritten": (
        "return min(self._saves, default=self._newest + 1) - 1",
        "return 0",
    ),
    "a save is replicated without one of the ranks": (
        "        if len(its.reports) == its.begun.ranks:",
        "        if len(its.reports) == max(1, its.begun.ranks - 1):",
    ),
    "a rank reports when it has one of its images": (
        "                if not its.missing:\n                    self._complete(save, actions)",
        "                self._complete(save, actions)",
    ),
    "a rank reports a save that it has not staged": (
        "missing = {begun.rank, *(image.source for image in newest if image.save < number)}",
        "missing = {image.source for image in newest if image.save < number}",
    ),
    "a report that comes early is lost": (
        "                self._early[save].append(event)",
        "                pass",
    ),
    "the first rank does not count its own copies": (
        "            self._hear(CopiesReported(save, rank), actions)",
        "            pass",
    ),
    "a save waits for an image that was passed over": (
        "    if image.save > save:\n        return SaveDroppedError(_NEWER, rank=image.source)\n",
        "",
    ),
    "a save that begins waits for an image that was passed over": (
        "            if (failure := _failure(number, image)) is not None:\n"
        "                self._fail_here(number, failure, actions)\n        for event",
        "            pass\n        for event",
    ),
    "an image that could not be copied counts": (
        "return image.error if image.save == save else None",
        "return None",
    ),
    "a save fails because this rank has staged a newer one": (
        "        if image.source in self._newest_images:  #",
        "        if True:  #",
    ),
    "copies of a dead worker are waited for": (
        "                self._begins[rank] = save\n",
        "",
    ),
    "a save that begins later waits for copies of a dead worker": (
        "        for rank in {*self._begins, *self._gone}:\n            self._lose(rank, actions)\n",
        "",
    ),
    "a worker does not say with which save it begins": (
        "            actions.append(SayBegin(number, begun.timeout))",
        "            pass",
    ),
    "the first rank waits for copies for ever": (
        "if rank == 0 and now >= its.deadline:",
        "if False:",
    ),
    "nobody is told that a rank could not copy": (
        "actions += [FailCopies(save, error, its.begun.timeout), TellCopies(save, error)]",
        "actions += [TellCopies(save, error)]",
    ),
    "a rank that is gone is waited for": (
        "                self._gone.setdefault(rank, error)\n                self._lose(rank, actions)",
        "                pass",
    ),
    "the others do not wait for what the first rank says": (
        "            actions.append(AwaitCopies(number))",
        "            pass",
    ),
    "nobody is told of the copies": (
        "        if its.missing is not None:\n            actions.append(TellCopies(save, error))",
        "        pass",
    ),
    "the trainer is told twice": (
        "        if its.missing is not None:\n            actions.append(TellCopies(save, error))",
        "        actions.append(TellCopies(save, error))",
    ),
    "the trainer waits for the first rank for ever": (
        "            elif rank > 0 and now >= its.deadline + grace(seconds):",
        "            elif False:",
    ),
    "a rank that has waited for long takes its copies for worthless": (
        "return min(self._saves, default=self._newest + 1) - 1",
        "return min((n for n, its in self._saves.items() if its.missing is not None), default=self._newest + 1) - 1",
    ),
    "what a dead worker has reported counts": (
        "            if self._begins.get(rank, 0) > save:",
        "            if self._begins.get(rank, 0) > save and rank not in its.reports:",
    ),
    "a rank waits for what a dead first rank would have said": (
        "                self._fail_here(save, error, actions)\n                self._end(save, error, actions)",
        "                pass",
    ),
    "the first rank waits for a rank that has lost it": (
        "                self._fail_here(save, error, actions)\n                self._end(save, error, actions)",
        "                self._end(save, error, actions)",
    ),
    "the copies of a replicated save are not protected": (
        "            actions.append(ProtectCopies(save))",
        "            pass",
    ),
    "all copies are protected": (
        "        if error is None:\n            actions.append(ProtectCopies(save))",
        "        actions.append(ProtectCopies(save))",
    ),
    "nobody hears of a save that the first rank has not made": (
        "                actions.append(ConcludeCopies(unmade, RankFailedError(_UNMADE, rank=0)))",
        "                pass",
    ),
    "a permission is given twice": (
        "                self._wanted.discard(source)\n",
        "",
    ),
}
"""The same for ``asyncckpt/protocol/replication.py``."""


def mutated_life(what: str) -> ModuleType:
    """Return the machine of a worker's life with one of ``LIFE``."""
    old, new = LIFE[what]
    source = inspect.getsource(worker_life)
    if source.count(old) != 1:
        raise ValueError(f"{old!r} is there {source.count(old)} times")
    copied = ModuleType(worker_life.__name__)
    with mock.patch.dict(sys.modules, {copied.__name__: copied}):  # dataclasses look there
        exec(compile(source.replace(old, new), copied.__name__, "exec"), copied.__dict__)
    return copied


def mutated(module: ModuleType, old: str, new: str) -> Machines:
    """Return the machines with the text ``new`` in the place of ``old`` in the source of one module."""
    if inspect.getsource(module).count(old) < 1:
        raise ValueError(f"there is no {old!r} in {module.__name__} any more")
    copies: dict[str, ModuleType] = {}
    with mock.patch.dict(sys.modules):
        for each in (commit, replication, saves, trainer):  # in the order of their imports
            source = inspect.getsource(each).replace(*((old, new) if each is module else ("", "")), 1)
            copies[each.__name__] = sys.modules[each.__name__] = ModuleType(each.__name__)
            exec(compile(source, each.__name__, "exec"), copies[each.__name__].__dict__)
    return Machines(*(copies[each.__name__] for each in (saves, commit, replication)), trainer=copies[trainer.__name__])
