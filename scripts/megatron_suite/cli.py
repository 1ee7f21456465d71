"""``python scripts/megatron_suite``."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from tabulate import tabulate

from megatron_suite import ranks

_OUTCOMES = ("passed", "skipped", "failed", "hung")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/megatron_suite",
        description="Megatron-LM's own tests of dist_checkpointing, on CPUs and gloo, each once with its own writer and"
        " once with asyncckpt's: does any test pass with the one and fail with the other?",
        epilog="The released packages have no tests in them: clone Megatron-LM at the tag of a release (core_v0.16.1 is"
        " known to work). It imports six, pydantic and einops. Exits with 1 if a test fails with asyncckpt alone.",
    )
    parser.add_argument("checkout", type=Path, help="folder of Megatron-LM's sources")
    parser.add_argument("files", nargs="*", help="of its folder tests/unit_tests/dist_checkpointing; by default all")
    parser.add_argument("--nvrx", type=Path, help="folder of an unpacked nvidia-resiliency-ext, for local checkpoints")
    parser.add_argument("--only", default="", help="a part of the names of the tests that are to run")
    parser.add_argument("--ranks", type=int, default=8, help="of each job; many tests want 8 (default)")
    parser.add_argument("--logs", type=Path, help="where to leave what the ranks print; by default nowhere")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncckpt-megatron-") as name:
        folder = (args.logs or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        ranks.prepare(args.checkout.resolve(), args.nvrx and args.nvrx.resolve(), args.ranks)
        tests = [test for test in ranks.collect(folder, args.files) if args.only in test]
        return _compare(tests, folder, args.ranks)


def _compare(tests: list[str], folder: Path, world_size: int) -> int:
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    worse = []
    for number, test in enumerate(tests, 1):
        outcomes = {}
        for ours in (False, True):
            where = folder / str(number) / ("asyncckpt" if ours else "stock")
            outcomes[ours] = ranks.run(test, where, world_size, ours=ours)
            counts[ours][outcomes[ours]] += 1
        short = test.removeprefix(ranks.TESTS + "/")
        print(f"{number:4} of {len(tests)}  {outcomes[False]:8} {outcomes[True]:8} {short}", flush=True)
        if outcomes[False] in ("passed", "skipped") and outcomes[True] != outcomes[False]:
            worse.append(short)
    rows = [[name, *(counts[ours][name] for ours in (False, True))] for name in _OUTCOMES]
    print(tabulate(rows, headers=["", "stock", "asyncckpt"]))
    for test in worse:
        print(f"only with stock: {test}")
    return 1 if worse or not tests else 0
