"""``python scripts/gpu_check``: prepares the machine, runs the parts, prints a table, writes JSON and a picture."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpu_check import setup
from gpu_check.figures import Results
from gpu_check.parts import PARTS, SECONDS, START, measure

_OUT = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu"
_SPARE_S = 5.0
"""Kept for the table and the picture."""
_GRACE_S = 3.0
"""A part that does not end by itself is killed so much later."""
_MOST = 2.0
"""A part gets at most so many times its own seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a part is not whole or a figure misses its threshold."""
    begun = time.monotonic()
    args = _parser().parse_args(argv)
    names = args.parts or list(PARTS)
    if args.here:
        _measure_here(names[0], args)
    results = Results(args.out / "gpu.json", args.device, args.scale)
    end = begun + args.seconds
    with tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-") as folder:
        wrong = setup.prepare(args.wheels, Path(folder, "site"))
        took = time.monotonic() - begun
        print(f"set-up: {took:.1f} s{''.join(f'; {each}' for each in wrong)}", flush=True)
        missing = [name for name in names if args.again or not results.is_whole(name)]
        processes = deque(_Process(name, args) for name in missing[:1])
        for number, name in enumerate(missing):
            # The next one imports what it needs meanwhile.
            processes.extend(_Process(each, args) for each in missing[number + 1 : number + 2])
            # What one part does not need is there for those after it.
            share = PARTS[name].seconds / sum(PARTS[each].seconds for each in missing[number:])
            left = end - _SPARE_S - time.monotonic()
            seconds = min(left * share, PARTS[name].seconds * _MOST)
            results = processes.popleft().run(args.give.get(name, seconds), results)
        good = _report(names, results)
        from gpu_check.picture import draw  # imports what the wheels may have brought

        draw(results, args.out / "gpu.png")
    starts = sum(results.value(name, START) or 0.0 for name in missing)
    print(f"all of it: {time.monotonic() - begun:.1f} s, of them {took + starts:.1f} s of overhead", flush=True)
    print(f"written: {results.path}", flush=True)
    return 0 if good and not wrong else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=f"Measure asyncckpt on a device, in {SECONDS:.0f} s at most: figures, and what they must reach.",
        epilog="A second run skips the parts that were measured to their end. The exit code is 1 if a part failed, was"
        " cut short, or has a figure that misses its threshold.",
    )
    times = ", ".join(f"{name} {part.seconds:.0f}" for name, part in PARTS.items())
    parser.add_argument("parts", nargs="*", metavar="PART", choices=PARTS, help=f"by default all, in seconds: {times}")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, xpu, npu, or simulated (default: cuda)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes; 1 is for a GPU of 80 GB (default: 1)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts (default: %(default).0f)")
    parser.add_argument("--out", type=Path, default=_OUT, help="folder for gpu.json and gpu.png (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use; scripts/gpu_check/wheels fetches them")
    parser.add_argument("--again", action="store_true", help="measure also the parts that were measured to their end")
    parser.add_argument(
        "--give", nargs="*", default={}, action=_Give, metavar="PART=SECONDS", help="more, or less, than its share"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one part, in this process
    return parser


class _Give(argparse.Action):
    """Seconds by the names of parts."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        given = {}
        for each in values:
            name, _, seconds = each.partition("=")
            if name not in PARTS or not seconds.replace(".", "", 1).isdigit():
                parser.error(f"{each!r} is not PART=SECONDS")
            given[name] = float(seconds)
        setattr(namespace, self.dest, given)


class _Process:
    """The process of one part. It imports at once, and measures when it is told its seconds."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name, self._args = name, args
        self._runtime = tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-")
        command = [sys.executable, str(Path(__file__).parent), name, "--here", "--device", args.device]
        self._process = subprocess.Popen(
            [*command, "--scale", str(args.scale), "--out", str(args.out)],
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | {"ASYNC_CKPT_RUNTIME_DIR": self._runtime.name},
        )

    def run(self, seconds: float, results: Results) -> Results:
        """Measure; kill the process and its children after so many seconds.

        Returns what all parts have found by then.
        """
        begun, process = time.monotonic(), self._process
        if seconds < 2 * _GRACE_S:
            print(f"{self._name}: left out, there is no time for it", flush=True)
            process.kill()
        else:
            results.begin(self._name)
        try:
            process.communicate(f"{seconds - _GRACE_S}\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            print(f"{self._name}: killed after {seconds:.0f} s", flush=True)
            _kill_children(process.pid)
            process.kill()
        code = process.wait()
        self._runtime.cleanup()
        # The part has written its figures into the file itself.
        results = Results(results.path, self._args.device, self._args.scale)
        results.end(self._name, time.monotonic() - begun, whole=code == 0)
        return results


def _measure_here(name: str, args: argparse.Namespace) -> NoReturn:
    """Measure one part in this process, in the seconds that standard input says."""
    function = PARTS[name].load()
    try:
        seconds = float(sys.stdin.readline())
    except ValueError:  # nobody wants it any more
        _end(1)
    faulthandler.dump_traceback_later(seconds + _GRACE_S / 2)  # says where a part hangs that will be killed
    results = Results(args.out / "gpu.json", args.device, args.scale)
    _end(0 if measure(name, function, args.device, args.scale, seconds, results) else 1)


def _end(code: int) -> NoReturn:
    """End this process at once: the exit handlers of some peers wait for processes that never end."""
    _kill_children(os.getpid())
    sys.stdout.flush()
    os._exit(code)


def _kill_children(pid: int) -> None:
    """Kill all processes below one; also workers, which are in sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _report(names: Sequence[str], results: Results) -> bool:
    """Print all figures, then the misses. Returns True if all parts are whole and no figure misses."""
    from tabulate import tabulate

    rows, good = [], True
    for name in names:
        whole, figures = results.is_whole(name), results.figures(name)
        good &= whole and all(figure.outcome != "miss" for figure in figures)
        for figure in figures:
            rows.append([name, figure.name, figure.shown[:48], figure.unit, figure.threshold, figure.outcome])
        rows.append([name, "seconds", f"{results.seconds(name):.1f}", "s", "", "" if whole else "not whole"])
    headers = ["part", "figure", "value", "unit", "must be", ""]
    print(tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True))
    for row in rows:
        if row[-1] in ("miss", "not whole") or row[1] == "failed":
            print("MISSED:", *row)
    return good
