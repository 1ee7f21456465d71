"""What of a state has settled: tensors that have stayed the same over two durable saves get a data file of their own.

A file is linked, and not written again, if no byte of it has changed (``worker/durable_files.py``). So what changes and
what does not have to stand in different files. This is learned, for each rank by itself, of what its worker says. No
promise rests on it: of what changes again, that file is written again, and then it stands elsewhere for good.

What has settled need not stand in each slot, either (``Settled.SHARED``): see ``staging/shared_part.py``.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from operator import and_
from typing import TypeAlias

from asyncckpt.format.index import Index
from asyncckpt.planning.layout import PlannedFile, Settled

PartKey: TypeAlias = tuple[str, tuple[int, ...]]
"""A stored tensor, or a shard of it: by its name, and its offsets in the whole."""

# To plan anew costs a full save, and a tenth of a millisecond for each tensor. It is worth it if from then on a
# sixteenth less is written, and a tenth of a millisecond of writing less in a hundred saves, for each tensor.
_LEAST_GAIN = 1 / 16
_LEAST_BYTES, _LEAST_BYTES_PER_TENSOR = 1 << 20, 1 << 10
# What changes after fewer saves than that has not paid for a plan, and a save in full.
_LONG = 8
# To look at a tensor takes longer than to copy it, if it is smaller.
_LEAST_SHARED = 64 << 10


@functools.lru_cache(maxsize=16)
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a name is one of ``patterns``. It is asked in each save, for each name."""
    are_names = {pattern for pattern in patterns if not any(map(pattern.__contains__, "*?["))}
    matches = re.compile("|".join(map(translate, patterns))).match
    return functools.lru_cache(maxsize=1 << 20)(lambda name: name in are_names or matches(name) is not None)


@dataclass
class Settling:
    """What this rank knows of one structure; its next plan goes on with it.

    Attributes:
        parts: What stands in data files of its own.
        shares: Whether slots may share that, where it is on the host.
        assumed: Patterns of names that are promised not to change: those have files of their own from the beginning,
            which slots share (``Config.assume_unchanged``).
        restless: What stood there, and has changed.
        pause: How many saves have to be durable before more is taken for settled.
        durable: How many are, since the plan was made.
        soon: How often, one time after the other, something had changed a few saves after it had settled.
        heard: The number of the last save that is; the same on all ranks that have heard of the same saves.
    """

    parts: frozenset[PartKey] = frozenset()
    shares: bool = False
    assumed: tuple[str, ...] = ()
    restless: frozenset[PartKey] = frozenset()
    pause: int = 1
    durable: int = 0
    soon: int = 0
    heard: int = 0
    _unchanged: tuple[bytes, ...] = field(default=(), repr=False)
    _next: Settling | None = field(default=None, repr=False)
    _is_compared: bool = field(default=False, repr=False)

    @property
    def is_to_be_learned(self) -> bool:
        """Whether the caller's tensors should be compared with the first save, which is durable by now."""
        is_known = self.parts or self.restless or self._is_compared
        return self.shares and self.durable == 1 and not is_known

    def level_of(self, part: PartKey, nbytes: int, *, is_on_host: bool) -> Settled:
        """What is expected of a stored tensor of ``nbytes``."""
        if self.is_assumed(part[0]):
            return Settled.SHARED
        if part not in self.parts:
            return Settled.NOT
        return Settled.SHARED if self.shares and is_on_host and nbytes >= _LEAST_SHARED else Settled.COPIED

    def is_assumed(self, name: str) -> bool:
        """Whether it is promised that the tensor of that name does not change."""
        return bool(self.assumed) and _matcher(self.assumed)(name)

    def without(self, names: Collection[str]) -> Settling:
        """The same, when the tensors of these ``names`` have changed. Where that comes soon, and again, nothing has
        settled, and nothing does before twice as many saves: or a training in which now this changes, and now that,
        would be planned anew again and again.
        """
        changed = frozenset(part for part in self.parts if part[0] in names)
        soon = self.soon + 1 if self.durable < _LONG else 0
        return replace(
            self,
            parts=self.parts - changed if soon < 2 else frozenset(),
            restless=self.restless | changed,
            soon=soon,
            pause=self.pause if soon < 2 else 2 * self.pause,
            durable=0,
            _unchanged=(),
            _next=None,
        )

    def note(self, number: int, unchanged: tuple[bytes, ...]) -> None:
        """A save is durable. ``unchanged``: as of ``Committed``. Any thread may call this."""
        self.note_unchanged(unchanged)
        self.durable, self.heard = self.durable + 1, number

    def note_unchanged(self, unchanged: tuple[bytes, ...]) -> None:
        """That has not changed since the last save; empty: nobody has looked, or it is of no use to know."""
        if not unchanged:
            return
        if list(map(len, unchanged)) == list(map(len, self._unchanged)):  # never since the plan was made
            unchanged = tuple(bytes(map(and_, now, then)) for now, then in zip(unchanged, self._unchanged, strict=True))
        if unchanged != self._unchanged:
            self._unchanged, self._next = unchanged, None

    def note_compared(self, files: Sequence[PlannedFile], unchanged: Sequence[bytes]) -> None:
        """The call has compared what it can look at with the first save. Args: as of ``next_for`` and ``note``."""
        self._next = self._learned(files, unchanged)
        self._is_compared = True

    def next_for(self, files: Sequence[PlannedFile]) -> Settling | None:
        """What a new plan should go by, if it is worth it; ``files``: those of the plan that there is."""
        unchanged = self._unchanged
        if self._next is None and self.durable >= self.pause and len(unchanged) == len(files):
            self._next = self._learned(files, unchanged)
        return self._next if self._next is not None and self._next.parts != self.parts else None

    def _learned(self, files: Sequence[PlannedFile], unchanged: Sequence[bytes]) -> Settling:
        sizes: dict[PartKey, int] = {}
        same: set[PartKey] = set()
        for file, its in zip(files, unchanged, strict=True):
            for item in Index.items_in(file.index_head):
                if item.kind == "tensor" and not self.is_assumed(item.name):
                    key = item.name.removeprefix(file.folder and f"{file.folder}/"), tuple(item.offsets)
                    sizes[key] = item.nbytes
                    first, last = bisect_right(file.spans, item.at) - 1, bisect_left(file.spans, item.at + item.nbytes)
                    if all(its[first:last]):
                        same.add(key)
        restless = self.restless | (self.parts - same)
        parts = frozenset(same - restless)
        linked_now = sum(file.nbytes for file, its in zip(files, unchanged, strict=True) if all(its))
        gain = sum(sizes[part] for part in parts if part in sizes) - linked_now
        whole = sum(file.nbytes for file in files)
        if gain < max(_LEAST_BYTES, _LEAST_GAIN * whole, _LEAST_BYTES_PER_TENSOR * len(sizes)):
            return self
        return replace(self, parts=parts, restless=restless, pause=2 * self.pause, durable=0, _unchanged=(), _next=None)
