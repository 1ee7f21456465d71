"""``asyncckpt demo``: the main job on real input.

Trains a small transformer, kills the training process with SIGKILL while a checkpoint is being written, resumes it,
and compares every loss from there on with a run that was not killed: they must be equal bit for bit. Then it shows
what checkpoints cost the training, beside a run with none and one with ``torch.distributed.checkpoint.save``.

Each training is a process of its own, ``python -m asyncckpt.demo --trainer JOB``. It tells what happens by lines of
JSON: ``{"event": "step", ...}``. What it does is in ``demo_model.py``; this file starts, kills and compares.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tabulate import tabulate

from asyncckpt import catalog
from asyncckpt.errors import StorageError
from asyncckpt.worker.steps import complete_steps

Event = dict[str, Any]

_MAX_THREADS = 8
# Of which the first two are not timed.
_MIN_STEPS = 4
# By how much the median steps of the runs may differ before what they are compared for means nothing.
_STEADY = 1.1
_TRAINER_TIMEOUT_S = 900.0
_SETTLE_TIMEOUT_S = 60.0


class DemoError(Exception):
    """The demo cannot go on, for the reason it names."""


class _Run:
    """What is known of a training: its events, so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.killed_while_writing = False

    def all(self, event: str) -> list[Event]:
        return [known for known in self.events if known["event"] == event]

    def losses(self) -> dict[int, float]:
        return {step["step"]: step["loss"] for step in self.all("step")}

    def timed(self) -> list[Event]:
        return [step for step in self.all("step") if step["timed"]]

    def row(self, name: str, every: int, baseline_s: float | None) -> Event:
        """The run's line in the table; ``baseline_s`` is what the same steps took without saves, None for that run."""
        timed, ended = self.timed(), self.all("ended")[0]
        wall_s = sum(step["wall_s"] for step in timed)
        waits = [step["waited_s"] for step in timed if baseline_s is not None and step["step"] % every == 0]
        return {
            "run": name,
            "train_s": wall_s,
            "median_step_s": statistics.median(step["step_s"] for step in timed),
            "saves": len(waits),
            "lost_per_save_s": None if baseline_s is None or not waits else (wall_s - baseline_s) / len(waits),
            "median_wait_s": statistics.median(waits) if waits else None,
            "prepare_s": ended["prepare_s"],
        }


class _Demo:
    """All trainings of a demo have what it was called with in common."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.args = args
        self.folder = folder
        self.out = sys.stderr if args.json else sys.stdout
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self.job = {"size": args.size, "steps": args.steps, "every": args.every, "threads": threads, "resume": False}

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def start(self, *, folder: str, saves: str, resume: bool = False, kill_at: int | None = None) -> _Run:
        """Have a process train to the end, or kill it when the save of step ``kill_at`` is staged.

        Raises ``DemoError`` if it fails. The process is gone when this returns, whichever way.
        """
        run = _Run()
        root = os.path.join(self.folder, folder)
        job: dict[str, Any] = {**self.job, "folder": root, "saves": saves, "resume": resume}
        # What CUDA wants for matrix products to come out the same each time.
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncckpt.demo", "--trainer", json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the demo, which then ends it
        )
        watchdog = threading.Timer(_TRAINER_TIMEOUT_S, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            for line in process.stdout or ():
                run.events.append(event := json.loads(line))
                self._show(run, event)
                if event["event"] == "staged" and event["step"] == kill_at:
                    process.kill()
                    run.killed_while_writing = kill_at not in complete_steps(root)
                    return run
            if process.wait() != 0 or not run.all("ended"):
                raise DemoError(f"the trainer of the run {folder!r} ended with status {process.returncode}")
            return run
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _show(self, run: _Run, event: Event) -> None:
        if event["event"] == "durable":
            speed = run.all("started")[0]["state_bytes"] / event["write_s"] / 1e9
            self.say(
                f"  step {event['step']:>4}  loss {event['loss']:.4f}  trainer waited {event['stall_s'] * 1e3:6.1f} ms"
                f"  durable after {event['durable_s']:.2f} s  written at {speed:.2f} GB/s"
            )
        elif event["event"] == "resumed":
            what = f"from {event['source']}, loaded and checked in {event['load_s']:.2f} s"
            self.say(f"  resumed at step {event['step']} {what}")

    def run(self) -> int:
        """The whole of it. Returns the exit status."""
        every = self.args.every
        kill_at = max(1, self.args.steps // every // 2) * every
        root = os.path.join(self.folder, "killed")
        self.say(f"1. Training, {self.args.steps} steps, a save every {every}, in {root}")
        killed = self.start(folder="killed", saves="asyncckpt", kill_at=kill_at)
        while_writing = killed.killed_while_writing
        about = "while its worker was still writing it" if while_writing else "and already written"
        pid = killed.all("staged")[-1]["pid"]
        self.say(f"  killed the trainer (SIGKILL, process {pid}) when step {kill_at} was staged, {about}")
        self.say("2. A new trainer resumes from the newest checkpoint")
        resumed = self.start(folder="killed", saves="asyncckpt", resume=True)
        self.say("3. The same training, not killed")
        whole = self.start(folder="whole", saves="asyncckpt")
        self.say("4. The same without checkpoints")
        none = self.start(folder="none", saves="none")
        self.say("5. The same with torch.distributed.checkpoint.save")
        dcp = self.start(folder="dcp", saves="dcp")
        shutil.rmtree(os.path.join(self.folder, "none"), ignore_errors=True)  # empty

        runs = {"killed": killed, "resumed": resumed, "without checkpoints": none, "dcp.save": dcp}
        compared = {name: _differences(whole.losses(), run.losses()) for name, run in runs.items()}
        different = {name: steps for name, steps in compared.items() if steps}
        resumed_from = resumed.all("resumed")[0]["step"]
        steps_compared = len(resumed.losses())
        baseline = none.row("no checkpoints", every, None)
        rows = [
            baseline,
            whole.row("asyncckpt", every, baseline["train_s"]),
            dcp.row("torch.distributed.checkpoint.save", every, baseline["train_s"]),
        ]
        good = not different and steps_compared == self.args.steps - resumed_from and steps_compared > 0
        if good:
            last = max(resumed.losses())
            self.say(
                f"\nThe losses of the {steps_compared} steps after the resume at step {resumed_from} are, bit for bit,"
                f" those of the run that was not killed; the last is {resumed.losses()[last]!r}."
            )
        for name, steps in different.items():
            self.say(f"\nTHE LOSSES DIFFER: {name}, from step {steps[0]} on, {len(steps)} steps.")
        if self.args.json:
            summary = {
                "ok": good,
                **{name: self.args.__dict__[name] for name in ("steps", "every", "size")},
                **{name: value for name, value in whole.all("started")[0].items() if name != "event"},
                "killed_at": kill_at,
                "killed_while_writing": while_writing,
                "resumed_from": resumed_from,
                "steps_compared": steps_compared,
                "losses_equal": not different,
                "different": different,
                "losses": list(whole.losses().values()),
                "steady": _steady(rows),
                "table": rows,
            }
            print(json.dumps(summary, indent=1))
        else:
            self._print_table(rows, whole)
        return 0 if good else 1

    def _print_table(self, rows: list[Event], whole: _Run) -> None:
        def milliseconds(seconds: float | None) -> str:
            return "" if seconds is None else f"{seconds * 1e3:.1f}"

        started = whole.all("started")[0]
        self.say(
            f"\nWhat checkpoints cost: {started['parameters'] / 1e6:.1f} million parameters,"
            f" {started['state_bytes'] / 1e6:.0f} MB a checkpoint,"
            f" {len(whole.timed())} timed steps on {started['device']}"
        )
        shown = [
            (
                row["run"],
                f"{row['train_s']:.2f}",
                milliseconds(row["median_step_s"]),
                row["saves"] or "",
                milliseconds(row["lost_per_save_s"]),
                milliseconds(row["median_wait_s"]),
                milliseconds(row["prepare_s"] or None) if row["run"] == "asyncckpt" else "",
            )
            for row in rows
        ]
        headers = ["run", "train s", "step ms", "saves", "lost ms/save", "save call ms", "prepare ms"]
        self.say(tabulate(shown, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 6)))
        self.say(
            "lost: what training took longer than without checkpoints, by save; step and save call: medians;"
            " prepare: once, before the first step"
        )
        if not _steady(rows):
            self.say(
                "THE MACHINE WAS NOT STEADY: the runs' own steps took unlike times, so what is lost cannot be told"
                " from this run; the save calls can. Try again when nothing else runs here."
            )


def _steady(rows: list[Event]) -> bool:
    """Whether the steps themselves, without saves, took about the same time in all runs."""
    medians: list[float] = [row["median_step_s"] for row in rows]
    return max(medians) <= _STEADY * min(medians)


def _differences(expected: dict[int, float], got: dict[int, float]) -> list[int]:
    """The steps whose loss is not exactly as expected."""
    return [step for step, loss in got.items() if expected.get(step) != loss]


@contextlib.contextmanager
def _place(folder: str | None) -> Iterator[str]:
    """``folder``, which stays; or a temporary one, removed when the last worker is done with it."""
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
        if any(Path(folder).iterdir()):
            raise DemoError(f"the folder is not empty, and the demo wants a fresh one: {folder}")
        yield os.path.abspath(folder)
        return
    with tempfile.TemporaryDirectory(prefix="asyncckpt-demo-", ignore_cleanup_errors=True) as temporary:
        try:
            yield temporary
        finally:
            for root in Path(temporary).iterdir():
                with contextlib.suppress(StorageError):
                    catalog.settle(str(root), _SETTLE_TIMEOUT_S)


def _tell(event: str, /, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def _interrupted(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns 0, 1 if losses differ or a trainer fails, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="asyncckpt demo",
        description="Train a small transformer, kill it, resume it, and show what its checkpoints cost.",
        epilog="example: asyncckpt demo --steps 100 --folder /scratch/demo",
    )
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: 50)")
    parser.add_argument("--every", type=int, default=6, help="steps from save to save (default: 6)")
    parser.add_argument("--size", choices=["small", "default"], default="default", help="of the model")
    parser.add_argument("--folder", help="where to keep the checkpoints (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON; progress goes to stderr")
    parser.add_argument("--trainer", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.trainer is not None:
        from asyncckpt.demo_model import run_trainer  # which imports torch

        run_trainer(args.trainer, _tell)
        return 0
    if args.every < 1 or args.steps < max(args.every + 1, _MIN_STEPS):
        parser.error(f"--every is 1 or more, --steps more than that and {_MIN_STEPS} or more")
    # So that a SIGTERM, too, ends the trainer and removes the folder.
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        with _place(args.folder) as folder:
            return _Demo(args, folder).run()
    except DemoError as error:
        print(f"asyncckpt demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
