"""Attempts of ``object_store.py``: objects below the name of the attempt, finalized by the record."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from asyncckpt.errors import SaveTimeoutError, StorageError
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME, is_checkpoint_file
from asyncckpt.format.write_request import Existing
from asyncckpt.storage.objects import PART_BYTES, Objects, part_bytes_of
from asyncckpt.storage.record import (
    PARTS,
    Listing,
    PlaceRecord,
    change_record,
    digest,
    list_below,
    part_key,
    read_record,
    record_key,
)
from asyncckpt.storage.stock_names import hide, in_the_way, show, shown
from asyncckpt.storage.storage import LinkSource, OpenAttempt, OutputFile, exists_error

logger = logging.getLogger(__name__)


class ObjectAttempt(OpenAttempt):
    """A checkpoint being written to an object store."""

    def __init__(self, objects: Objects, place: str, attempt: str, nbytes: int) -> None:
        """Prepare the attempt. Nothing is sent yet.

        Args:
            objects: Objects of the bucket.
            place: Key of the checkpoint.
            attempt: Name of the attempt.
            nbytes: Number of bytes that this rank is going to write.
        """
        self._objects, self._place = objects, place
        self._listing: Listing | None = None
        self._digest = digest(attempt)
        self._parts = f"{place}/{PARTS}{self._digest}"
        self.path = f"{objects.base}/{self._parts}"
        self._part_bytes = part_bytes_of(nbytes)
        self._created: dict[str, ObjectFile] = {}
        self._copied: dict[str, tuple[str, int]] = {}  # e-tag and size of each file that was copied or linked

    def create(self, name: str, *, large: bool) -> ObjectFile:
        """Create a file. The manifest is kept in memory, because ``finalize`` writes it into the record."""
        if name in self._created:
            raise StorageError("this file is being written already", path=f"{self.path}/{name}")
        key = None if name == MANIFEST_NAME else part_key(self._parts, name)
        is_kept = posixpath.basename(name) in (MANIFEST_NAME, METADATA_NAME)
        self._created[name] = ObjectFile(self._objects, f"{self.path}/{name}", key, self._part_bytes, is_kept)
        return self._created[name]

    def copy(self, name: str, nbytes: int, parts: Callable[[], Iterator[memoryview]]) -> None:
        key = part_key(self._parts, name)
        if nbytes <= PART_BYTES:
            e_tag = self._objects.put(key, b"".join(parts()))
        else:
            e_tag = send_parts(self._objects, key, lambda: nbytes, parts, part_bytes_of(nbytes))
        self._copied[name] = e_tag, nbytes

    def link_source(self, name: str) -> LinkSource | None:
        created = self._created.get(name)
        e_tag, nbytes = self._copied.get(name) or ((created.e_tag, created.nbytes) if created is not None else ("", 0))
        return LinkSource(part_key(self._parts, name), (e_tag, nbytes)) if e_tag else None

    def link(self, name: str, source: LinkSource) -> bool:
        """Link the file by a copy on the server side of the store."""
        key = part_key(self._parts, name)
        try:
            found = self._objects.head(source.place)
            if found is None or (found.e_tag, found.nbytes) != source.facts:
                return False
            self._objects.copy(source.place, key, found.nbytes)
            copied = self._objects.head(key)
        except StorageError as error:
            logger.warning("%s is written again, though it has not changed: %s", self.path, error)
            return False
        if copied is None or copied.nbytes != found.nbytes:
            return False
        self._copied[name] = copied.e_tag, copied.nbytes
        return True

    def names(self) -> set[str]:
        self._listing = list_below(self._objects, self._place)
        return self._listing.of_attempt(self._digest).keys() | ({MANIFEST_NAME} & self._created.keys())

    def read(self, name: str) -> bytes | None:
        got = self._objects.get(part_key(self._parts, name))
        return None if got is None else got[0]

    def claim(self, name: str) -> bool:
        return self._objects.put_if(part_key(self._parts, name), b"", None)

    def finalize(self, existing: Existing) -> None:
        final = f"{self._objects.base}/{self._place}"
        manifest = self._created[MANIFEST_NAME].kept
        metadata = {name: file.kept for name, file in self._created.items() if name != MANIFEST_NAME and file.kept}
        there, self._listing = self._listing or list_below(self._objects, self._place), None
        is_strange = existing in ("refuse", "replace") and not may_replace(self._objects, self._place, there, existing)
        aside: dict[str, str] = {}  # for checkpoints set aside: key of the new record, by place of the files
        before = PlaceRecord()  # the replaced record, kept here in case the store's answer is lost

        def decide(record: PlaceRecord) -> PlaceRecord | None:
            nonlocal before
            if record.is_of(self._digest):
                return None  # the change was made, but its answer was lost
            if self._digest in record.revoked:
                raise StorageError("this attempt was revoked", path=self.path)
            if is_strange or (existing == "refuse" and record.is_finalized):
                raise exists_error(final, existing)
            if existing == "set aside" and record.is_finalized and record.parts not in aside:
                aside[record.parts] = keep_aside(self._objects, self._place, record, "abandoned")
            before = record
            return PlaceRecord(manifest, PARTS + self._digest, record.revoked)

        try:
            change_record(self._objects, self._place, decide, is_new=there.own_record is None)
        except StorageError as error:
            if not self._was_decided(error):
                self._objects.delete([*aside.values()])
                raise
        # The attempt is finalized. A later save repairs any failure from here on.
        try:
            files = shown(there.of_attempt(self._digest))
            hide(self._objects, self._place, in_the_way(shown(there.parts.get(before.parts, {})), files))
            show(self._objects, self._place, self._digest, files, metadata)
            if existing in ("replace", "join"):
                remove_parts(self._objects, self._place, before)
        except StorageError as error:
            logger.warning("%s is complete for asyncckpt, and not yet for stock readers: %s", final, error)

    def discard(self, names: Sequence[str] | None = None) -> None:
        for file in self._created.values():
            file.close()
        try:
            # Revoke first, because a request that finalizes the attempt may still be on its way. After the revocation
            # this request fails.
            if revoke_attempt(self._objects, self._place, self._digest):
                return
            if names is None:
                remove_attempt(self._objects, self._place, self._digest)
            else:
                self._objects.delete([part_key(self._parts, name) for name in names])
        except StorageError as error:
            logger.warning("unfinished objects of %s stay for now: %s", self.path, error)

    def release(self) -> None:
        pass

    def _was_decided(self, error: StorageError) -> bool:
        """Return whether the attempt is finalized despite ``error``. If not, revoke the attempt."""
        try:
            return revoke_attempt(self._objects, self._place, self._digest)
        except StorageError:
            raise SaveTimeoutError(
                f"storage fails ({error.message}), and the outcome of the save is not known", path=error.path
            ) from error


class ObjectFile(OutputFile):
    """A new object. Its pieces are sent without a copy: during the writes if there are several, otherwise by ``sync``.

    The last piece is always held back, because ``truncate`` may cut it.
    """

    direct = False

    def __init__(self, objects: Objects, path: str, key: str | None, part_bytes: int, is_kept: bool) -> None:
        """Prepare the object. Nothing is sent yet.

        Args:
            objects: Objects of the bucket.
            path: Path for errors.
            key: Key of the object; None: send nothing.
            part_bytes: Number of bytes to send in one request.
            is_kept: Whether to keep a copy of the bytes in ``kept`` after ``sync``.
        """
        self.path = path
        self.kept = b""
        self.e_tag, self.nbytes = "", 0
        """The object's e-tag and size; empty if the store has not reported them."""
        self._is_kept = is_kept
        self._objects, self._key, self.piece_bytes = objects, key, part_bytes
        self._changed = threading.Condition()
        self._pieces: dict[int, memoryview] = {}
        self._is_whole = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def write(self, data: memoryview, offset: int) -> None:
        """Queue ``data``. Its memory must not change until ``sync`` or ``close`` has returned."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if data.nbytes:
                self._pieces[offset] = data
            self._changed.notify_all()
            if self._thread is None and self._key is not None and offset >= self.piece_bytes:
                self._thread = threading.Thread(
                    target=self._send, args=(self._key,), name="asyncckpt-upload", daemon=True
                )
                self._thread.start()

    def truncate(self, nbytes: int) -> None:
        with self._changed:
            for offset in [each for each in self._pieces if each + len(self._pieces[each]) > nbytes]:
                self._pieces[offset] = self._pieces[offset][: max(0, nbytes - offset)]
                if not self._pieces[offset]:
                    del self._pieces[offset]

    def sync(self) -> None:
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()
        pieces = [self._pieces[offset] for offset in sorted(self._pieces)]
        self.nbytes = sum(map(len, pieces))
        if self._is_kept:
            self.kept = b"".join(pieces)
        if self._thread is not None:
            self._thread.join()
            if self._failure is not None:
                raise self._failure
        elif self._key is not None:
            self.e_tag = self._objects.put(self._key, pieces[0] if len(pieces) == 1 else b"".join(pieces))
        self._pieces.clear()  # release their memory

    def close(self) -> None:
        """Stop sending. Discard an incomplete object, on the store too."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._pieces.clear()

    def _send(self, key: str) -> None:
        try:
            self.e_tag = send_parts(self._objects, key, self._length, self._in_order, self.piece_bytes)
        except BaseException as error:
            with self._changed:
                self._failure = error

    def _length(self) -> int | None:
        """Return the number of bytes of the object; None if the number is not known yet."""
        ends = (at + len(piece) for at, piece in self._pieces.items())
        return max(ends, default=0) if self._is_whole else None

    def _in_order(self) -> Iterator[memoryview]:
        """Yield the pieces in the order of their offsets. Yield a piece only when it can no longer change."""
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(partial(self._may_go_on, at))
                if not self._is_whole and self._is_closed:
                    raise StorageError("the rest of the file was never written", path=self.path)
                piece = self._pieces.get(at)
            if piece is None:
                if at < max(self._pieces, default=0):
                    raise StorageError(f"nothing was written at byte {at:,}", path=self.path)
                return
            yield piece
            at += len(piece)

    def _may_go_on(self, at: int) -> bool:
        """Return whether the piece at ``at`` is final, because another piece follows or the object is complete."""
        piece = self._pieces.get(at)
        return self._is_closed or self._is_whole or (piece is not None and at + len(piece) in self._pieces)


def send_parts(
    objects: Objects,
    key: str,
    length: Callable[[], int | None],
    parts: Callable[[], Iterator[memoryview]],
    part_bytes: int,
) -> str:
    """Send an object by ``Objects.put_parts``, and recover from a lost answer. Return its e-tag.

    An object sent in parts exists only when it is complete. So if the object exists with the right size, only the
    answer was lost. ``length``: return the size of the object in bytes, or None while it is unknown.
    """
    try:
        return objects.put_parts(key, parts, part_bytes)
    except StorageError:
        with contextlib.suppress(StorageError):
            if (nbytes := length()) is not None and (found := objects.head(key)) is not None and found.nbytes == nbytes:
                return found.e_tag
        raise


def may_replace(objects: Objects, place: str, there: Listing, existing: Existing) -> bool:
    """Return whether a checkpoint may be put in place of the objects in ``there``.

    "refuse" allows no objects at all, "replace" allows objects of checkpoints. Raises ``StorageError``.
    """
    strange = [name for name in there.seen if not is_checkpoint_file(name)]
    if existing == "replace" and strange and there.own_record is not None:
        record, _ = read_record(objects, place)
        its = shown(there.parts.get(record.parts, {}))
        strange = [name for name in strange if name not in its]
    return not there.seen or (existing == "replace" and not strange)


def revoke_attempt(objects: Objects, place: str, its: str) -> bool:
    """Revoke the attempt with the digest ``its``, unless it is finalized. Return whether it is finalized.

    Raises ``StorageError``.
    """

    def revoke(record: PlaceRecord) -> PlaceRecord | None:
        if record.is_finalized and not record.parts:
            raise StorageError(f"{MANIFEST_NAME} is damaged: remove it", path=f"{objects.base}/{place}")
        return None if record.is_of(its) or its in record.revoked else record.revoking(its)

    return change_record(objects, place, revoke).is_of(its)


def keep_aside(objects: Objects, place: str, record: PlaceRecord, why: str) -> str:
    """Give a checkpoint a second place: ``place.why-1``, or the next free number. Its files stay where they are.

    Returns the key of the new record. Raises ``StorageError``.
    """
    number = 1
    parts = record.parts if record.parts.startswith("../") else f"../{place.rpartition('/')[2]}/{record.parts}"
    aside = PlaceRecord(record.manifest, parts).encode()
    while not objects.put_if(key := record_key(f"{place}.{why}-{number}"), aside, None):
        if (found := objects.get(key)) is not None and found[0] == aside:
            break  # the record was written, but the answer was lost
        number += 1
    logger.warning("the checkpoint %s/%s was renamed to %s.%s-%d", objects.base, place, place, why, number)
    return key


def remove_parts(objects: Objects, place: str, record: PlaceRecord) -> None:
    """Remove the files of the attempt that was finalized at ``place``, unless the record of another place names them.

    Raises ``StorageError``.
    """
    parts = posixpath.normpath(f"{place}/{record.parts}")
    if record.parts and PARTS in parts and not is_named(objects, parts, but=place):
        remove_attempt(objects, posixpath.dirname(parts), posixpath.basename(parts).removeprefix(PARTS))


def is_named(objects: Objects, parts: str, but: str = "") -> bool:
    """Return whether any checkpoint, except at the place ``but``, consists of the files at ``parts``.

    This is the attempt's own checkpoint, or a checkpoint that was set aside. Raises ``StorageError``.
    """
    owner = posixpath.dirname(parts)
    others = [each for each in objects.folders(posixpath.dirname(owner)) if each.startswith(f"{owner}.")]
    for other in {owner, *others} - {but}:
        its, _ = read_record(objects, other)
        if its.is_finalized and posixpath.normpath(f"{other}/{its.parts}") == parts:
            return True
    return False


def remove_attempt(objects: Objects, place: str, its: str) -> None:
    """Remove all files of the attempt with the digest ``its``. Raises ``StorageError``."""
    objects.delete([each.key for each in list_below(objects, place).of_attempt(its).values()])
