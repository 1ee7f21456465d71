"""A model of a weak but sane disk: all states of a folder that are possible after a crash.

The caller chooses among these states. The model allows the following losses:

- Names. A call that changes names (create, mkdir, link, symlink, unlink, rmdir, rename, exchange) is durable after an
  fsync of their folder. A rename between two folders needs an fsync of both. Any other call may survive or be lost, in
  any combination. Later calls may survive without earlier ones.
- Bytes. Bytes written to a file are durable after an fsync of the file. Until then each block of 4 KiB is new, old
  (zeros if the block did not exist), or torn between two versions at a multiple of 512 bytes. Each block may
  independently have any version since the last fsync.
- Sizes. The size of a file is independent of its bytes: the file may be long and full of zeros, or short.
- Fsyncs. An fsync covers the calls that ended before the fsync began, in crashes after the fsync has ended. An fsync of
  a file does not make the name of the file durable. An fsync of a folder does not make its own name durable, nor the
  bytes of its files.

The model excludes the following losses:

- Half a rename or exchange. Both names change, or neither.
- Reordered calls on one name. If a call survives, all earlier calls on its names survive.
- Loss or damage of durable data, foreign bytes in a file, a file under a name that the file never had.
- Any effect of sync_file_range, chmod or utime.
- A folder without a name, with files that have names elsewhere. If a mkdir is lost, the content of the folder is lost.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from torture.recorded_calls import ROOT, Entry, Mark, Names, Recording, Size, Sync, Synced, Write

BLOCK = 4096
SECTOR = 512

Data: TypeAlias = "str | int"
"""The surviving bytes of a file: "new" (all), "old" (the durable ones), "size" (only the size), or a seed for a mix."""

Kept: TypeAlias = frozenset[int]
"""Events that change names, are not durable, and survive all the same."""


@dataclass(frozen=True)
class Leaf:
    """A file, folder or symbolic link at a path of a state.

    Paths with an equal ``number`` are hard links of each other. ``versions``: the number of durable calls on the
    bytes, and the number of all calls on the bytes.
    """

    kind: str
    number: int
    versions: tuple[int, int] = (0, 0)
    data: Data = "new"


Tree: TypeAlias = dict[str, Leaf]


@dataclass
class Point:
    """A crash before the event number ``crash``.

    Attributes:
        begun: The newest step that was begun.
        done: The newest step that was reported as durable.
        durable: The durable names.
        loose: The events that change names and may be lost, in their order.
        versions: As in ``Leaf``, by file.
    """

    crash: int
    begun: int
    done: int
    durable: dict[Entry, int]
    loose: list[int]
    versions: dict[int, tuple[int, int]]


class Disk:
    """The possible states of one recording."""

    def __init__(self, recording: Recording, without: Collection[int] = ()) -> None:
        """``without``: the ends of fsyncs that the model ignores, to show which promises need these fsyncs."""
        self.recording = recording
        self._synced = {at for at in ends_of_syncs(recording) if at not in without}
        self._bytes: dict[int, list[int]] = {}  # events, by file
        self._needs: dict[int, set[int]] = {}  # the last events before, on the same names
        last: dict[Entry, int] = {}
        for at, event in enumerate(recording.events):
            if isinstance(event, Names):
                self._needs[at] = {last[entry] for entry in event.changes if entry in last}
                last.update(dict.fromkeys(event.changes, at))
            elif isinstance(event, (Write, Size)):
                self._bytes.setdefault(event.file, []).append(at)
        self.version = lru_cache(2048)(self._version)

    def points(self) -> list[Point]:
        """Return crashes with states that include those of all other crashes.

        A call that changes the disk adds states, because the call may be lost. Only the end of an fsync removes states.
        Each mark changes the promises. So the crashes just before fsyncs end, before marks, and at the end suffice.
        """
        events = self.recording.events
        crashes = [at for at, event in enumerate(events) if isinstance(event, Mark) or at in self._synced]
        return [self.point(crash) for crash in (*crashes, len(events))]

    def point(self, crash: int) -> Point:
        """Return the durable names and the calls that may be lost in a crash before event number ``crash``."""
        events = self.recording.events[:crash]
        until: dict[int | None, int] = {}  # by folder or file: calls before this event are durable
        for event in (events[at] for at in self._synced if at < crash):
            if isinstance(event, Synced) and isinstance(sync := events[event.begun], Sync):
                until[sync.file] = max(until.get(sync.file, 0), event.begun)
        for_all = until.pop(None, 0)

        def is_durable(at: int, *files: int) -> bool:
            return all(max(until.get(file, 0), for_all) > at for file in files)

        changes = {at: event for at, event in enumerate(events) if isinstance(event, Names)}
        covered = {at for at, event in changes.items() if is_durable(at, *(folder for folder, _ in event.changes))}
        covered = self.with_needs(covered)
        durable = self._applied({}, sorted(covered))
        loose = [at for at in changes if at not in covered]
        versions = {}
        for file, calls in self._bytes.items():
            if past := [at for at in calls if at < crash]:
                versions[file] = sum(is_durable(at, file) for at in past), len(past)
        marks = [event for event in events if isinstance(event, Mark)]
        begun = max((mark.step for mark in marks), default=0)
        done = max((mark.step for mark in marks if mark.is_done), default=0)
        return Point(crash, begun, done, durable, self._reachable(durable, loose), versions)

    def with_needs(self, events: Iterable[int]) -> set[int]:
        """Return events that change names, and all earlier events on which the events depend."""
        found, left = set(), list(events)
        while left:
            if (at := left.pop()) not in found:
                found.add(at)
                left += self._needs[at]
        return found

    def tree(self, point: Point, kept: Kept, data: Callable[[int], Data]) -> Tree:
        """Return the state with the loose events ``kept``. ``data`` returns the surviving bytes of a file in flight."""
        entries = self._applied(point.durable, sorted(kept))
        within: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), number in entries.items():
            within.setdefault(folder, []).append((name, number))
        tree: Tree = {}

        def walk(folder: int, above: str) -> None:
            for name, number in sorted(within.get(folder, ())):
                path, kind = above + name, self.recording.kinds[number]
                versions = point.versions.get(number, (0, 0))
                is_whole = kind != "f" or versions[0] == versions[1]
                tree[path] = Leaf(kind, number, versions, "new" if is_whole else data(number))
                if kind == "d":
                    walk(number, f"{path}/")

        walk(ROOT, "")
        return tree

    def bytes_of(self, leaf: Leaf) -> bytes:
        """Return the bytes of a file."""
        (durable, last), file = leaf.versions, leaf.number
        match leaf.data:
            case "new":
                return self.version(file, last)
            case "old":
                return self.version(file, durable)
            case "size":
                nbytes = len(self.version(file, last))
                return self.version(file, durable)[:nbytes].ljust(nbytes, b"\0")
        return _mixed([self.version(file, count) for count in range(durable, last + 1)], random.Random(leaf.data))

    def text(self, at: int) -> str:
        """Describe an event that changes names."""
        event = self.recording.events[at]
        return event.text if isinstance(event, Names) else type(event).__name__

    def _applied(self, entries: dict[Entry, int], events: Iterable[int]) -> dict[Entry, int]:
        found = dict(entries)
        for at in events:
            event = self.recording.events[at]
            if isinstance(event, Names):
                for entry, number in event.changes.items():
                    if number is None:
                        found.pop(entry, None)
                    else:
                        found[entry] = number
        return found

    def _reachable(self, durable: dict[Entry, int], loose: list[int]) -> list[int]:
        """Return the loose events in folders that some state contains. Other events do not matter."""
        changes = {at: event for at in loose if isinstance(event := self.recording.events[at], Names)}
        entries = [*durable.items()]
        entries += [(entry, file) for event in changes.values() for entry, file in event.changes.items() if file]
        within: dict[int, set[int]] = {}
        for (folder, _), number in entries:
            within.setdefault(folder, set()).add(number)
        found, left = set(), [ROOT]
        while left:
            if (folder := left.pop()) not in found:
                found.add(folder)
                left += within.get(folder, ())
        return [at for at, event in changes.items() if any(folder in found for folder, _ in event.changes)]

    def _version(self, file: int, count: int) -> bytes:
        """Return the bytes of a file after the first ``count`` calls."""
        if count == 0:
            return b""
        before, event = self.version(file, count - 1), self.recording.events[self._bytes[file][count - 1]]
        if isinstance(event, Size):
            return before[: event.nbytes].ljust(event.nbytes, b"\0")
        if not isinstance(event, Write):
            raise TypeError(event)
        end = event.offset + len(event.data)
        return before[: event.offset].ljust(event.offset, b"\0") + event.data + before[end:]


def ends_of_syncs(recording: Recording) -> list[int]:
    """Return the events that end an fsync."""
    return [at for at, event in enumerate(recording.events) if isinstance(event, Synced)]


def digest_of(tree: Tree, contents: Callable[[Leaf], bytes]) -> bytes:
    """Return a digest of names, hard links and bytes. ``contents``: the digest of a file's bytes."""
    whole, numbers = hashlib.blake2b(digest_size=16), {leaf.number: at for at, leaf in enumerate(tree.values())}
    for path, leaf in tree.items():
        content = contents(leaf) if leaf.kind == "f" else b""
        whole.update(f"{path}\0{leaf.kind}{numbers[leaf.number]}\0".encode() + content)
    return whole.digest()


def _mixed(versions: list[bytes], choice: random.Random) -> bytes:
    """Return a file of any version's size, with each block from any version. Some blocks are torn."""
    nbytes = len(choice.choice(versions))
    whole = bytearray(nbytes)
    for at in range(0, nbytes, BLOCK):
        one, two = choice.choice(versions), choice.choice(versions)
        cut = at + SECTOR * choice.randrange(BLOCK // SECTOR) if choice.random() < 0.3 else at + BLOCK
        block = one[at:cut].ljust(cut - at, b"\0") + two[cut : at + BLOCK].ljust(at + BLOCK - cut, b"\0")
        whole[at : at + BLOCK] = block[: nbytes - at]
    return bytes(whole)
