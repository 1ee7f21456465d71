"""Parts of a tensor, each a box of its elements: whether they are all of it, and whether some lie in each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

Ranges = tuple[range, ...]
"""The elements of a tensor that are in these ranges, one a dimension."""


def ranges(offsets: Sequence[int], shape: Sequence[int]) -> Ranges:
    """The elements from ``offsets`` on, so many as ``shape`` says."""
    return tuple(range(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))


def missing(whole: Sequence[int], parts: Iterable[Ranges]) -> Ranges | None:
    """A box of a tensor of the shape ``whole`` that is in none of its ``parts``; None: there is all of it."""
    left = [] if 0 in whole else [tuple(map(range, whole))]
    for part in parts:
        left = [rest for each in left for rest in _without(each, part)]
    return left[0] if left else None


def common(parts: Iterable[Ranges]) -> Ranges | None:
    """A box that is in two of the ``parts``; None: there is none."""
    shared = (_shared(one, other) for one, other in combinations(parts, 2))
    return next((each for each in shared if all(map(len, each))), None)


def shown(part: Ranges) -> str:
    """For a message: as Python writes a slice."""
    return f"[{', '.join(f'{each.start}:{each.stop}' for each in part)}]"


def _shared(one: Ranges, other: Ranges) -> Ranges:
    return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def _without(one: Ranges, part: Ranges) -> Iterator[Ranges]:
    """What of ``one`` is not in ``part``, as boxes."""
    inner = _shared(one, part)
    if not all(map(len, inner)):
        yield one
        return
    for at, (cut, each) in enumerate(zip(inner, one, strict=True)):
        for outer in (range(each.start, cut.start), range(cut.stop, each.stop)):
            if outer:
                yield (*inner[:at], outer, *one[at + 1 :])
