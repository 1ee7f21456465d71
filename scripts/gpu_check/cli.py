"""``python scripts/gpu_check``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

from gpu_check import device_tests, environment, limits, peers, training
from gpu_check.device import Device
from gpu_check.figures import Results, read

PARTS = {
    "env": environment.measure,
    "tests": device_tests.measure,
    "limits": limits.measure,
    "train": training.measure,
    "peers": peers.measure,
}
_PART_S = 540.0
_OUT = Path(__file__).parents[2] / "docs" / "benchmarks"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="What has to be seen on a real device: figures, with what they must reach.",
        epilog="A part takes nine minutes at most, and one that was measured is not measured again: so a command that"
        " was cut short may be repeated. Exits with 1 where a figure misses what it must reach.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, xpu, npu, or simulated (default: cuda)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes, by those of a GPU with 80 GB")
    parser.add_argument("--out", type=Path, default=_OUT, help="the folder for gpu-*.json (default: docs/benchmarks)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install from first, where there is no index")
    parser.add_argument("--again", action="store_true", help="measure also what was measured")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one part, in this process
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"there is no part {sorted(unknown)[0]!r}")
    if args.here:
        _measure(args.parts[0], args.device, args.scale, _path(args.out, args.parts[0]))
        return 0
    if args.wheels is not None:
        _install(args.wheels)
    for part in args.parts or PARTS:
        whole, _ = read(_path(args.out, part), args.device)
        if args.again or not whole:
            _run(part, args.device, args.scale, args.out)
    return _report(args.parts or list(PARTS), args.device, args.out)


def _path(out: Path, part: str) -> Path:
    return out / f"gpu-{part}.json"


def _measure(part: str, name: str, scale: float, path: Path) -> None:
    """One part, in this process."""
    begun, found = time.monotonic(), Results(path, name)
    for figure in PARTS[part](Device(name), scale):
        print(f"{part}: {figure.line()}", flush=True)
        found.add(figure)
    found.end(time.monotonic() - begun)


def _run(part: str, name: str, scale: float, out: Path) -> None:
    """One part, in a process of its own: what it does to its device and its memory ends with it."""
    command = [sys.executable, str(Path(__file__).parent), part, "--here", "--device", name]
    try:
        subprocess.run([*command, "--scale", str(scale), "--out", str(out)], timeout=_PART_S, check=True)
    except subprocess.TimeoutExpired:
        print(f"{part}: cut short after {_PART_S:g} s", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"{part}: ended with exit code {error.returncode}", flush=True)


def _install(wheels: Path) -> None:
    """What asyncckpt needs and is not there, without an index."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, *map(str, sorted(wheels.glob("*.whl")))], check=True)


def _report(parts: list[str], name: str, out: Path) -> int:
    """All figures, and whether all parts are whole and no figure misses."""
    rows, good = [], True
    for part in parts:
        whole, figures = read(_path(out, part), name)
        good &= whole and all(figure.outcome != "miss" for figure in figures)
        for figure in figures:
            shown = figure.value if isinstance(figure.value, str) else f"{figure.value:.4g}"
            rows.append([part, figure.name, shown, figure.unit, figure.threshold, figure.outcome])
        if not whole:
            rows.append([part, "not measured to its end", "", "", "", "miss"])
    print(tabulate(rows, headers=["part", "figure", "value", "unit", "must be", ""], disable_numparse=True))
    return 0 if good else 1
