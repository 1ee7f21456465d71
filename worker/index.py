"""The index of a data file, ``__RANK_0.index.json``: which tensor stands where, and a checksum for every span.

The checksums are XXH3, 64 bits. The *spans* cover the whole file, envelopes and gaps included: each begins where an
item begins, or ``SPAN_BYTES`` after the one before in a longer item. So a bad byte is traced to its tensor, and a
reader can check just what it reads.
"""

from __future__ import annotations

import base64
import json
import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.worker.manifest import FORMAT, check_format

SPAN_BYTES = 8 << 20


def data_name(rank: int) -> str:
    """The data file of ``rank``; DCP's own naming."""
    return f"__{rank}_0.distcp"


def index_name(data: str) -> str:
    """The index of the data file ``data``."""
    return data.removesuffix(".distcp") + ".index.json"


class Item(NamedTuple):
    """One stored value of a data file.

    ``kind`` is "tensor" or "object"; ``dtype``, ``shape`` and ``offsets`` (of this chunk in the whole tensor) are empty
    for objects. It takes ``nbytes`` at ``at``; a tensor's own bytes are ``payload_bytes`` at ``payload_at`` (both from
    the start of the file). An object's bytes are followed by zeros, its space to grow.
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
    """The index of a data file."""

    data: str
    nbytes: int
    items: list[Item]
    checksums: Sequence[int]

    @cached_property
    def bounds(self) -> array[int]:
        """The spans' boundaries; span ``i`` is from ``bounds[i]`` to ``bounds[i + 1]``."""
        return spans((item.at for item in self.items), self.nbytes)

    def names_at(self, begin: int, end: int) -> list[str]:
        """The names of the items in the bytes from ``begin`` to ``end``."""
        return [item.name for item in self.items if item.at < end and begin < item.at + item.nbytes]

    @staticmethod
    def head(data: str, nbytes: int, items: Sequence[Item]) -> bytes:
        """The constant part of an index: all but the checksums.

        Args:
            data: The name of the data file.
            nbytes: Its size, in bytes.
            items: What stands in it, in the order of the file.

        Returns:
            The text up to where ``tail`` goes on.
        """
        rows = ",\n".join(json.dumps(item, separators=(",", ":")) for item in items)
        start = json.dumps({"format": FORMAT, "data": data, "bytes": nbytes, "fields": list(Item.__annotations__)})
        return f'{start[:-1]}, "items": [\n{rows}\n], "checksums": "'.encode()

    @staticmethod
    def tail(checksums: array[int]) -> bytes:
        """What follows the head: the checksums, as base64 of little-endian 64-bit numbers."""
        if sys.byteorder == "big":
            checksums = array("Q", checksums)
            checksums.byteswap()
        return base64.b64encode(checksums.tobytes()) + b'"}\n'

    @classmethod
    def parse(cls, text: bytes, path: str) -> Index:
        """Read an index; ``path`` is for the error. Raises ``DamagedCheckpointError``."""
        try:
            fields = json.loads(text)
            check_format(fields, path)
            checksums = array("Q", base64.b64decode(fields["checksums"], validate=True))
            if sys.byteorder == "big":
                checksums.byteswap()
            index = cls(fields["data"], fields["bytes"], list(starmap(Item, fields["items"])), checksums)
            if len(index.bounds) != len(checksums) + 1:
                raise ValueError("the checksums do not fit the items")
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"this index of a data file is damaged ({error})", path=path) from error
        return index
