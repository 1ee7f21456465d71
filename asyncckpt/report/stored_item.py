"""An item of a checkpoint of ours, and what its checksums say of whether another one has the same bytes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from asyncckpt.worker.index import Index, Item

PICKLE = "/data.pkl"
"""What the name of that record of an archive ends with which may be shorter than what is reserved for it."""


@dataclass(frozen=True)
class StoredItem:
    """An item, and the index that has it."""

    index: Index
    item: Item

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its offsets in the whole tensor, and its shape."""
        return tuple(self.item.offsets), tuple(self.item.shape)

    @property
    def place(self) -> tuple[int, ...]:
        """Where it stands in its file."""
        return self.item[-4:]

    @property
    def grows(self) -> bool:
        """Whether more is reserved for it than it may take: an object, or the pickle of an archive."""
        return self.item.kind == "object" or (self.item.kind == "record" and self.item.name.endswith(PICKLE))

    def spans(self) -> list[tuple[int, int, int]]:
        """The spans that it stands in, in its order: of each the first byte and the end, from the item on, and the
        checksum. The last one has also what stands between it and the next item.
        """
        its, bounds = self.item, self.index.bounds
        first, last = bisect_left(bounds, its.at), bisect_left(bounds, its.at + its.nbytes)
        edges = [bound - its.at for bound in bounds[first : last + 1]]
        sums = self.index.checksums[first:last]
        return [(begin, end, checksum) for (begin, end), checksum in zip(pairwise(edges), sums, strict=True)]


def doubtful(one: StoredItem, other: StoredItem) -> list[tuple[int, int]] | None:
    """Which bytes of the payloads of two items of the same size may differ, by their checksums; None: some do.

    Before a payload stands a header, and between items padding, which may be another where the payload is the same: a
    span with such bytes says that all of it is the same, but not that some of the payload differs.
    """
    nbytes, lead = one.item.payload_bytes, one.item.payload_at - one.item.at
    if other.item.payload_at - other.item.at != lead:
        return [(0, nbytes)] if nbytes else []
    others = {(begin, end): checksum for begin, end, checksum in other.spans()}
    doubts = []
    for begin, end, checksum in one.spans():
        first, last = max(begin, lead), min(end, lead + nbytes)
        if first >= last or others.get((begin, end)) == checksum:
            continue
        if (begin, end) in others and (begin, end) == (first, last):
            return None
        doubts.append((first - lead, last - lead))
    return doubts
