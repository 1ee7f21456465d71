"""Run a small training in the surroundings of a test, and check the folder that the training leaves."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from asyncckpt import errors
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.storage import OpenAttempt
from support import surrounded_training
from support.abilities import need_command
from support.checkpoints import complete_steps, step_folder, verify
from support.states import stock_load
from support.surrounded_training import Plan, Report, same, state

Trial = dict[str, Any]
"""Fields of the plan of one training."""
LIMIT_S = 60.0
"""Time after which a training counts as hanging."""


@dataclass
class Trainings:
    """One or more trainings, one after the other, in a session of their own."""

    plans: Sequence[Plan]
    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls,
        root: Path,
        *before: str,
        trials: Sequence[Trial] = ({},),
        environment: Mapping[str, str | None] | None = None,
        in_child: Callable[[], object] | None = None,
        **plan: Any,
    ) -> Trainings:
        """Start the trainings.

        Args:
            root: Folder of the checkpoints. The folder above receives the reports, and has to be writable.
            before: A command that runs the trainings' command, such as ``unshare``.
            trials: For each training, fields of its ``Plan``. With a ``name`` its root is that folder in ``root``.
            environment: Changes of the environment; None removes a variable.
            in_child: The new process calls this first.
            plan: Fields of all plans.
        """
        plans = []
        for number, trial in enumerate(trials):
            fields = {**plan, **trial}
            its = root / fields.pop("name", "")
            report = root.with_name(f"{root.name}-{time.monotonic_ns()}-{number}.json")
            plans.append(Plan(root=str(its), report=str(report), **fields))
        found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        changed = {**os.environ, **found, **(environment or {})}
        process = subprocess.Popen(
            [*before, sys.executable, surrounded_training.__file__, *(json.dumps(asdict(each)) for each in plans)],
            env={name: value for name, value in changed.items() if value is not None},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=in_child,
        )
        return cls(plans, process)

    def end(self) -> list[Report]:
        """Wait for the end, and return the reports. A hang and an error that is not ours fail the test."""
        try:
            _, said = self.process.communicate(timeout=LIMIT_S)
        finally:
            self.kill()
        assert self.process.returncode == 0, said[-4000:]
        reports = [Report(**json.loads(Path(plan.report).read_text())) for plan in self.plans]
        for report in reports:
            assert not report.foreign, report.foreign
            kinds = [getattr(errors, error.partition(":")[0]) for error in report.errors]
            assert all(issubclass(kind, errors.CheckpointError) for kind in kinds)
        return reports

    def kill(self) -> None:
        """Kill the trainings, and the command before them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def held(self) -> Path:
        """Wait until the first training is held. Return the file that holds it."""
        hold, deadline = Path(self.plans[0].hold), time.monotonic() + LIMIT_S
        while not hold.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, "the training did not come this far"
            time.sleep(0.02)
        return hold


def nameless(root: Path) -> tuple[str, ...]:
    """Return a command that runs another as a user without a name and without processes. Skips the test if it fails.

    The user may read all files, because Python may be installed in a home. The folder above ``root`` is opened to it.
    """
    user = 50_000 + time.monotonic_ns() % 10_000_000
    of_user = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    command = (*of_user, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    need_command(*command, sys.executable, "-c", "")
    root.parent.chmod(0o777)
    return command


def mounted(root: Path, *commands: str) -> tuple[str, ...]:
    """Return a command that runs another after these, in a mount namespace. Skips the test if one of them fails.

    The folder above ``root`` is a mount of its own there.
    """
    above = shlex.quote(str(root.parent))
    done = " && ".join((f"mount --bind {above} {above}", *commands))
    command = ("unshare", "--mount", "sh", "-c", f'{{ {done}; }} && exec "$0" "$@"')
    need_command(*command, "true")
    return command


def open_attempts(root: Path, at: float) -> list[OpenAttempt]:
    """Begin a checkpoint and a file in the folder, as a worker does. Date both: ``at`` seconds since the epoch."""
    storage = LocalStorage()
    folder = storage.begin_checkpoint(str(root / "step-00000009"), "aaaaaaaaaaaa-9", 0)
    file = storage.begin_file(str(root / "a.pt"), "aaaaaaaaaaaa-1", 0, math.inf)
    for attempt, name in ((folder, "__0_0.distcp"), (file, "a.pt")):
        with contextlib.closing(attempt.create(name, large=False)) as created:
            created.write(memoryview(b"bytes"), 0)
            created.sync()
    for path in (Path(folder.path) / "__0_0.distcp", Path(folder.path), Path(file.path)):
        os.utime(path, (at, at))
    return [folder, file]


def judge(root: Path, steps: Sequence[int]) -> None:
    """Raise unless the folder has just these steps, each to the bit by stock DCP, and no other names."""
    names = {path.name for path in root.iterdir()} if root.exists() else set()
    assert names - {"asyncckpt.lock"} == {Path(step_folder(str(root), step)).name for step in steps}
    assert not steps or complete_steps(str(root)) == [*steps]
    for step in steps:
        assert not verify(step_folder(str(root), step)).damages
        _judge_one(step_folder(str(root), step), step)


def _judge_one(path: str, step: int) -> None:
    into = {"w": torch.zeros(1 << 18, dtype=torch.int32), "bias": torch.zeros(3), "step": -1}
    stock_load(into, path)
    assert same(into, state(step, 1))


def went_well(plan: Plan, report: Report, kept: Sequence[int] | None = None) -> None:
    """Raise unless all saves and loads succeeded. ``kept``: the steps in the folder; None: all saved steps."""
    assert not report.errors and report.saved == plan.steps and report.loaded[-1] == plan.steps[-1], report
    judge(Path(plan.root), plan.steps if kept is None else kept)
    if plan.single:
        _judge_one(f"{plan.root}-dcp", 0)
        assert same(torch.load(f"{plan.root}.pt"), state(0, 1))


def was_refused(plan: Plan, report: Report, text: str, seconds: float = 10.0) -> None:
    """Raise unless each save failed within ``seconds``, by an error with ``text``, and nothing was written."""
    assert not report.saved and report.slowest < seconds, report
    told = [error for error in report.errors if not error.startswith("CheckpointNotFoundError")]  # from the load
    assert told and all(text in error for error in told), report
    judge(Path(plan.root), [])
    assert not Path(f"{plan.root}-dcp").exists() and not Path(f"{plan.root}.pt").exists()


def trained(root: Path, *before: str, **options: Any) -> None:
    """Train once, and judge. Everything has to go well."""
    trainings = Trainings.start(root, *before, **options)
    (report,) = trainings.end()
    went_well(trainings.plans[0], report)


def refused(root: Path, *before: str, text: str, **options: Any) -> None:
    """Train once, and judge. Each save has to fail by an error with ``text``."""
    trainings = Trainings.start(root, *before, **options)
    (report,) = trainings.end()
    was_refused(trainings.plans[0], report, text)
