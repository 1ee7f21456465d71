"""``asyncckpt demo``: kills a training, resumes it, compares it with one that was not killed, and says what saves cost.

A small transformer is trained, and the training process is killed with SIGKILL while a checkpoint is being written. A
new process resumes it. Every loss from there on is compared with a training that was not killed: they must be equal bit
for bit. That training then goes on, and measures what a save costs. All this is done in a given time: on a slow or busy
machine fewer steps are trained, and less is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from asyncckpt.demo.children import Child, PhaseProgress, listen_until
from asyncckpt.demo.costs import OURS, Pair, cost_of, figure_of
from asyncckpt.demo.text import show_costs, show_kill, show_next, show_resume
from asyncckpt.errors import StorageError
from asyncckpt.loading.source import wait_for_attempts

_SETTLE_TIMEOUT_S = 60.0
# Of the time of the demo: what the training that is killed may take. The one beside which the resumed one runs trains
# twice as many steps.
_KILLED_SHARE = 0.12
# Seconds kept back for the end: closing, removing the folder, drawing the picture.
_END_S, _PICTURE_S = 3.0, 5.0


def _demonstrate(args: argparse.Namespace, root: str, deadline: float) -> dict[str, Any]:
    """Do all of it in the folder ``root``, and say how it goes.

    Args:
        args: Of the command.
        root: An empty folder.
        deadline: Of ``time.monotonic``.

    Returns:
        The summary.
    """
    stays = "" if args.folder else ", which is removed at the end (--folder keeps it)"
    print(f"Checkpoints go to {root}{stays}. Importing torch ...", flush=True)
    from asyncckpt.demo import trainer  # here, as the command line is to start without torch

    half = args.steps // args.every // 2 * args.every
    killed_by = time.monotonic() + _KILLED_SHARE * args.seconds
    job = trainer.Job(os.path.join(root, "killed"), args.size, args.every, half, args.pairs, killed_by)
    print("1. A training saves, and is killed (SIGKILL)", flush=True)
    with _children() as children:
        children.append(killed := Child("the first trainer", trainer.train_until_killed, job, is_killed=True))
        training = PhaseProgress("training", "steps")
        listen_until([killed], None, lambda: training.show(len(killed.losses), half))
        killed_at = max(killed.losses)
        show_kill(killed_at, half, killed.said["killed"])
        print("2. A new trainer resumes; beside it the same training runs, and is not killed", flush=True)
        job = trainer.Job(job.folder, args.size, args.every, 2 * killed_at, args.pairs, deadline)
        children.append(resumed := Child("the trainer that resumes", trainer.resume, job))
        job = trainer.Job(os.path.join(root, "whole"), args.size, args.every, 2 * killed_at, args.pairs, deadline)
        dcp_folder = os.path.join(root, "dcp")
        children.append(whole := Child("the trainer", trainer.train_and_measure, job, dcp_folder))
        both = [resumed, whole]
        listen_until(both, "state", lambda: training.show(sum(len(each.losses) for each in both), 3 * killed_at))
        listen_until([resumed], None, lambda: None)
        summary = _resume_summary(killed, resumed, whole)
        show_resume(summary)
        print("3. The training that was not killed goes on, with and without saves in turns", flush=True)
        whole.connection.send("measure")
        measuring = PhaseProgress("measuring", "rounds")
        listen_until([whole], None, lambda: measuring.show(*whole.said.get("round", (0, 1))))
    pairs: dict[str, list[Pair]] = whole.said["pairs"]
    summary["costs"] = {name: _costs(each, has_worker=name == OURS) for name, each in pairs.items()}
    return summary | {name: vars(args)[name] for name in ("size", "every", "pairs")}


@contextlib.contextmanager
def _children() -> Iterator[list[Child]]:
    """A list of processes, of which none runs at the end."""
    children: list[Child] = []
    try:
        yield children
    finally:
        for child in children:
            child.end()


def _resume_summary(killed: Child, resumed: Child, whole: Child) -> dict[str, Any]:
    """What is known when the training that was resumed has ended."""
    different = {}
    for name, child in {"killed": killed, "resumed": resumed}.items():
        if steps := [step for step, loss in child.losses.items() if whole.losses.get(step) != loss]:
            different[name] = steps
    is_same_state = resumed.said["state"] == whole.said["state"]
    return {
        "ok": not different and is_same_state and len(resumed.losses) > 0,
        **{name: killed.said["killed"][name] for name in ("parameters", "state_bytes", "device")},
        "killed_at": max(killed.losses),
        "killed_while_writing": killed.said["killed"]["while_writing"],
        "resumed_from": resumed.said["resumed"]["step"],
        "resumed_source": resumed.said["resumed"]["source"],
        "resume_s": resumed.said["resumed"]["seconds"],
        "steps_compared": len(resumed.losses),
        "losses_equal": not different,
        "state_equal": is_same_state,
        "different": different,
        "losses": {"killed": killed.losses, "resumed": resumed.losses, "not killed": whole.losses},
    }


def _costs(pairs: Sequence[Pair], *, has_worker: bool) -> dict[str, Any]:
    """The figures of one contestant, in seconds; None: cannot be told. ``has_worker``: it saves by a worker."""
    figures = {
        "call_s": figure_of([pair.saving.call_s for pair in pairs]),
        "wall_s": cost_of([pair.wall_s for pair in pairs]),
        "cpu_s": cost_of([pair.cpu_s for pair in pairs]),
    }
    if has_worker:
        figures["worker_cpu_s"] = figure_of([pair.saving.worker_s for pair in pairs])
    return {"saves": len(pairs)} | {name: figure and vars(figure) for name, figure in figures.items()}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="asyncckpt demo",
        description="Train a small transformer, kill it, resume it, and show what its checkpoints cost.",
        epilog="example: asyncckpt demo --folder /scratch/demo --png demo.png",
    )
    parser.add_argument("--seconds", type=float, default=50.0, help="how long all may take, about (default: 50)")
    parser.add_argument("--steps", type=int, default=24, help="steps of the training, at most (default: 24)")
    parser.add_argument("--every", type=int, default=4, help="steps from save to save (default: 4)")
    parser.add_argument("--pairs", type=int, default=20, help="saves to measure of each kind, at most (default: 20)")
    parser.add_argument("--size", choices=["small", "default"], default="default", help="of the model")
    parser.add_argument("--folder", help="where to keep the checkpoints (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON; progress goes to stderr")
    parser.add_argument("--png", metavar="FILE", help="draw the losses and the costs into this file; wants matplotlib")
    args = parser.parse_args(argv)
    if args.every < 1 or args.steps < 2 * args.every or args.pairs < 1:
        parser.error("--every and --pairs are 1 or more, --steps is twice --every or more")
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png wants matplotlib, which is not installed: pip install matplotlib")
    if args.png is not None and not os.path.isdir(os.path.dirname(os.path.abspath(args.png))):
        parser.error(f"--png: there is no folder for {args.png}")
    return args


def _run(args: argparse.Namespace, folder: str) -> int:
    """Demonstrate, and show the outcome. Returns the exit status."""
    age = time.time() - psutil.Process().create_time()
    left = args.seconds - age - _END_S - (_PICTURE_S if args.png else 0)
    begun = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        summary = _demonstrate(args, folder, begun + left)
        show_costs(summary)
        if args.png:
            from asyncckpt.demo.picture import draw  # here, as matplotlib may be missing

            draw(summary, args.png)
            print(f"\nThe picture is {args.png}")
        show_next(args.folder)
    if args.json:
        print(json.dumps(summary | {"seconds": age + time.monotonic() - begun}, indent=1))
    return 0 if summary["ok"] else 1


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns 0, or 1 if losses differ; exits with 1 if a trainer fails, with 2 after a wrong call."""
    args = _parse(argv)
    folder = os.path.abspath(args.folder or tempfile.mkdtemp(prefix="asyncckpt-demo-"))
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        sys.exit(f"asyncckpt demo: the folder is not empty, and the demo wants a fresh one: {folder}")
    # So that a SIGTERM, too, ends the trainers and removes the folder.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return _run(args, folder)
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
