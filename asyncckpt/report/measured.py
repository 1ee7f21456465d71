"""What a manifest tells of its save in a few numbers, of all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncckpt.format.manifest import Manifest
from asyncckpt.format.timings import CALLED_AT


@dataclass(frozen=True)
class Measured:
    """Of one save; None is what its manifest does not say.

    ``called_at``: when ``save`` was called, in seconds since the epoch. ``stall_s``: how long that kept the slowest
    rank. ``durable_after_s``: from the call until all ranks had written and the manifest was made. ``cost_s``,
    ``lag_s``: the same two, without what ranks waited for a free slot. ``write_s``: from when the first rank began to
    write until the last had written; ``bytes_per_s``: in that time.
    """

    called_at: float | None
    stall_s: float | None
    durable_after_s: float | None
    cost_s: float | None
    lag_s: float | None
    write_s: float | None
    bytes_per_s: float | None

    @classmethod
    def of(cls, manifest: Manifest) -> Measured:
        """From a manifest."""
        timings = manifest.timings
        # The first rank's, if it is known: its host made the manifest, and the clocks of others may differ.
        called_at = next((each for each in timings.get(CALLED_AT, ()) if each is not None), None)
        stalls = [each for each in timings.get("stall_s", ()) if each is not None]
        waits = [each or 0.0 for each in timings.get("slot_s", [None] * manifest.world_size)]
        rows = zip(timings.get("stall_s", ()), waits, strict=False)
        costs = [max(0.0, stall - waited) for stall, waited in rows if stall is not None]
        lag_s = None if called_at is None else manifest.created - called_at
        write_s = _write_s(timings)
        return cls(
            called_at=called_at,
            stall_s=max(stalls, default=None),
            durable_after_s=None if lag_s is None else max(0.0, lag_s),
            cost_s=max(costs, default=None),
            lag_s=None if lag_s is None else max(0.0, lag_s - min(waits, default=0.0)),
            write_s=write_s,
            bytes_per_s=manifest.nbytes / write_s if write_s else None,
        )


def _write_s(timings: Mapping[str, Sequence[float | None]]) -> float | None:
    rows = zip(*(timings.get(name, ()) for name in (CALLED_AT, "write_from_s", "write_s")), strict=False)
    spans: list[tuple[float, float]] = [
        (at + begin, at + begin + nseconds)
        for at, begin, nseconds in rows
        if at is not None and begin is not None and nseconds is not None
    ]
    if spans:
        return max(end for _, end in spans) - min(begin for begin, _ in spans)
    # An export, say, has one rank, and says no more.
    took: list[float] = [each for each in timings.get("write_s", ()) if each is not None]
    return max(took, default=None)
