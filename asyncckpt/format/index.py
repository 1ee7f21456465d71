"""The index of a data file: which value stands where, and a checksum (XXH3, 64 bits) for every span.

``__RANK_0.index.json`` is JSON, free of pickles. The *spans* cover the whole data file, headers and gaps included.
Each begins where an item begins, or ``SPAN_BYTES`` after the one before in a longer item: so a bad byte is traced to
its tensor, and a reader can check just what it reads.
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
_FIELDS = ("name", "form", "at")  # of an item, with its form's number


class Item(NamedTuple):
    """One stored value of a data file.

    ``kind`` is "tensor" or "object"; ``dtype``, ``shape`` and ``offsets`` (of this chunk in the whole tensor) are empty
    for objects. It takes ``nbytes`` at ``at``; a tensor's own bytes are ``payload_bytes`` at ``payload_at`` (both from
    the start of the file). An object's bytes are followed by zeros, its space to grow.

    In an index all but its name and where it stands is its *form*, which stands there once for all that have it;
    ``lead`` are the bytes before the payload. Nobody may change the lists of a form: they share them.
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
    """The boundaries of the spans of a file of ``nbytes`` whose items begin at ``starts``, from 0 to ``nbytes``."""
    edges = sorted({0, nbytes, *starts})
    if max(map(operator.sub, edges[1:], edges), default=0) <= SPAN_BYTES:  # a great many, all of them short
        return array("Q", edges)
    bounds = array("Q", edges[:1])
    for edge in edges[1:]:
        bounds.extend(range(bounds[-1] + SPAN_BYTES, edge, SPAN_BYTES))
        bounds.append(edge)
    return bounds


@dataclass(frozen=True)
class Index:
    """The index of a data file. ``asked``: a digest of what the rank was asked to save; "": it says nothing of that."""

    data: str
    nbytes: int
    items: list[Item]
    checksums: Sequence[int]
    asked: str = ""

    @cached_property
    def bounds(self) -> array[int]:
        """The spans' boundaries; span ``i`` is from ``bounds[i]`` to ``bounds[i + 1]``."""
        return spans(map(_at, self.items), self.nbytes)

    def damage(self, begin: int, end: int) -> str:
        """What to say where the checksum of the bytes from ``begin`` to ``end`` is not theirs."""
        names = ", ".join(map(repr, self.names_at(begin, end))) or "of no value, but of the space between them"
        return f"the bytes {begin:,} to {end:,} are damaged: {names}"

    def names_at(self, begin: int, end: int) -> list[str]:
        """The names of the items in the bytes from ``begin`` to ``end``."""
        return [item.name for item in self.items if item.at < end and begin < item.at + item.nbytes]

    @staticmethod
    def head(data: str, items: Sequence[Item], asked: str = "") -> bytes:
        """The constant part of an index, where ``tail`` goes on.

        Args:
            data: The name of the data file.
            items: What stands in it, in the order of the file.
            asked: As of an index.
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
        """Those of a ``head``. Raises one of ``NOT_AS_WRITTEN`` where it is none."""
        return _items(json.loads(head + b"}"))

    @staticmethod
    def tail(nbytes: int, checksums: array[int]) -> bytes:
        """What follows the head: the size of the file, and the checksums, as base64 of little-endian 64-bit numbers."""
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
            # Before anything is made of these numbers: there is a checksum for each span.
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
    """Those of what stands in an index, all of their types. Raises one of ``NOT_AS_WRITTEN``."""
    if not found["items"]:
        return []
    # By columns: of 100,000 items each microsecond would be a tenth of a second.
    names, numbers, ats = zip(*found["items"], strict=True)
    kinds, dtypes, shapes, offsets, *sizes = zip(*found["forms"], strict=True)
    are_typed = {*map(type, chain(names, kinds, dtypes))} == {str} and {*map(type, chain(shapes, offsets))} == {list}
    if not are_typed or list(map(len, shapes)) != list(map(len, offsets)):
        raise ValueError("what it says of an item")
    known = [*numbers, *ats, *chain(*sizes), *chain(*shapes), *chain(*offsets)]
    if {*map(type, known)} != {int} or not 0 <= min(known) <= max(known) < MOST_BYTES // 2:  # two are added up
        raise ValueError("a size of an item")
    columns = (map(each.__getitem__, numbers) for each in (kinds, dtypes, shapes, offsets))
    nbytes, leads, payload_bytes = (map(each.__getitem__, numbers) for each in sizes)
    rows = zip(names, *columns, ats, nbytes, map(operator.add, ats, leads), payload_bytes, strict=True)
    return list(map(tuple.__new__, repeat(Item), rows))  # the class itself would be called in Python, for each


def _little_endian(numbers: array[int]) -> array[int]:
    """``numbers`` between the host's order of bytes and the file's."""
    if sys.byteorder == "big":
        numbers = array("Q", numbers)
        numbers.byteswap()
    return numbers
