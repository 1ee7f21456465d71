"""``asyncckpt demo``: starts trainings, kills one, resumes it, compares them, and shows what checkpoints cost.

A small transformer is trained, and the training process is killed with SIGKILL while a checkpoint is being written. A
new process resumes it, and every loss from there on is compared with a run that was not killed: they must be equal bit
for bit. What checkpoints cost the training is shown beside a run with none and one with
``torch.distributed.checkpoint.save``.

Each training is a process of its own, ``python -m asyncckpt.demo.trainer JOB``, which reports what happens in lines of
JSON: ``{"event": "step", ...}``.
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
from typing import Any

from tabulate import tabulate

from asyncckpt.errors import StorageError
from asyncckpt.loading.source import wait_for_attempts
from asyncckpt.worker.storage import complete_steps

Event = dict[str, Any]

_MAX_THREADS = 8
# Steps of a trainer before the clock starts: the first ones take longer in any run.
WARM_UP = 2
# By how much the median steps of the runs may differ before what they are compared for means nothing.
_STEADY = 1.1
_TRAINER_TIMEOUT_S = 900.0
_SETTLE_TIMEOUT_S = 60.0


class _Run:
    """A training, by the events it has reported so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def all(self, event: str) -> list[Event]:
        return [known for known in self.events if known["event"] == event]

    def losses(self) -> dict[int, float]:
        return {step["step"]: step["loss"] for step in self.all("step")}

    def row(self, name: str, every: int, baseline_s: float | None) -> Event:
        """The run's line in the table; ``baseline_s`` is what the same steps took without saves, None for that run."""
        timed = [step for step in self.all("step") if step["timed"]]
        wall_s = sum(step["wall_s"] for step in timed)
        waits = [step["waited_s"] for step in timed if baseline_s is not None and step["step"] % every == 0]
        return {
            "run": name,
            "train_s": wall_s,
            "median_step_s": statistics.median(step["step_s"] for step in timed),
            "saves": len(waits),
            "lost_per_save_s": None if baseline_s is None or not waits else (wall_s - baseline_s) / len(waits),
            "median_wait_s": statistics.median(waits) if waits else None,
            "prepare_s": self.all("ended")[0]["prepare_s"],
        }


def _demonstrate(args: argparse.Namespace, root: str) -> Event:
    """Do all of it in the folder ``root``, and say how it goes. Returns the summary."""
    every = args.every
    kill_at = max(1, args.steps // every // 2) * every
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    job = {"size": args.size, "steps": args.steps, "every": every, "threads": threads, "warm_up": WARM_UP}
    job |= {"root": root, "resume": False}
    print(f"1. Training, {args.steps} steps, a save every {every}, in {root}/killed", flush=True)
    killed = _train({**job, "folder": "killed", "saves": "asyncckpt"}, kill_at)
    print("2. A new trainer resumes from the newest checkpoint", flush=True)
    resumed = _train({**job, "folder": "killed", "saves": "asyncckpt", "resume": True})
    print("3. The same training, not killed", flush=True)
    whole = _train({**job, "folder": "whole", "saves": "asyncckpt"})
    print("4. The same without checkpoints", flush=True)
    none = _train({**job, "folder": "none", "saves": "none"})
    print("5. The same with torch.distributed.checkpoint.save", flush=True)
    dcp = _train({**job, "folder": "dcp", "saves": "dcp"})
    shutil.rmtree(os.path.join(root, "none"), ignore_errors=True)  # empty

    runs = {"killed": killed, "resumed": resumed, "without checkpoints": none, "dcp.save": dcp}
    different = {name: steps for name, run in runs.items() if (steps := _differences(whole.losses(), run.losses()))}
    resumed_from, compared = resumed.all("resumed")[0]["step"], len(resumed.losses())
    baseline = none.row("no checkpoints", every, None)
    rows = [
        baseline,
        whole.row("asyncckpt", every, baseline["train_s"]),
        dcp.row("torch.distributed.checkpoint.save", every, baseline["train_s"]),
    ]
    medians = [row["median_step_s"] for row in rows]
    return {
        "ok": not different and compared == args.steps - resumed_from > 0,
        **{name: vars(args)[name] for name in ("steps", "every", "size")},
        **{name: value for name, value in whole.all("started")[0].items() if name != "event"},
        "killed_at": kill_at,
        "killed_while_writing": killed.events[-1]["writing"],
        "resumed_from": resumed_from,
        "steps_compared": compared,
        "losses_equal": not different,
        "different": different,
        "losses": list(whole.losses().values()),
        "steady": max(medians) <= _STEADY * min(medians),
        "table": rows,
    }


def _train(job: Event, kill_at: int | None = None) -> _Run:
    """Have a process train to the end, or kill it when the save of step ``kill_at`` is staged.

    Exits if it fails. The process is gone when this returns, whichever way.
    """
    run = _Run()
    folder = os.path.join(job["root"], job["folder"])
    with _trainer({**job, "folder": folder}) as process:
        for line in process.stdout or ():
            run.events.append(event := json.loads(line))
            if event["event"] == "saved" and event["step"] == kill_at:
                process.kill()
                writing = kill_at not in complete_steps(folder)
                run.events.append({"event": "killed", "writing": writing})
                about = "while its worker was still writing it" if writing else "and already written"
                killed = f"killed the trainer (SIGKILL, process {event['pid']})"
                print(f"  {killed} when step {kill_at} was staged, {about}", flush=True)
                return run
            _show(run, event)
        if process.wait() != 0 or not run.all("ended"):
            sys.exit(f"asyncckpt demo: the trainer of {folder} ended with status {process.returncode}")
    return run


def _show(run: _Run, event: Event) -> None:
    if event["event"] == "durable":
        speed = run.all("started")[0]["state_bytes"] / event["write_s"] / 1e9
        print(
            f"  step {event['step']:>4}  loss {event['loss']:.4f}  trainer waited {event['stall_s'] * 1e3:6.1f} ms"
            f"  durable after {event['durable_s']:.2f} s  written at {speed:.2f} GB/s",
            flush=True,
        )
    elif event["event"] == "resumed":
        what = f"from {event['source']}, loaded and checked in {event['load_s']:.2f} s"
        print(f"  resumed at step {event['step']} {what}", flush=True)


@contextlib.contextmanager
def _trainer(job: Event) -> Iterator[subprocess.Popen[str]]:
    """A training process, which ends with this."""
    with subprocess.Popen(
        [sys.executable, "-m", "asyncckpt.demo.trainer", json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        # What CUDA wants for matrix products to come out the same each time.
        env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ},
        start_new_session=True,  # Ctrl-C is for the demo, which then ends it
    ) as process:
        watchdog = threading.Timer(_TRAINER_TIMEOUT_S, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()


def _differences(expected: dict[int, float], got: dict[int, float]) -> list[int]:
    """The steps whose loss is not exactly as expected."""
    return [step for step, loss in got.items() if expected.get(step) != loss]


def _print(summary: Event) -> None:
    if summary["ok"]:
        print(
            f"\nThe losses of the {summary['steps_compared']} steps after the resume at step"
            f" {summary['resumed_from']} are, bit for bit, those of the run that was not killed; the last is"
            f" {summary['losses'][-1]!r}."
        )
    for name, steps in summary["different"].items():
        print(f"\nTHE LOSSES DIFFER: {name}, from step {steps[0]} on, {len(steps)} steps.")
    print(
        f"\nWhat checkpoints cost: {summary['parameters'] / 1e6:.1f} million parameters,"
        f" {summary['state_bytes'] / 1e6:.0f} MB a checkpoint, {summary['steps'] - WARM_UP} timed steps on"
        f" {summary['device']}"
    )

    def milliseconds(seconds: float | None) -> str:
        return f"{seconds * 1e3:.1f}" if seconds else ""

    shown = [
        (
            row["run"],
            f"{row['train_s']:.2f}",
            milliseconds(row["median_step_s"]),
            row["saves"] or "",
            *(milliseconds(row[name]) for name in ("lost_per_save_s", "median_wait_s", "prepare_s")),
        )
        for row in summary["table"]
    ]
    headers = ["run", "train s", "step ms", "saves", "lost ms/save", "save call ms", "prepare ms"]
    print(tabulate(shown, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 6)))
    print(
        "lost: what training took longer than without checkpoints, by save; step and save call: medians;"
        " prepare: once, before the first step"
    )
    if not summary["steady"]:
        print(
            "THE MACHINE WAS NOT STEADY: the runs' own steps took unlike times, so what is lost cannot be told from"
            " this run; the save calls can. Try again when nothing else runs here."
        )


@contextlib.contextmanager
def _checkpoints(folder: str | None) -> Iterator[str]:
    """``folder``, which stays; or a temporary one, removed when the last worker is done with it."""
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
        if any(Path(folder).iterdir()):
            sys.exit(f"asyncckpt demo: the folder is not empty, and the demo wants a fresh one: {folder}")
        yield os.path.abspath(folder)
        return
    with tempfile.TemporaryDirectory(prefix="asyncckpt-demo-", ignore_cleanup_errors=True) as temporary:
        try:
            yield temporary
        finally:
            for root in Path(temporary).iterdir():
                with contextlib.suppress(StorageError):
                    wait_for_attempts(str(root), _SETTLE_TIMEOUT_S)


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns 0, or 1 if losses differ; exits with 1 if a trainer fails, with 2 after a wrong call."""
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
    args = parser.parse_args(argv)
    if args.every < 1 or args.steps < max(args.every + 1, WARM_UP + 2):
        parser.error(f"--every is 1 or more, --steps more than that and {WARM_UP + 2} or more")
    # So that a SIGTERM, too, ends the trainer and removes the folder.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with _checkpoints(args.folder) as folder:
            with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
                summary = _demonstrate(args, folder)
                _print(summary)
            if args.json:
                print(json.dumps(summary, indent=1))
            return 0 if summary["ok"] else 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
