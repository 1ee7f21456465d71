"""The uploader: copies committed checkpoints of a local folder to the root of the run, in the background.

It goes by notes (``upload_notes.py``), and so goes on where another worker has ended, or died. One worker at a time
uploads.

Where the root is slower than checkpoints come, one that waits makes way for a newer one, unless it has to be uploaded.
What fails is tried again, at the next save or after a pause, unless it cannot be mended.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from xxhash import xxh3_64

from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatError,
    StorageError,
    located,
)
from asyncckpt.format.index import Index
from asyncckpt.format.manifest import MANIFEST_NAME, Manifest, checksum
from asyncckpt.format.write_request import Existing, Upload
from asyncckpt.shm.segment import PAGE, round_up
from asyncckpt.storage.history import prune
from asyncckpt.storage.storage import FileStamp, InputFile, LinkSource, OpenAttempt, Storage, exists_error
from asyncckpt.storage.upload_notes import UploadNotes
from asyncckpt.storage.uploads import Uploaded, UploadsUnderWay
from asyncckpt.threads import start

logger = logging.getLogger(__name__)

_READ_BYTES = 16 << 20  # at once; a multiple of the page
# Each has some ten of these in memory, where it goes to an object store.
_FILES_AT_ONCE = 4
# Until what has failed is tried again, where no save comes.
_RETRY_S = 60.0
# How often it is looked whether another worker, whose trainer is gone, has ended its uploads.
_LOCK_S = 0.5
# What killed workers have left of uploads at the root goes with a later one, when it is as old as that.
_ORPHAN_S = 60.0
# What trying again does not mend.
_FINAL = (CheckpointExistsError, CheckpointNotFoundError, DamagedCheckpointError, FormatError)


class Uploader:
    """Carries out the notes of one local folder, on a thread of its own."""

    def __init__(
        self, local: str, storage_for: Callable[[str], Storage], tell: Callable[[Uploaded], object] = lambda _: None
    ) -> None:
        """Start the thread.

        Args:
            local: The local folder. What is noted there already is begun at once.
            storage_for: The storage that a path is in.
            tell: Given the end of each attempt at an upload.

        Raises:
            StorageError: The local folder refuses.
        """
        self._storage_for, self._tell = storage_for, tell
        self._notes = UploadNotes(local)
        self._linkable: dict[FileStamp, LinkSource] = {}
        self._unshown: dict[int, Upload] = {}  # by step: committed, and the local folder did not let the note say so
        self._noting = threading.Lock()  # guards these, and hidden notes
        for each in self._notes.hidden():  # of a worker that died just as it committed; no other is at work here
            try:
                is_committed = storage_for(local).is_finalized(each.path, each.attempt)
            except (DamagedCheckpointError, FormatError) as error:
                is_committed = False
                logger.warning("%s is not uploaded: %s", each.path, error)
            self.conclude(each, is_committed=is_committed)
        self._changed = threading.Condition()
        self._is_wanted = bool(self._notes.all())
        self._is_ending = False
        self._prunes = True
        self._failure: CheckpointError | None = None  # of one that is tried again
        self._loss: CheckpointError | None = None  # of one that is not; told once
        self._thread = threading.Thread(target=self._run, name="asyncckpt-uploader", daemon=True)
        start(self._thread)

    def note(self, upload: Upload) -> None:
        """Its checkpoint is about to be committed. Raises ``StorageError``."""
        with self._noting:
            self._unshown.pop(upload.step, None)
            self._notes.add(upload)

    def conclude(self, upload: Upload, *, is_committed: bool) -> None:
        """How that has ended. Raises ``StorageError``; what is committed is shown later, then."""
        with self._noting:
            if not is_committed:
                self._notes.drop(upload.step)
                return
            self._unshown[upload.step] = upload
            self._notes.show(upload.step)
            del self._unshown[upload.step]

    def begin(self) -> None:
        """A save is committed: upload what is noted, and try again what has failed."""
        with self._changed:
            self._is_wanted, self._failure = True, None
            self._changed.notify_all()

    def needs(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` has to stay. Raises nothing."""
        try:
            return step in self._notes.steps()
        except StorageError as error:
            logger.warning("what is to be uploaded cannot be seen, so nothing is removed: %s", error)
            return True

    def under_way(self) -> UploadsUnderWay:
        """What has not ended, and what went wrong. Raises ``StorageError``."""
        with self._changed:
            waiting = [*self._unshown.copy().values(), *self._notes.all()]
            loss, self._loss = self._loss, None
            return UploadsUnderWay(tuple(each.to for each in waiting), loss or (self._failure if waiting else None))

    def trainer_gone(self) -> None:
        """From now on no old checkpoints are removed from the root: another job may have it."""
        self._prunes = False

    def close(self) -> None:
        """Wait until all is uploaded, or one has failed, or another worker does it."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        is_elsewhere = False
        while True:
            with self._changed:
                limit = _LOCK_S if is_elsewhere else _RETRY_S
                self._changed.wait_for(lambda: self._is_wanted or self._is_ending, limit)
                is_last, self._is_wanted = self._is_ending, False
            try:
                self._show_again()
                is_elsewhere = not self._carry_out_all()
            except Exception:
                logger.exception("uploading failed")
            if is_last:
                return

    def _show_again(self) -> None:
        """What could not be shown when it was committed."""
        failure: StorageError | None = None
        with self._noting:
            for step, upload in list(self._unshown.items()):
                try:
                    self._notes.show(step)
                    del self._unshown[step]
                except StorageError as error:
                    logger.error("uploading %s failed: %s", upload.path, error)
                    failure = error
        if failure is not None:
            with self._changed:
                self._failure = failure

    def _carry_out_all(self) -> bool:
        """Upload what waits, until one has failed. Returns False where another worker is about to."""
        # Again after the lock: who has found it taken, after the last look, leaves its upload to this one.
        while self._notes.all():
            lock = self._notes.lock()
            if lock is None:
                return False
            try:
                while (upload := self._next()) is not None:
                    if not self._carry_out(upload):
                        return True
            finally:
                os.close(lock)
        return True

    def _next(self) -> Upload | None:
        """What to upload now, of what waits; None: nothing."""
        waiting = self._notes.all()
        for each in waiting[:-1]:
            if each.must:
                return each
            logger.warning("%s is not uploaded, as uploads take too long: %s goes instead", each.path, waiting[-1].path)
            self._notes.remove(each)
        return waiting[-1] if waiting else None

    def _carry_out(self, upload: Upload) -> bool:
        """Upload it. Returns whether to go on with the next."""
        begun = time.time()
        try:
            manifest = copy_checkpoint(upload, self._storage_for, self._linkable)
        except Exception as error:
            failure = located(error, path=upload.to, rank=0, step=upload.step)
            logger.error("uploading %s failed: %s", upload.path, failure)
            is_final = isinstance(failure, _FINAL)
            with self._changed:
                self._failure, self._loss = (None, failure) if is_final else (failure, self._loss)
            if is_final:
                self._notes.remove(upload)
            self._tell(
                Uploaded(upload.to, upload.step, time.time() - begun, None, f"{type(failure).__name__}: {failure}")
            )
            return is_final
        with self._changed:
            self._failure = None
        logger.info("%s is uploaded, in %.1f s", upload.path, time.time() - begun)
        took = None if manifest is None else max(0.0, time.time() - manifest.created)
        self._tell(Uploaded(upload.to, upload.step, took, None if manifest is None else manifest.nbytes))
        self._notes.note_success()
        if upload.keep_last is not None and self._prunes:
            prune(os.path.dirname(upload.to), upload.keep_last, lambda step: step == upload.step)
        self._notes.remove(upload)  # whoever waits, waits for all of it
        return True


def copy_checkpoint(
    upload: Upload, storage_for: Callable[[str], Storage], linkable: dict[FileStamp, LinkSource] | None = None
) -> Manifest | None:
    """Copy a checkpoint, each byte checked, to where it is complete or not there; if it is there, nothing is done.

    ``linkable``: what large files, which this checkpoint may share, are at the other place since the last copy; it is
    changed to those of this one. Returns its manifest; None where it is there. Raises ``CheckpointNotFoundError``,
    ``DamagedCheckpointError``, ``CheckpointExistsError``, ``StorageError``.
    """
    source, target = storage_for(upload.path), storage_for(upload.to)
    with source.reading(upload.path):
        manifest = _manifest(source, upload.path)
        if upload.attempt not in ("", manifest.attempt):
            raise CheckpointNotFoundError("another checkpoint has taken its place", path=upload.path)
        if _is_there(target, upload.to, manifest):
            return None
        existing: Existing = "set aside" if upload.sets_aside else "refuse"
        if not target.may_put(upload.to, existing):
            raise exists_error(upload.to, existing, upload.step)
        name = f"{secrets.token_hex(6)}-{upload.step}"
        orphan_s = _ORPHAN_S if target.has_locks else upload.timeout
        attempt = target.begin_checkpoint(upload.to, name, manifest.nbytes, orphan_s)
        try:
            linkable = {} if linkable is None else linkable
            copied = _copy_files(source, upload.path, manifest, attempt, linkable)
            _write(attempt, MANIFEST_NAME, replace(manifest, attempt=name, keep=upload.keep).encode())
            if missing := attempt.missing(manifest.files.keys()):
                raise StorageError(f"{min(missing)} was written, and is not there", path=attempt.path)
            attempt.finalize(existing)
        except BaseException:
            attempt.discard()
            raise
        attempt.release()
        linkable.clear()
        linkable.update(copied)
        return manifest


def _copy_files(
    source: Storage, folder: str, manifest: Manifest, attempt: OpenAttempt, linkable: Mapping[FileStamp, LinkSource]
) -> dict[FileStamp, LinkSource]:
    """Some at a time. The first that fails ends the others. Returns what the next copy may link."""
    failures: list[BaseException] = []
    copied: dict[FileStamp, LinkSource] = {}

    def copy(name: str) -> None:
        try:
            stamp = source.stamp(os.path.join(folder, name)) if "index" in manifest.files[name] else None
            known = None if stamp is None else linkable.get(stamp)
            if not failures and (known is None or not attempt.link(name, known)):
                _copy_file(source, folder, manifest, name, attempt, failures)
            if stamp is not None and not failures and (its := attempt.link_source(name)) is not None:
                copied[stamp] = its
        except BaseException as error:
            failures.append(error)

    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="asyncckpt-copy") as pool:
        for name in manifest.files:
            pool.submit(copy, name)
    if failures:
        raise failures[0]
    return copied


def _copy_file(
    source: Storage, folder: str, manifest: Manifest, name: str, attempt: OpenAttempt, failures: list[BaseException]
) -> None:
    facts, path = manifest.files[name], os.path.join(folder, name)
    if "index" not in facts:
        _write(attempt, name, _small_file(source, path, facts["xxh3"]))
        return
    where = os.path.join(folder, facts["index"])
    index = Index.parse(_small_file(source, where, manifest.files[facts["index"]]["xxh3"]), where)
    with contextlib.closing(source.open(path)) as file:
        attempt.copy(name, facts["bytes"], partial(_checked_parts, file, index, failures))


def _manifest(source: Storage, path: str) -> Manifest:
    name = os.path.join(path, MANIFEST_NAME)
    if not source.exists(name):
        raise CheckpointNotFoundError("there is no checkpoint here any more", path=path)
    return Manifest.parse(source.read(name), name)


def _is_there(target: Storage, path: str, manifest: Manifest) -> bool:
    """Whether it was copied already, and nobody heard of it."""
    with contextlib.suppress(DamagedCheckpointError, FormatError):
        if target.exists(os.path.join(path, MANIFEST_NAME)):
            found = _manifest(target, path)
            return (found.step, found.created) == (manifest.step, manifest.created)
    return False


def _small_file(source: Storage, path: str, expected: str) -> bytes:
    data = source.read(path)
    if f"{checksum(data):016x}" != expected:
        raise DamagedCheckpointError("the file is damaged: its checksum does not match", path=path)
    return data


def _write(attempt: OpenAttempt, name: str, data: bytes) -> None:
    with contextlib.closing(attempt.create(name, large=False)) as file:
        file.write(memoryview(data), 0)
        file.sync()


def _parts(file: InputFile, nbytes: int, failures: list[BaseException]) -> Iterator[memoryview]:
    """The bytes of ``file``, in memory of their own."""
    for begin in range(0, nbytes, _READ_BYTES):
        if failures:
            raise StorageError("another file of it has failed", path=file.path)
        size = min(_READ_BYTES, nbytes - begin)
        # Not one buffer for all: what is sent is still read while the next is asked for.
        part = memoryview(mmap.mmap(-1, max(round_up(size), PAGE)))
        if file.read([part], begin) < size:
            raise DamagedCheckpointError("the file is damaged: it is shorter than it was written", path=file.path)
        yield part[:size]


def _checked_parts(file: InputFile, index: Index, failures: list[BaseException]) -> Iterator[memoryview]:
    """As ``_parts``; the last of a span only once that was found to be good."""
    bounds, digest, span = index.bounds, xxh3_64(), 0
    begin = 0
    for part in _parts(file, bounds[-1], failures):
        at, end = begin, begin + len(part)
        while at < end:
            stop = min(end, bounds[span + 1])
            digest.update(part[at - begin : stop - begin])
            if stop == bounds[span + 1]:
                if digest.intdigest() != index.checksums[span]:
                    raise DamagedCheckpointError(index.damage(bounds[span], stop), path=file.path)
                digest.reset()
                span += 1
            at = stop
        yield part
        begin = end
