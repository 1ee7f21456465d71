"""How numbers are shown."""

from __future__ import annotations

import datetime

_DURATIONS = ((2 * 86400, 86400, "d"), (2 * 3600, 3600, "h"), (120, 60, "min"), (1, 1, "s"))


def number(count: int, noun: str) -> str:
    """So many of something."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shape_of(shape: tuple[int, ...]) -> str:
    """The shape of a tensor."""
    return "x".join(map(str, shape))


def time_of(seconds: float) -> str:
    """A moment, from seconds since the epoch."""
    try:
        return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):  # no year that there is
        return f"{seconds:g}"


def size_of(nbytes: float) -> str:
    """So many bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
    """So long, with three digits."""
    for least, unit, name in _DURATIONS:
        if seconds >= least:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds * 1e3)} ms"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
