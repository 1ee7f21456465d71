"""``python scripts/megatron_suite``."""

from __future__ import annotations

import argparse
import platform
import re
import tempfile
from collections import Counter
from pathlib import Path

from packaging.specifiers import SpecifierSet
from tabulate import tabulate

from megatron_suite import port, ranks

_OUTCOMES = ("passed", "skipped", "failed", "hung")
_OURS, _STOCK = "asyncckpt", "stock"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/megatron_suite",
        description="Megatron-LM's own tests of dist_checkpointing, on CPUs and gloo: all with asyncckpt, and those"
        " that do not pass then with Megatron-LM's own writer. Does any test pass with that one alone?",
        epilog="The released packages have no tests in them: clone Megatron-LM. Its tag core_v0.16.1, and its main"
        " branch of August 2026 (core 0.20, from Python 3.12 on), are known to work. It imports six, regex, pydantic"
        " and einops. Exits with 1 if a test passes with Megatron-LM's own writer alone.",
    )
    parser.add_argument("checkout", type=Path, help="folder of Megatron-LM's sources")
    parser.add_argument("files", nargs="*", help="of its folder tests/unit_tests/dist_checkpointing; by default all")
    parser.add_argument("--nvrx", type=Path, help="folder of an unpacked nvidia-resiliency-ext, for local checkpoints")
    parser.add_argument("--only", default="", help="a part of the names of the tests that are to run")
    parser.add_argument("--ranks", type=int, default=8, help="of each job; many tests want 8 (default)")
    parser.add_argument("--logs", type=Path, help="where to leave what the ranks print; by default nowhere")
    parser.add_argument("--results", type=Path, help="a file of outcomes; what stands in it already is not run again")
    args = parser.parse_intermixed_args()
    if (python := _python_wanted(args.checkout)) and platform.python_version() not in python:
        parser.error(f"the Megatron-LM in {args.checkout} wants Python {python}: this is {platform.python_version()}")
    for name, package in () if args.files else ranks.WANTING.items():
        print(f"not run, as it wants {package}: {name}")
    with tempfile.TemporaryDirectory(prefix="asyncckpt-megatron-") as name:
        folder = (args.logs or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results = (args.results or folder / "results").resolve()
        port.prepare(args.checkout.resolve(), args.nvrx and args.nvrx.resolve(), args.ranks)
        tests = [test for test in ranks.collect(folder, args.files) if args.only in test]
        ours = _run(tests, folder, results, args.ranks, _OURS)
        stock = _run([test for test in tests if ours[test] != "passed"], folder, results, args.ranks, _STOCK)
    return _report(ours, stock)


def _python_wanted(checkout: Path) -> SpecifierSet | None:
    line = re.search('^requires-python = "(.*)"', (checkout / "pyproject.toml").read_text(), re.MULTILINE)
    return SpecifierSet(line[1]) if line else None


def _run(tests: list[str], folder: Path, file: Path, world_size: int, writer: str) -> dict[str, str]:
    """Return the outcome of each of ``tests`` with ``writer``. Run tests that are not in ``file``, and add them."""
    outcomes = _read(file, writer)
    left = [test for test in tests if test not in outcomes]
    for test, outcome, seconds in ranks.run(left, folder / writer, world_size, ours=writer == _OURS):
        line = f"{writer:9} {outcome:7} {seconds:6.1f} {test}"
        with file.open("a") as results:
            print(line, file=results)
        print(line, flush=True)
        outcomes[test] = outcome
    return {test: outcomes[test] for test in tests}


def _read(file: Path, writer: str) -> dict[str, str]:
    if not file.exists():
        return {}
    lines = [line.split(maxsplit=3) for line in file.read_text().splitlines()]
    return {test: outcome for by, outcome, _, test in lines if by == writer}


def _report(ours: dict[str, str], stock: dict[str, str]) -> int:
    counts = {_OURS: Counter(ours.values()), _STOCK: Counter(stock.values())}
    rows = [[outcome, *(count[outcome] for count in counts.values())] for outcome in _OUTCOMES]
    print(tabulate(rows, headers=["", f"{_OURS}: all", f"{_STOCK}: those that did not pass"]))
    worse = [test for test, outcome in stock.items() if outcome == "passed"]
    for test in worse:
        print(f"only with stock: {test.removeprefix(ranks.TESTS + '/')}")
    return 1 if worse or not ours else 0
