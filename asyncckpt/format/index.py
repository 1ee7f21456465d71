"""The index of a data file: the position of each value, and a checksum (XXH3, 64 bits) for every span.

``__RANK_0.index.json`` is JSON, free of pickles. The *spans* cover the whole data file, including headers and gaps.
Each item begins a new span, and an item longer than ``SPAN_BYTES`` has several spans. So a damaged byte can be traced
to its tensor, and a reader of one tensor need not verify the whole file.
"""

from __future__ import annotations

import base64
import json
import operator
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NamedTuple

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.format.manifest import FORMAT, MOST_BYTES, NOT_AS_WRITTEN, check_format, is_size, parsed_json

SPAN_BYTES = 8 << 20
_FORM_FIELDS = ("kind", "dtype", "shape", "offsets", "nbytes", "lead", "payload_bytes")
_FIELDS = ("name", "form", "at")  # the fields of an item in the file; "form" is a number


class Item(NamedTuple):
    """One stored value of a data file.

    ``kind`` is "tensor" or "object". ``dtype``, ``shape`` and ``offsets`` (of this chunk in the whole tensor) are empty
    for objects. The value takes ``nbytes`` at ``at``. A tensor's own bytes are ``payload_bytes`` at ``payload_at``.
    Both positions count from the start of the file. Zeros after an object's bytes leave space for a longer object.

    In an index, all fields except the name and the position are the item's *form*. A form is stored once for all items
    that share it. ``lead`` is the number of bytes before the payload. Items share the lists of a form: never change
    them.
    """

    name: str
    kind: str
    dtype: str
    shape: list[int]
    offsets: list[int]
    at: int
    nbytes: int
    payload_at: int
    payload_bytes: int


_at = operator.attrgetter("at")


def spans(starts: Iterable[int], nbytes: int) -> array[int]:
    """Return the span boundaries, from 0 to ``nbytes``, of a file with items that begin at ``starts``."""
    edges = sorted({0, nbytes, *starts})
    if max(map(operator.sub, edges[1:], edges), default=0) <= SPAN_BYTES:  # fast path for a great many short items
        return array("Q", edges)
    bounds = array("Q", edges[:1])
    for edge in edges[1:]:
        bounds.extend(range(bounds[-1] + SPAN_BYTES, edge, SPAN_BYTES))
        bounds.append(edge)
    return bounds


@dataclass(frozen=True)
class Index:
    """The index of a data file. ``asked``: digest of the state that the rank was asked to save; "" if not recorded."""

    data: str
    nbytes: int
    items: list[Item]
    checksums: Sequence[int]
    asked: str = ""

    @cached_property
    def bounds(self) -> array[int]:
        """The span boundaries. Span ``i`` is from ``bounds[i]`` to ``bounds[i + 1]``."""
        return spans(map(_at, self.items), self.nbytes)

    def damage(self, begin: int, end: int) -> str:
        """Return the error text for a wrong checksum of the bytes from ``begin`` to ``end``."""
        names = ", ".join(map(repr, self.names_at(begin, end))) or "of no value, but of the space between them"
        return f"the bytes {begin:,} to {end:,} are damaged: {names}"

    def names_at(self, begin: int, end: int) -> list[str]:
        """Return the names of the items in the bytes from ``begin`` to ``end``."""
        return [item.name for item in self.items if item.at < end and begin < item.at + item.nbytes]

    @staticmethod
    def head(data: str, items: Sequence[Item], asked: str = "") -> bytes:
        """Return the constant part of an index, which ``tail`` continues.

        Args:
            data: Name of the data file.
            items: Items of the data file, in the order of the file.
            asked: As in ``Index``.
        """
        forms: dict[tuple[Any, ...], int] = {}
        rows = []
        for name, kind, dtype, shape, offsets, at, nbytes, payload_at, payload_bytes in items:
            its = kind, dtype, (*shape,), (*offsets,), nbytes, payload_at - at, payload_bytes
            rows.append(json.dumps((name, forms.setdefault(its, len(forms)), at), separators=(",", ":")))
        about = {"asked": asked} if asked else {}
        fields = {"form_fields": _FORM_FIELDS, "forms": list(forms), "fields": _FIELDS}
        start = json.dumps({"format": FORMAT, "data": data, **about, **fields})
        lines = ",\n".join(rows)
        return f'{start[:-1]}, "items": [\n{lines}\n]'.encode()

    @staticmethod
    def items_in(head: bytes) -> list[Item]:
        """Return the items of a ``head``. Raises one of ``NOT_AS_WRITTEN`` if ``head`` is not a valid head."""
        return _items(json.loads(head + b"}"))

    @staticmethod
    def tail(nbytes: int, checksums: array[int]) -> bytes:
        """Return the rest of an index: file size, and checksums as base64 of little-endian 64-bit numbers."""
        text = base64.b64encode(_little_endian(checksums).tobytes())
        return b', "bytes": %d, "checksums": "%s"}\n' % (nbytes, text)

    @classmethod
    def parse(cls, text: bytes, path: str) -> Index:
        """Read an index; ``path`` is for the error. Raises ``DamagedCheckpointError``, ``FormatError``."""
        try:
            found = parsed_json(text)
            check_format(found, path)
            checksums = _little_endian(array("Q", base64.b64decode(found["checksums"], validate=True)))
            asked = found.get("asked", "")
            index = cls(found["data"], found["bytes"], _items(found), checksums, asked)
            if not (type(index.data) is type(asked) is str and is_size(index.nbytes)):
                raise ValueError("the name, the digest or the size of the file")
            # Check that each span has a checksum before using these numbers, which could be absurdly large.
            starts = list(map(_at, index.items))
            if not 0 <= index.nbytes <= len(checksums) * SPAN_BYTES:
                raise ValueError("the checksums do not fit the size")
            if starts and not 0 <= min(starts) <= max(starts) <= index.nbytes:
                raise ValueError("an item stands outside of the file")
            if len(index.bounds) != len(checksums) + 1:
                raise ValueError("the checksums do not fit the items")
        except NOT_AS_WRITTEN as error:
            raise DamagedCheckpointError(f"this index of a data file is damaged ({error})", path=path) from error
        return index


def _items(found: Mapping[str, Any]) -> list[Item]:
    """Return the items of a parsed index, with checked types. Raises one of ``NOT_AS_WRITTEN``."""
    if not found["items"]:
        return []
    # Work by columns: for 100,000 items, one microsecond an item adds up to a tenth of a second.
    names, numbers, ats = zip(*found["items"], strict=True)
    kinds, dtypes, shapes, offsets, *sizes = zip(*found["forms"], strict=True)
    are_typed = {*map(type, chain(names, kinds, dtypes))} == {str} and {*map(type, chain(shapes, offsets))} == {list}
    if not are_typed or list(map(len, shapes)) != list(map(len, offsets)):
        raise ValueError("an entry of an item")
    known = [*numbers, *ats, *chain(*sizes), *chain(*shapes), *chain(*offsets)]
    if {*map(type, known)} != {int} or not 0 <= min(known) <= max(known) < MOST_BYTES // 2:  # sums of two stay valid
        raise ValueError("a size of an item")
    columns = (map(each.__getitem__, numbers) for each in (kinds, dtypes, shapes, offsets))
    nbytes, leads, payload_bytes = (map(each.__getitem__, numbers) for each in sizes)
    rows = zip(names, *columns, ats, nbytes, map(operator.add, ats, leads), payload_bytes, strict=True)
    return list(map(tuple.__new__, repeat(Item), rows))  # calling the class itself would run Python code for each item


def _little_endian(numbers: array[int]) -> array[int]:
    """Convert ``numbers`` between the host's byte order and the file's."""
    if sys.byteorder == "big":
        numbers = array("Q", numbers)
        numbers.byteswap()
    return numbers
