"""Runs of a training that is killed and resumed until its end, compared with an uninterrupted run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torture.frameworks import checks
from torture.frameworks.kind import EVERY, STEPS, Kind
from torture.frameworks.ranks import Ranks, in_child
from torture.tally import LIMIT_S

# A limit for operations that take seconds on an idle machine. A busy machine takes longer.
_LIMIT_S = 180.0
# Seconds that a launcher leaves the other ranks after one has failed.
_GRACE_S = 3.0

_HOWS = {"a rank": 0.4, "all ranks": 0.25, "all ranks and workers": 0.2, "a worker": 0.15}


class Runs:
    """Runs of one kind of training."""

    def __init__(self, kind: Kind, folder: Path, choice: random.Random, say: Callable[[tuple[Any, ...]], None]) -> None:
        """Train once without interruption, by the framework alone.

        Args:
            kind: The kind of training.
            folder: The folder for all files.
            choice: Makes all random choices.
            say: Receives ("counted", what, how often) and ("lost", what).
        """
        self.kind, self.folder, self.choice, self.say = kind, folder, choice, say
        run = folder / "unbroken"
        (run / "scratch").mkdir(parents=True)
        begun = time.monotonic()
        ranks = Ranks(kind, run, 0, None)
        if not ranks.wait_for_step(0, 1, _LIMIT_S):
            raise RuntimeError(f"the unbroken training does not begin: {_tail(run)}")
        self.start_s = time.monotonic() - begun
        """Seconds until the first step."""
        if not ranks.wait(_LIMIT_S, 0) or any(process.exitcode for process in ranks.processes):
            raise RuntimeError(f"the unbroken training fails: {_tail(run)}")
        self.step_s = (time.monotonic() - begun - self.start_s) / STEPS
        self.losses = [{each["step"]: each["loss"] for each in said if "step" in each} for said in ranks.said()]
        self.ends = [[each["end"] for each in said if "end" in each] for said in ranks.said()]
        found: checks.Findings = in_child(checks.read_all, kind, run / "training", False, {})
        if found.losses or sorted(found.digests) != list(range(EVERY, STEPS + 1, EVERY)):
            raise RuntimeError(f"the unbroken training has saved {sorted(found.digests)}: {found.losses}")
        self.digests = found.digests
        shutil.rmtree(run)

    def one(self, number: int, kills: int) -> int:
        """Train to the end, with up to ``kills`` kills. Return the number of kills."""
        return Run(self, self.folder / f"run-{number}").train(kills)


class Run:
    """One training, from its first start to its end."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        self._runs, self._kind, self._choice = runs, runs.kind, runs.choice
        self._folder, self._training = folder, folder / "training"
        self._staged = self._newest = 0
        self._trouble = False
        self._last_ranks: list[list[dict[str, Any]]] = []
        """The logs of the last rank."""
        self._how: list[str] = []
        """The events so far."""
        (folder / "scratch").mkdir(parents=True)

    def train(self, kills: int) -> int:
        """Train to the end. Return the number of kills."""
        # Some kills hit the start. Few come before there can be a checkpoint.
        steps, weights = range(STEPS - 1), [2, *[1] * EVERY, *[3] * (STEPS - 2 - EVERY)]
        targets = sorted(self._choice.choices(steps, weights, k=kills))
        killed = 0
        for attempt, target in enumerate(targets):
            ranks = self._start(attempt)
            was_killed = self._kill(ranks, target)
            killed += was_killed
            self._check_said(ranks)
            if not was_killed:
                self._count("ended before it was killed")
                break
            if self._choice.random() < 0.7:  # otherwise restart at once
                self._check_folder(waits=self._choice.random() < 0.5)
        self._finish(len(targets))
        self._count("runs")
        if not self._trouble:
            shutil.rmtree(self._folder)
        return killed

    def _start(self, attempt: int) -> Ranks:
        options = self._choice.choice(self._kind.options)  # users may change options between starts
        self._how.append(f"started with {dict(options)}")
        return Ranks(self._kind, self._folder, attempt, options)

    def _kill(self, ranks: Ranks, target: int) -> bool:
        """Kill around the ``target`` step; 0: during the start. Return whether the training was still running."""
        choice, runs = self._choice, self._runs
        victim = choice.randrange(self._kind.world_size)
        how = choice.choices(list(_HOWS), list(_HOWS.values()))[0]
        if target == 0:
            time.sleep(choice.uniform(0, runs.start_s))
        elif not ranks.wait_for_step(victim, target, _LIMIT_S):
            self._lose(f"the training did not come to step {target} within {_LIMIT_S:g} s")
        if choice.random() < 0.5:
            time.sleep(choice.uniform(0, 2 * runs.step_s))
        else:
            self._wait_for_save(ranks)
            time.sleep(10 ** choice.uniform(-3.5, -1.0))
        if ranks.ended():
            ranks.wait(_LIMIT_S, _GRACE_S)
            if any(process.exitcode for process in ranks.processes):
                self._lose("the training failed by itself")
            return False
        self._how.append(f"kill of {how} from step {target} on")
        self._count("kills while a save was written", self._is_writing())
        if how == "a worker":
            return self._kill_worker(ranks, victim)
        if how == "a rank":
            ranks.kill([victim])
            time.sleep(choice.uniform(0, 0.5))  # a launcher needs time to kill the others
        ranks.kill_all("workers" in how, choice)
        self._count(f"kills of {how}")
        said = [[each["step"] for each in of_rank if "step" in each] for of_rank in ranks.said()]
        if "workers" not in how and all(said):
            # Saves up to two steps back are staged, even if a save returns before it is staged.
            self._staged = max(self._staged, (min(max(steps) for steps in said) - 2) // EVERY * EVERY)
        return True

    def _wait_for_save(self, ranks: Ranks) -> None:
        """Wait until a save is being written, at most as long as a training may take to reach a save."""
        deadline = time.monotonic() + self._runs.start_s + 2 * EVERY * self._runs.step_s
        while not self._is_writing() and not ranks.ended() and time.monotonic() < deadline:
            time.sleep(0.002)

    def _is_writing(self) -> bool:
        return any(any(root.glob(".*.partial")) for root in self._kind.roots(self._training))

    def _kill_worker(self, ranks: Ranks, victim: int) -> bool:
        workers = ranks.workers(victim)
        if not workers:
            ranks.kill_all(False, self._choice)
            self._count("kills of all ranks")
            return True
        os.kill(workers[0], signal.SIGKILL)
        if not ranks.wait(_LIMIT_S, _GRACE_S):
            self._lose("the training hung after its worker was killed")
        self._count("kills of a worker")
        # The other ranks may end with the framework's error for a lost rank.
        errors = [each["error"] for said in ranks.said() for each in said if "error" in each]
        ours = [error[0] for error in errors if "CheckpointError" in error]
        if ours:
            self._count(f"trainings that ended with {ours[0]}")
        elif any(process.exitcode for process in ranks.processes):
            self._lose(f"the training failed with {errors} when its worker was killed")
        return True

    def _finish(self, attempt: int) -> None:
        """Train to the end, and check all results."""
        in_child(checks.settle, self._kind, self._training)
        self._check_folder(waits=True)
        ranks = self._start(attempt)
        if not ranks.wait(_LIMIT_S, _GRACE_S) or any(process.exitcode for process in ranks.processes):
            self._lose("the training did not come to its end")
        self._check_said(ranks)
        said = ranks.said()
        self._newest = STEPS
        self._check_folder(waits=False)
        if any("step" in each for of_rank in said for each in of_rank):
            self._check_end(ranks)
        else:
            self._count("last trainings that had nothing to do")
        for loss in in_child(self._kind.history, self._last_ranks):
            self._lose(loss)
        from_memory = (self._folder / "output").read_text().count("from memory\n") // self._kind.world_size
        self._count("resumes from memory", from_memory)
        scratch = list((self._folder / "scratch").glob("asyncckpt-*"))  # frameworks leave other files
        self._count("scratch folders of killed ranks in $TMPDIR", len(scratch))

    def _check_end(self, ranks: Ranks) -> None:
        """Check the final state, and that neither workers nor files of killed saves are left."""
        if [[each["end"] for each in said if "end" in each] for said in ranks.said()] != self._runs.ends:
            self._lose("the training has ended with other values")
        for root in self._kind.roots(self._training):
            for path in root.glob(".*"):
                self._lose(f"left over: {path}")
        deadline = time.monotonic() + LIMIT_S
        while (left := ranks.workers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for worker in left:
            self._lose(f"left over: the worker {worker}")

    def _check_said(self, ranks: Ranks) -> None:
        """Check that all losses match the uninterrupted run, and that the resume used a recent enough checkpoint."""
        firsts = set()
        self._last_ranks.append(ranks.said()[-1])
        for rank, said in enumerate(ranks.said()):
            losses = [(each["step"], each["loss"]) for each in said if "step" in each]
            self._count("losses compared", len(losses))
            wrong = [step for step, loss in losses if self._runs.losses[rank].get(step) != loss]
            if wrong:
                self._lose(f"rank {rank} has other losses in the steps {wrong}")
            if losses:
                firsts.add(losses[0][0])
                if [step for step, _ in losses] != list(range(losses[0][0], losses[-1][0] + 1)):
                    self._lose(f"rank {rank} has left out steps: {losses}")
        if len(firsts) > 1:
            self._lose(f"the ranks began with the steps {firsts}")
        if firsts:
            first = min(firsts)
            self._count("resumes" if first > 1 else "starts from nothing")
            if first <= self._newest:
                self._lose(f"it went on with step {first}, and there was a checkpoint of step {self._newest}")

    def _check_folder(self, *, waits: bool) -> None:
        if not self._training.exists():
            return
        if waits:
            for loss in in_child(checks.wait_for_step, self._kind, self._training, self._staged):
                self._lose(loss)
        found = in_child(checks.read_all, self._kind, self._training, True, self._runs.digests)
        self._count("checkpoints read", found.read)
        for loss in found.losses:
            self._lose(loss)
        if found.newest < self._newest:
            self._lose(f"it could go on from step {self._newest}, and then only from {found.newest}")
        self._newest = found.newest

    def _count(self, what: str, times: int = 1) -> None:
        self._runs.say(("counted", what, int(times)))

    def _lose(self, what: str) -> None:
        about = f"{self._folder.name}, {', '.join(self._how)}"
        said = "" if self._trouble else f"\n{_tail(self._folder)}"  # print the output only once
        self._trouble = True
        self._runs.say(("lost", f"{about}: {what}{said}"))


def _tail(run: Path) -> str:
    output = run / "output"
    return output.read_text()[-1500:] if output.exists() else ""
