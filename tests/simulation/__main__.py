"""Try the machines of ``asyncckpt/protocol`` under seeded orders of events"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from simulation.parties import PartiesHistory
from simulation.saves import History
from simulation.schedule import Violation

_AT_ONCE = 2000


def main(argv: list[str]) -> int:
    """Run the histories. Return 1 if one of them breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=100_000, help="number of histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--parties", action="store_true", help="saves of a trainer with parties, instead of ranks")
    parser.add_argument("--seed", type=int, help="print the one history of this seed")
    parser.add_argument("--processes", type=int, default=None, help="number of processes (default: one for each core)")
    options = parser.parse_args(argv)
    kind = PartiesHistory if options.parties else History
    if options.seed is not None:
        kind(options.seed, log=True).run()
        return 0
    begun, done, failures = time.monotonic(), 0, 0
    with ProcessPoolExecutor(options.processes) as pool:
        end = options.first + options.histories
        chunks = [range(begin, min(begin + _AT_ONCE, end)) for begin in range(options.first, end, _AT_ONCE)]
        for chunk, found in zip(chunks, pool.map(partial(_run, kind), chunks), strict=True):
            done += len(chunk)
            failures += len(found)
            for seed, violation in found:
                print(f"seed {seed}: {violation}", flush=True)
    seconds = time.monotonic() - begun
    print(f"{done} histories, {failures} with a violation, {done / seconds:.0f} histories a second")
    return int(failures > 0)


def _run(kind: type[History | PartiesHistory], seeds: range) -> list[tuple[int, str]]:
    found = []
    for seed in seeds:
        try:
            kind(seed).run()
        except Violation as violation:
            found.append((seed, str(violation)))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
