"""How long the phases of a save take, and when they begin: noted on each rank, kept of all ranks in the manifest.

Each is a number of seconds, by its name. ``copy_s`` is how long the phase took, ``copy_from_s`` how long after the call
it began. A phase that says nothing else of its begin follows the one before. In their order:

    plan_s       the trainer sees that the structure is as planned, or plans
    slot_s       it waits for a free slot
    copy_s       the tensors are copied
    stall_s      all that the call of ``save`` took, or, where that copies, until it had copied
    write_s      the worker writes, from when the first bytes have arrived until all are on storage
    checksum_s   within that: it computes checksums, while other threads go on writing
    sync_s       at the end of that: it has storage keep what was written
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence

CALLED_AT = "called_at"
"""The name of what is no duration: when ``save`` was called, in seconds since the epoch."""


def note(timings: MutableMapping[str, float], phase: str, begun: float, called_at: float) -> None:
    """A phase ends now.

    Args:
        timings: Get how long it took, and when it began.
        phase: Its name.
        begun: When it did, by ``time.perf_counter``.
        called_at: When ``save`` was called, by ``time.time``, on this host.
    """
    timings[f"{phase}_s"] = seconds = time.perf_counter() - begun
    timings[f"{phase}_from_s"] = max(0.0, time.time() - seconds - called_at)


def of_all_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """What a manifest keeps: by name, the number of each rank; None where a rank has none, as its trainer died."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [round(rank[name], 6) if name in rank else None for rank in ranks] for name in names}
