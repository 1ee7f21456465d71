"""Remove each wait, hold and check of staging by itself, and see that a device test fails."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from mutations.device_path import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 900.0
# Folders that the tests need. Links in asyncckpt lead to worker and shm.
_FOLDERS = ("asyncckpt", "worker", "shm", "tests", "scripts", "examples")


def main(argv: Sequence[str] | None = None) -> int:
    """Try the mutations. Return 1 if the tests pass with a mutation, or fail without one."""
    parser = argparse.ArgumentParser(prog="scripts/mutations", description=__doc__)
    parser.add_argument("--only", default="", help="those with this text in what they take away")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    options = parser.parse_args(argv)
    chosen = [each for each in MUTATIONS if options.only in each.what]
    if options.list:
        print(tabulate([(each.what, each.file) for each in chosen], ("taken away", "in")))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="asyncckpt-mutations-") as folder:
        tree = copy_tree(Path(folder))
        tests = sorted({test for each in chosen for test in each.tests.split()})
        if not _pass(tree, tests):
            print("the tests fail without a mutation", file=sys.stderr)
            return 1
        for each in chosen:
            begun = time.monotonic()
            caught = not _passes_with(each, tree)
            rows.append((each.what, each.file, "caught" if caught else "SURVIVED", f"{time.monotonic() - begun:.0f} s"))
            print(f"{rows[-1][2]:9}{each.what}", file=sys.stderr, flush=True)
    print(tabulate(rows, ("taken away", "in", "", "")))
    survived = sum(row[2] != "caught" for row in rows)
    print(f"{len(rows) - survived} of {len(rows)} mutations were caught")
    return 1 if survived else 0


def copy_tree(into: Path) -> Path:
    """Copy the parts of this checkout that the tests need."""
    for folder in _FOLDERS:
        shutil.copytree(ROOT / folder, into / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", into)
    return into


def mutated(mutation: Mutation, text: str) -> str:
    """Return the mutated text of a file. Raises ``ValueError`` if the file no longer contains the old text once."""
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.what!r}: {mutation.old!r} stands {text.count(mutation.old)} times in {mutation.file}"
        )
    return text.replace(mutation.old, mutation.new)


def _passes_with(mutation: Mutation, tree: Path) -> bool:
    file = tree / mutation.file
    text = file.read_text()
    file.write_text(mutated(mutation, text))
    try:
        return _pass(tree, mutation.tests.split())
    finally:
        file.write_text(text)


def _pass(tree: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode > 1:  # no failed or crashed test, but for example no tests at all
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == 0
