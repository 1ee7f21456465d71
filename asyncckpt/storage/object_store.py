"""Object stores as storage. One object, changed only by conditional writes, decides about a checkpoint.

A checkpoint has these objects below its place:

- ``.parts-DIGEST/``: the files of one attempt. No other attempt writes there.
- ``asyncckpt.json``: the record (``record.py``), which names the finalized attempt.
- The files for stock readers (``stock_names.py``), made when the attempt is finalized: ``.metadata``, and copies of the
  other files of a set at their own names.

Callers of this interface see the files of the finalized attempt by their own names, and no internal objects. There are
no locks: a checkpoint may be removed while it is read, and attempts under way are not visible.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Generator, Iterator, Sequence

from asyncckpt.errors import CheckpointNotFoundError, StorageError
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME, Manifest
from asyncckpt.format.write_request import Existing
from asyncckpt.storage import object_sweep, record
from asyncckpt.storage.object_attempt import (
    ObjectAttempt,
    keep_aside,
    may_replace,
    remove_attempt,
    remove_parts,
    revoke_attempt,
)
from asyncckpt.storage.objects import Found, Objects, split_address
from asyncckpt.storage.record import (
    PARTS,
    PlaceRecord,
    change_record,
    digest,
    list_below,
    part_key,
    read_record,
    record_key,
)
from asyncckpt.storage.stock_names import has_copies, hide, is_under_way, show, shown
from asyncckpt.storage.storage import FileStamp, InputFile, Resolution, Storage

_MOST_REMEMBERED = 256
# Without locks, a worker that retries a request for a long time must not be taken for dead.
_LEAST_ORPHAN_S = 900.0


class ObjectStorage(Storage):
    """The objects of one bucket."""

    has_locks = False

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._parts: dict[str, str] = {}
        """By key of a checkpoint: the place of its files, as recorded when the manifest was last read."""

    def begin_checkpoint(
        self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None, *, linked_bytes: int = 0
    ) -> ObjectAttempt:
        place = self._key(final)
        if not place:
            raise StorageError("a checkpoint goes below a bucket, not in its place", path=final)
        if orphan_s is not None:
            object_sweep.sweep(self._objects, posixpath.dirname(place), max(orphan_s, _LEAST_ORPHAN_S))
            object_sweep.renew(self._objects, place)
        return ObjectAttempt(self._objects, place, attempt, nbytes)

    def has_claimed(self, final: str, attempt: str, name: str) -> bool:
        return self._objects.head(part_key(f"{self._key(final)}/{PARTS}{digest(attempt)}", name)) is not None

    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> ObjectAttempt:
        raise StorageError("single files are saved to file systems, not to object stores", path=final)

    def resolve(self, final: str, attempt: str, existing: Existing, inode: int | None = None) -> Resolution:
        place, its = self._key(final), digest(attempt)
        if not revoke_attempt(self._objects, place, its):
            return Resolution(False, self._leftover(place, its))
        with contextlib.suppress(StorageError):  # the worker may have died before this step
            files = shown(list_below(self._objects, place).of_attempt(its))
            if not has_copies(files):  # copies would take too long here, so ``sweep`` makes them
                show(self._objects, place, its, files)
        return Resolution(True, None)

    def revoke(self, final: str, attempt: str) -> str | None:
        place, its = self._key(final), digest(attempt)
        return None if revoke_attempt(self._objects, place, its) else self._leftover(place, its)

    def remove(self, leftover: str | None) -> None:
        if leftover is not None and PARTS in leftover:
            place, parts = posixpath.split(self._key(leftover))
            with contextlib.suppress(StorageError):
                remove_attempt(self._objects, place, parts.removeprefix(PARTS))

    def is_finalized(self, final: str, attempt: str, inode: int | None = None) -> bool:
        found, _ = read_record(self._objects, self._key(final))
        if found.is_finalized and not found.parts:
            Manifest.parse(found.manifest, record_key(final))  # raise an error for the damaged record
        return found.is_of(digest(attempt))

    def may_put(self, path: str, existing: Existing) -> bool:
        if existing in ("join", "set aside"):
            return True
        place = self._key(path)
        return may_replace(self._objects, place, list_below(self._objects, place), existing)

    def check_file_place(self, path: str) -> None:
        raise StorageError("single files are saved to file systems, not to object stores", path=path)

    def names_in(self, folder: str) -> list[str]:
        place = self._key(folder)
        listing = list_below(self._objects, place)
        names = {name.partition("/")[0] for name in listing.seen}
        if listing.own_record is not None:
            record, _ = read_record(self._objects, place)
            its = listing.parts.get(record.parts, {}).keys() | self._names_elsewhere(place, record)
            names |= {name.partition("/")[0] for name in its}
        return sorted(names)

    def stamps_in(self, folder: str, name: str) -> dict[str, FileStamp | None]:
        seen = list_below(self._objects, self._key(folder)).seen
        return {
            each: _stamp(found) if (found := seen.get(f"{each}/{name}")) is not None else None
            for each in {path.partition("/")[0] for path in seen}
        }

    def exists(self, path: str) -> bool:
        if posixpath.basename(path) == MANIFEST_NAME:
            found = self._objects.head(self._key(path))
            return found is not None and record.is_finalized(found)
        return bool(list_below(self._objects, self._key(path)).seen) or self._find(path) is not None

    def size(self, path: str) -> int | None:
        if posixpath.basename(path) == MANIFEST_NAME:
            return len(self.read(path)) if self.exists(path) else None
        found = self._find(path)
        return None if found is None else found.nbytes

    def stamp(self, path: str) -> FileStamp | None:
        found = self._find(path)
        if found is None or (posixpath.basename(path) == MANIFEST_NAME and not record.is_finalized(found)):
            return None
        return _stamp(found)

    def read(self, path: str) -> bytes:
        if posixpath.basename(path) == MANIFEST_NAME:
            place = posixpath.dirname(self._key(path))
            found, _ = read_record(self._objects, place)
            self._remember(place, found)
            if found.is_finalized:
                return found.manifest
        else:
            for key in self._keys(path):
                if (got := self._objects.get(key)) is not None:
                    return got[0]
        raise StorageError("reading failed: there is no such object", path=path)

    def open(self, path: str) -> ObjectInputFile:
        found = self._find(path)
        if found is None:
            raise StorageError("opening failed: there is no such object", path=path)
        return ObjectInputFile(self._objects, path, found)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Check that the checkpoint exists. There are no locks, so the checkpoint may still be removed."""
        if not self.exists(path):
            raise CheckpointNotFoundError("there is no checkpoint here", path=path)
        yield

    def attempts_under_way(self, folder: str) -> list[str]:
        """Return an empty list, because attempts of other workers are not visible."""
        return []

    def take_name(self, path: str) -> str | None:
        place = self._key(path)
        if is_under_way(self._objects, place):
            return None  # otherwise files that are being copied would be left over
        found = self._finalized(path)
        self._hide(place, found)
        self._unname(place, found)
        remove_parts(self._objects, place, found)
        return ""

    def advance(self, path: str, text: str, at: int) -> bool:
        self._objects.put(self._key(path), text.encode())
        return True

    def set_aside(self, path: str, why: str) -> None:
        place = self._key(path)
        found = self._finalized(path)
        keep_aside(self._objects, place, found, why)
        self._hide(place, found)
        self._unname(place, found)

    def _finalized(self, path: str) -> PlaceRecord:
        found, _ = read_record(self._objects, self._key(path))
        if not found.is_finalized:
            raise StorageError("there is no checkpoint to be moved or removed", path=path)
        return found

    def _hide(self, place: str, which: PlaceRecord) -> None:
        """Hide the files of a checkpoint at ``place`` from stock readers."""
        files = list_below(self._objects, place).parts.get(which.parts, {})
        hide(self._objects, place, {METADATA_NAME, *shown(files)})

    def _unname(self, place: str, which: PlaceRecord) -> None:
        """Remove a checkpoint from ``place``, unless its record has changed. The empty record stays until ``sweep``."""

        def unname(found: PlaceRecord) -> PlaceRecord | None:
            is_it = (found.manifest, found.parts) == (which.manifest, which.parts)
            return PlaceRecord(revoked=found.revoked) if is_it else None

        change_record(self._objects, place, unname)

    def _leftover(self, place: str, its: str) -> str | None:
        is_there = bool(list_below(self._objects, place).of_attempt(its))
        return f"{self._objects.base}/{place}/{PARTS}{its}" if is_there else None

    def _key(self, path: str) -> str:
        return split_address(path)[1]

    def _names_elsewhere(self, place: str, record: PlaceRecord) -> set[str]:
        """Return the files, at their original place, of a checkpoint that was set aside."""
        if not record.parts.startswith("../"):
            return set()
        owner, parts = posixpath.split(posixpath.normpath(f"{place}/{record.parts}"))
        return {*list_below(self._objects, owner).parts.get(parts, {})}

    def _find(self, path: str) -> Found | None:
        return next(filter(None, map(self._objects.head, self._keys(path))), None)

    def _keys(self, path: str) -> Iterator[str]:
        """Yield the possible keys of a file: among the files of a finalized attempt, or its own name."""
        key = self._key(path)
        if PARTS not in key and posixpath.basename(key) != MANIFEST_NAME:
            places = _folders_of(key)
            known = {place: parts for place in places if (parts := self._parts.get(place)) is not None}
            for place, parts in known.items():
                yield part_key(parts, key.removeprefix(f"{place}/"))
            for place in known or places[:1]:
                if (yield from self._as_recorded(place, key)):
                    return  # the object at the file's own name is only a copy
            yield key
            for place in () if known else places[1:]:
                yield from self._as_recorded(place, key)
        else:
            yield key

    def _as_recorded(self, place: str, key: str) -> Generator[str, None, bool]:
        """Yield the key of the file within the checkpoint at ``place``. Return whether the checkpoint has the file."""
        found, _ = read_record(self._objects, place)
        if not found.parts:
            return False
        name = key.removeprefix(f"{place}/")
        yield part_key(self._remember(place, found), name)
        return found.has(name)

    def _remember(self, place: str, found: PlaceRecord) -> str:
        if len(self._parts) >= _MOST_REMEMBERED:
            self._parts.pop(next(iter(self._parts)))
        self._parts[place] = parts = posixpath.normpath(f"{place}/{found.parts}")
        return parts


def _folders_of(key: str) -> list[str]:
    """Return the keys above ``key``, the nearest first."""
    parts = key.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _stamp(found: Found) -> FileStamp:
    modified = int(found.modified.timestamp()) * 10**9
    return FileStamp(modified, found.nbytes, int(digest(found.e_tag)[:15], 16))


class ObjectInputFile(InputFile):
    """An object, read in ranges."""

    alignment = 0
    run_bytes = 8 << 20  # each range is a request, with a latency of its own

    def __init__(self, objects: Objects, path: str, found: Found) -> None:
        self.path = path
        self._objects, self._found = objects, found

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        nbytes = min(sum(map(len, views)), self._found.nbytes - offset)
        if nbytes <= 0:
            return 0
        data = self._objects.get_range(self._found.key, offset, nbytes)
        done = 0
        for view in views:
            count = min(len(view), nbytes - done)
            view[:count] = data[done : done + count]
            done += count
        return done

    def read_in_place(self, views: Sequence[memoryview], offset: int) -> int | None:
        return None

    def close(self) -> None:
        pass
