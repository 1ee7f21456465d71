"""Object stores, a kind of storage: a checkpoint is decided by one object that is only ever changed on a condition.

Below the place of a checkpoint stand

- ``.parts-DIGEST/``: the files of one attempt; no other attempt writes there;
- ``asyncckpt.json``: the record (``record.py``), which says which attempt is finalized;
- ``.metadata``: DCP's, with the names of the data files as they stand there; for stock readers, and so written last.

Who looks through this seam sees the files of the finalized attempt by their own names, and of all else that is ours
nothing. There are no locks: what is being read may be removed, and who is writing is not seen.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
from collections.abc import Iterator, Sequence

from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME, Manifest, is_checkpoint_file
from asyncckpt.worker.messages import Existing
from asyncckpt.worker.storage import object_sweep, record
from asyncckpt.worker.storage.object_attempt import (
    ObjectAttempt,
    keep_aside,
    publish_metadata,
    remove_below,
    remove_parts,
)
from asyncckpt.worker.storage.objects import Found, Objects, split_address
from asyncckpt.worker.storage.record import PARTS, Record, change_record, digest, read_record, record_key
from asyncckpt.worker.storage.storage import FileStamp, InputFile, Resolution, Storage

logger = logging.getLogger(__name__)


class ObjectStorage(Storage):
    """The objects of one bucket."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def begin_checkpoint(self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None) -> ObjectAttempt:
        place = self._key(final)
        if orphan_s is not None:
            object_sweep.sweep(self._objects, posixpath.dirname(place), orphan_s)
        return ObjectAttempt(self._objects, place, attempt, nbytes, lambda existing: self.may_put(final, existing))

    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> ObjectAttempt:
        raise StorageError("single files are saved to file systems, not to object stores", path=final)

    def resolve(self, final: str, attempt: str, existing: Existing, inode: int | None = None) -> Resolution:
        leftover = self.revoke(final, attempt)
        is_finalized = self.is_finalized(final, attempt)
        if is_finalized:
            with contextlib.suppress(StorageError):
                self._complete(self._key(final), digest(attempt))
        return Resolution(is_finalized, leftover)

    def revoke(self, final: str, attempt: str) -> str | None:
        place, its = self._key(final), digest(attempt)

        def mark(found: Record) -> Record | None:
            return None if found.is_of(its) or its in found.revoked else found.revoking(its)

        if change_record(self._objects, place, mark).is_of(its):
            return None
        parts = f"{place}/{PARTS}{its}"
        return f"{self._objects.base}/{parts}" if any(True for _ in self._objects.list(parts)) else None

    def remove(self, leftover: str | None) -> None:
        if leftover is not None and PARTS in leftover:
            with contextlib.suppress(StorageError):
                remove_below(self._objects, self._key(leftover))

    def is_finalized(self, final: str, attempt: str, inode: int | None = None) -> bool:
        found, _ = read_record(self._objects, self._key(final))
        if found.is_finalized and not found.parts:
            Manifest.parse(found.manifest, record_key(final))  # it is damaged: this says how
        return found.is_of(digest(attempt))

    def may_put(self, path: str, existing: Existing) -> bool:
        if existing == "set aside":
            return True
        if self._objects.head(self._key(path)) is not None:
            return False
        if existing == "join":
            return True
        names = self._files(path)
        if existing == "refuse" or not names or all(map(is_checkpoint_file, names)):
            return not names or existing == "replace"
        with contextlib.suppress(StorageError, DamagedCheckpointError):
            manifest = Manifest.parse(self.read(record_key(path)), path)
            return names <= {MANIFEST_NAME, *manifest.files}
        return False

    def check_file_place(self, path: str) -> None:
        raise StorageError("single files are saved to file systems, not to object stores", path=path)

    def names_in(self, folder: str) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._files(folder)})

    def exists(self, path: str) -> bool:
        if posixpath.basename(path) == MANIFEST_NAME:
            found = self._objects.head(self._key(path))
            return found is not None and record.is_finalized(found)
        return self._find(path) is not None or bool(self._files(path))

    def size(self, path: str) -> int | None:
        if posixpath.basename(path) == MANIFEST_NAME:
            return len(self.read(path)) if self.exists(path) else None
        found = self._find(path)
        return None if found is None else found.nbytes

    def stamp(self, path: str) -> FileStamp | None:
        found = self._find(path)
        if found is None or (posixpath.basename(path) == MANIFEST_NAME and not record.is_finalized(found)):
            return None
        modified = int(found.modified.timestamp()) * 10**9
        return FileStamp(modified, found.nbytes, int(digest(found.e_tag)[:15], 16))

    def read(self, path: str) -> bytes:
        if posixpath.basename(path) == MANIFEST_NAME:
            found, _ = read_record(self._objects, posixpath.dirname(self._key(path)))
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
        """Nothing is held: there are no locks."""
        if not self.exists(path):
            raise CheckpointNotFoundError("there is no checkpoint here", path=path)
        yield

    def attempts_under_way(self, folder: str) -> list[str]:
        """None: who writes is not seen."""
        return []

    def remove_checkpoint(self, path: str) -> bool:
        place = self._key(path)

        def unname(found: Record) -> Record:
            if not found.is_finalized:
                raise StorageError("removing a checkpoint failed: there is none", path=path)
            return Record(revoked=found.revoked)

        removed = change_record(self._objects, place, unname)
        self._objects.delete([f"{place}/{METADATA_NAME}"])
        remove_parts(self._objects, place, removed)
        if not removed.revoked:
            self._objects.delete([record_key(place)])
        return True

    def set_aside(self, path: str, why: str) -> None:
        place = self._key(path)
        found, version = read_record(self._objects, place)
        if not found.is_finalized or version is None:
            raise StorageError("setting a checkpoint aside failed: there is none", path=path)
        keep_aside(self._objects, place, found, why)
        if self._objects.put_if(record_key(place), Record(revoked=found.revoked).encode(), version):
            self._objects.delete([f"{place}/{METADATA_NAME}"])

    def _key(self, path: str) -> str:
        return split_address(path)[1]

    def _complete(self, place: str, its: str) -> None:
        """Give stock readers the ``.metadata`` of a checkpoint whose worker died before it did. Raises as ``read``."""
        metadata = self._objects.get(f"{place}/{PARTS}{its}/{METADATA_NAME}")
        if metadata is not None and self._objects.head(f"{place}/{METADATA_NAME}") is None:
            publish_metadata(self._objects, place, its, metadata[0])

    def _files(self, folder: str) -> set[str]:
        """All files in a folder and below it, as they are seen: those of finalized attempts under their own names."""
        place = self._key(folder)
        found, _ = read_record(self._objects, place) if place else (Record(), None)
        names = object_sweep.seen_names(self._objects, place)
        if found.is_finalized:
            parts = posixpath.normpath(f"{place}/{found.parts}")
            names |= (
                {each.key.removeprefix(f"{parts}/") for each in self._objects.list(parts)} if found.parts else set()
            )
        return names

    def _find(self, path: str) -> Found | None:
        return next(filter(None, map(self._objects.head, self._keys(path))), None)

    def _keys(self, path: str) -> Iterator[str]:
        """Where a file may stand: with those of a finalized attempt, or by itself."""
        key = self._key(path)
        if PARTS not in key and posixpath.basename(key) != MANIFEST_NAME:
            place, name = posixpath.split(key)
            found, _ = read_record(self._objects, place) if place else (Record(), None)
            if found.parts:
                yield posixpath.normpath(f"{place}/{found.parts}/{name}")
        yield key


class ObjectInputFile(InputFile):
    """An object, read in ranges."""

    alignment = 0

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
