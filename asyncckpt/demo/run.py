"""``asyncckpt demo``: starts trainings, kills one, resumes it, compares them, and shows what checkpoints cost.

A small transformer is trained, and the training process is killed with SIGKILL while a checkpoint is being written. A
new process resumes it, and every loss from there on is compared with a run that was not killed: they must be equal bit
for bit. What checkpoints cost the training is shown beside a run with none and one with
``torch.distributed.checkpoint.save``. Each training is a process of its own, ``python -m asyncckpt.demo.trainer JOB``.
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
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from asyncckpt.errors import StorageError
from asyncckpt.loading.source import wait_for_attempts

_MAX_THREADS = 8
# The first steps, which take longer in any run, and are not timed.
_WARM_UP = 2
# By how much the median steps of the runs may differ before what they are compared for means nothing.
_STEADY = 1.1
_TRAINER_TIMEOUT_S = 900.0
_SETTLE_TIMEOUT_S = 60.0


def _demonstrate(args: argparse.Namespace, root: str) -> dict[str, Any]:
    """Do all of it in the folder ``root``, and say how it goes. Returns the summary."""
    kill_at = max(1, args.steps // args.every // 2) * args.every
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    job = {"size": args.size, "steps": args.steps, "every": args.every, "threads": threads, "warm_up": _WARM_UP}
    job |= {"saves": "asyncckpt", "folder": os.path.join(root, "killed"), "resume": False, "kill_at": None}
    print(f"1. Training, {args.steps} steps, a save every {args.every}, in {root}/killed", flush=True)
    killed = _train({**job, "kill_at": kill_at})
    about = "while its worker was still writing it" if killed["is_writing"] else "and already written"
    print(f"  killed the trainer (SIGKILL) when step {kill_at} was staged, {about}", flush=True)
    print("2. A new trainer resumes from the newest checkpoint", flush=True)
    resumed = _train({**job, "resume": True})
    print("3. The same training, not killed", flush=True)
    whole = _train({**job, "folder": os.path.join(root, "whole")})
    print("4. The same without checkpoints", flush=True)
    none = _train({**job, "saves": "none", "folder": os.path.join(root, "none")})
    print("5. The same with torch.distributed.checkpoint.save", flush=True)
    dcp = _train({**job, "saves": "dcp", "folder": os.path.join(root, "dcp")})

    different = {}
    for name, run in {"killed": killed, "resumed": resumed, "without checkpoints": none, "dcp.save": dcp}.items():
        if steps := [step for step, loss in run["losses"].items() if whole["losses"].get(step) != loss]:
            different[name] = steps
    runs = {"no checkpoints": none, "asyncckpt": whole, "torch.distributed.checkpoint.save": dcp}
    medians = [statistics.median(run["steps_s"]) for run in runs.values()]
    compared = len(resumed["losses"])
    return {
        "ok": not different and compared > 0,
        **{name: vars(args)[name] for name in ("steps", "every", "size")},
        **{name: whole[name] for name in ("parameters", "state_bytes", "device")},
        "killed_at": kill_at,
        "killed_while_writing": killed["is_writing"],
        "resumed_from": args.steps - compared,
        "steps_compared": compared,
        "losses_equal": not different,
        "different": different,
        "losses": list(whole["losses"].values()),
        "steady": max(medians) <= _STEADY * min(medians),
        "table": [_row(name, run, none) for name, run in runs.items()],
    }


def _train(job: dict[str, Any]) -> dict[str, Any]:
    """Have a process train as ``job`` says. Returns what it measured; exits if it fails."""
    # Ctrl-C is for the demo, which then ends the trainer; what that shows goes where ours does.
    done = subprocess.run(
        [sys.executable, "-m", "asyncckpt.demo.trainer", json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=sys.stdout,
        start_new_session=True,
        timeout=_TRAINER_TIMEOUT_S,
    )
    if done.returncode != (0 if job["kill_at"] is None else -signal.SIGKILL):
        sys.exit(f"asyncckpt demo: the trainer of {job['folder']} ended with status {done.returncode}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _row(name: str, run: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """The line of ``run`` in the table; ``baseline`` is the run without saves."""
    steps, waits = run["steps_s"], run["waits_s"]
    lost_s = sum(steps) + sum(waits) - sum(baseline["steps_s"])
    return {
        "run": name,
        "train_s": sum(steps) + sum(waits),
        "step_ms": statistics.median(steps) * 1e3,
        "saves": len(waits),
        "lost_ms_per_save": lost_s / len(waits) * 1e3 if waits else None,
        "save_call_ms": statistics.median(waits) * 1e3 if waits else None,
        "prepare_ms": run["prepare_s"] * 1e3 if waits else None,
    }


def _print(summary: dict[str, Any]) -> None:
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
        f" {summary['state_bytes'] / 1e6:.0f} MB a checkpoint, {summary['steps'] - _WARM_UP} timed steps on"
        f" {summary['device']}"
    )
    headers = ["run", "train s", "step ms", "saves", "lost ms/save", "save call ms", "prepare ms"]
    rows = [list(row.values()) for row in summary["table"]]
    print(tabulate(rows, headers=headers, floatfmt=("", ".2f", ".1f", "", ".1f", ".1f", ".1f")))
    print(
        "lost: what training took longer than without checkpoints, by save; step and save call: medians;"
        " prepare: once, before the first step"
    )
    if not summary["steady"]:
        print(
            "THE MACHINE WAS NOT STEADY: the runs' own steps took unlike times, so what is lost cannot be told from"
            " this run; the save calls can. Try again when nothing else runs here."
        )


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
    if args.every < 1 or args.steps < max(args.every + 1, _WARM_UP + 2):
        parser.error(f"--every is 1 or more, --steps more than that and {_WARM_UP + 2} or more")
    folder = os.path.abspath(args.folder or tempfile.mkdtemp(prefix="asyncckpt-demo-"))
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        sys.exit(f"asyncckpt demo: the folder is not empty, and the demo wants a fresh one: {folder}")
    # So that a SIGTERM, too, ends the trainer and removes the folder.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
            summary = _demonstrate(args, folder)
            _print(summary)
        if args.json:
            print(json.dumps(summary, indent=1))
        return 0 if summary["ok"] else 1
    except KeyboardInterrupt:
        return 130
    finally:
        if args.folder is None:
            for run in os.listdir(folder):  # the last worker may still write
                with contextlib.suppress(StorageError):
                    wait_for_attempts(os.path.join(folder, run), _SETTLE_TIMEOUT_S)
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
