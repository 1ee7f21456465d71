"""Mount each file system, run the tests there, and print the outcomes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

from file_systems.kinds import KINDS, ON_REQUEST, CannotMountError, make_folder, remove_folder
from file_systems.suite import TESTS, Outcome, run_tests


def try_kind(name: str, tests: list[str], limit_s: float) -> Outcome:
    """Mount a file system and run the tests there."""
    folder = make_folder(name)
    try:
        if name != "folder" and os.geteuid() != 0:
            raise CannotMountError("takes root")
        with KINDS[name](folder) as place:
            return run_tests(name, place, tests, limit_s, folder / "report")
    except CannotMountError as error:
        return Outcome(name, note=f"not mounted: {error}")
    finally:
        remove_folder(folder)


def table(outcomes: list[Outcome]) -> str:
    """Return the counts of each file system, then the names of the tests that did not pass."""
    lines = [f"{'file system':34} {'passed':>6} {'refused':>7} {'failed':>6} {'skipped':>7}"]
    for outcome in outcomes:
        counts = outcome.passed, len(outcome.refused), len(outcome.failed), outcome.skipped
        lines.append("{:34} {:6} {:7} {:6} {:7}  {}".format(outcome.name, *counts, outcome.note).rstrip())
    for outcome in outcomes:
        for kind, errors in (("refused", outcome.refused), ("failed", outcome.failed)):
            lines += [f"{outcome.name}: {kind} {test}: {_short(error)}" for test, error in errors.items()]
    return "\n".join(lines)


def _short(error: str) -> str:
    words = " ".join(error.split())
    return words if len(words) < 200 else f"{words[:120]} ... {words[-80:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="file_systems", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(map(repr, KINDS))}; all but {ON_REQUEST}"
    )
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files of tests, or what else pytest takes")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest time of the tests on a file system")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes here, too")
    options = parser.parse_args()
    if unknown := {*options.names} - {*KINDS}:
        parser.error(f"there is no file system named {sorted(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that mounted file systems are unmounted
    outcomes = []
    for name in options.names or [name for name in KINDS if name not in ON_REQUEST]:
        outcomes.append(try_kind(name, options.tests, options.limit_s))
        its = outcomes[-1]
        print(f"{name}: {its.passed} passed, {len(its.refused) + len(its.failed)} not {its.note}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2))
    print(f"\n{table(outcomes)}")
    return int(any(outcome.failed or "stopped" in outcome.note for outcome in outcomes))
