"""The uploader: copy committed checkpoints of a local folder to the root of the run, in the background.

The manifest of a local checkpoint says whether to upload the checkpoint. A marker beside the manifest says that the
checkpoint was uploaded, skipped or refused. So after the end or the death of a worker, the next worker continues. Only
one worker at a time uploads.

If uploads to the root are slower than saves, a newer checkpoint replaces a waiting checkpoint, unless the upload is
mandatory. A failed upload is retried, at the next save or after a pause, unless a retry cannot help.
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

from asyncckpt.budgets import CHECK_S
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
from asyncckpt.format.manifest import MANIFEST_NAME, UPLOADED_NAME, Manifest, Upload, checksum
from asyncckpt.format.write_request import Existing
from asyncckpt.shm.segment import round_up
from asyncckpt.storage import step_folder
from asyncckpt.storage.file_system import lock_alone, make_folder, translated
from asyncckpt.storage.history import StoredStep, history, prune
from asyncckpt.storage.storage import FileStamp, InputFile, LinkSource, OpenAttempt, Storage, exists_error
from asyncckpt.storage.uploads import Uploaded, UploadsUnderWay
from asyncckpt.threads import start

logger = logging.getLogger(__name__)

_LOCK_NAME = "asyncckpt.uploads"
_READ_BYTES = 16 << 20  # bytes of one read; a multiple of the page
# Number of files to copy at a time. Each copy to an object store has some ten parts in memory.
_FILES_AT_ONCE = 4
# Pause before the retry of a failed upload, unless a save comes first.
_RETRY_S = 60.0
# Minimum age of a leftover of a killed worker at the root before a later upload removes it.
_ORPHAN_S = 60.0
# Errors that a retry cannot help.
_FINAL = (CheckpointExistsError, CheckpointNotFoundError, DamagedCheckpointError, FormatError)


class Uploader:
    """Upload the checkpoints of one local folder, on a thread of its own."""

    def __init__(
        self, local: str, storage_for: Callable[[str], Storage], tell: Callable[[Uploaded], object] = lambda _: None
    ) -> None:
        """Start the thread. It begins with the checkpoints that are already waiting.

        Args:
            local: Local folder.
            storage_for: Return the storage of a path.
            tell: Receives the end of each attempt at an upload.

        Raises:
            StorageError: The local folder refuses.
        """
        self._local, self._storage_for, self._tell = local, storage_for, tell
        with translated("making a file", lock := os.path.join(local, _LOCK_NAME)):
            make_folder(local)
            os.close(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._linkable: dict[FileStamp, LinkSource] = {}
        self._unmarked: set[tuple[int, str]] = set()  # steps and attempts that are settled, without a marker
        self._changed = threading.Condition()
        self._is_wanted = bool(self._waiting())
        self._is_ending = False
        self._prunes = True
        self._failure: CheckpointError | None = None  # error of an upload that will be retried
        self._loss: CheckpointError | None = None  # error of an upload that was given up; reported once
        self._thread = threading.Thread(target=self._run, name="asyncckpt-uploader", daemon=True)
        start(self._thread)

    def begin(self) -> None:
        """Upload the checkpoint that was just committed, and retry the uploads that have failed."""
        with self._changed:
            self._is_wanted, self._failure = True, None
            self._changed.notify_all()

    def needs(self, step: int) -> bool:
        """Return whether the local checkpoint of ``step`` is still needed for an upload. Raises nothing."""
        try:
            return any(each.step == step for each in self._waiting())
        except StorageError as error:
            logger.warning("the waiting uploads cannot be listed, so no checkpoint is removed: %s", error)
            return True

    def under_way(self) -> UploadsUnderWay:
        """Return the uploads that have not ended, and a failure if there is one. Raises ``StorageError``."""
        waiting = [upload.to for _, upload in self._uploads()]  # the folder may be slow
        with self._changed:
            loss, self._loss = self._loss, None
            return UploadsUnderWay(tuple(waiting), loss or (self._failure if waiting else None))

    def trainer_came(self, storage_for: Callable[[str], Storage], tell: Callable[[Uploaded], object]) -> None:
        """Continue for the next trainer, and report uploads to ``tell``. Remove old checkpoints again from now on."""
        self._storage_for, self._tell, self._prunes = storage_for, tell, True

    def trainer_gone(self) -> None:
        """Remove no old checkpoints from the root from now on, because another job may use the root."""
        self._prunes = False

    def close(self) -> None:
        """Wait until all checkpoints are uploaded, an upload has failed, or another worker has taken over."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join()

    def _waiting(self) -> list[StoredStep]:
        """Return the local checkpoints that wait for their upload, in the order of their commits."""
        return [each for each, _ in self._uploads()]

    def _uploads(self) -> list[tuple[StoredStep, Upload]]:
        found = history(self._local, strict=False)
        return [(each, each.upload) for each in found if each.upload is not None and not self._is_done(each)]

    def _is_done(self, found: StoredStep) -> bool:
        if (found.step, found.attempt) in self._unmarked:
            return True
        marker = self._marker(found)
        with contextlib.suppress(OSError), open(marker) as file:
            return file.read() == found.attempt
        # Look for the manifest last, because retention may have removed the folder together with the marker.
        return not os.path.lexists(os.path.join(os.path.dirname(marker), MANIFEST_NAME))

    def _settle(self, found: StoredStep) -> None:
        """Mark a checkpoint as uploaded, skipped or refused. If the marker cannot be written, note it in memory."""
        try:
            with contextlib.suppress(FileNotFoundError), open(self._marker(found), "w") as file:  # may be removed
                file.write(found.attempt)
        except OSError as error:
            self._unmarked.add((found.step, found.attempt))
            logger.warning("step %d may be uploaded again, because its marker failed: %s", found.step, error)

    def _marker(self, found: StoredStep) -> str:
        return os.path.join(step_folder(self._local, found.step), UPLOADED_NAME)

    def _run(self) -> None:
        is_elsewhere = False
        while True:
            with self._changed:
                limit = CHECK_S if is_elsewhere else _RETRY_S
                self._changed.wait_for(lambda: self._is_wanted or self._is_ending, limit)
                is_last, self._is_wanted = self._is_ending, False
            try:
                is_elsewhere = not self._carry_out_all()
            except StorageError as error:
                logger.warning("uploads from %s have to wait: %s", self._local, error)
            except Exception:
                logger.exception("uploads failed: please report this")
            if is_last:
                return

    def _carry_out_all(self) -> bool:
        """Upload all waiting checkpoints until an upload fails. Return False if another worker holds the lock."""
        # Check again after releasing the lock. Another worker may have found the lock taken after the last check, and
        # left its upload to this worker.
        while self._waiting():
            lock = self._lock()
            if lock is None:
                return False
            try:
                while (found := self._next()) is not None:
                    if not self._carry_out(*found):
                        return True
            finally:
                os.close(lock)
        return True

    def _lock(self) -> int | None:
        """Take the lock, so that one worker at a time uploads. Return its descriptor; None if another worker has it."""
        path = os.path.join(self._local, _LOCK_NAME)
        with translated("taking a lock", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if lock_alone(fd) is False:  # None: the file system has no locks
                os.close(fd)
                return None
            return fd

    def _next(self) -> tuple[StoredStep, Upload] | None:
        """Return the next upload; None if no checkpoint waits."""
        waiting = self._uploads()
        for found, upload in waiting[:-1]:
            if upload.must:
                return found, upload
            one, other = (step_folder(self._local, each.step) for each in (found, waiting[-1][0]))
            logger.warning("%s is not uploaded, as uploads take too long: %s goes instead", one, other)
            self._settle(found)
        return waiting[-1] if waiting else None

    def _carry_out(self, found: StoredStep, upload: Upload) -> bool:
        """Upload a checkpoint. Return whether to continue with the next checkpoint."""
        begun, path = time.monotonic(), step_folder(self._local, found.step)
        try:
            manifest = copy_checkpoint(path, self._storage_for, self._linkable)
            logger.info("%s is uploaded, in %.1f s", path, time.monotonic() - begun)
            took = None if manifest is None else max(0.0, time.time() - manifest.created)
            self._tell(Uploaded(upload.to, found.step, took, None if manifest is None else manifest.nbytes))
            self._note_success()
            if upload.keep_last is not None and self._prunes:
                prune(os.path.dirname(upload.to), upload.keep_last, lambda step: step == found.step)
            with self._changed:
                self._failure = None
            self._settle(found)  # last, because waiting callers also wait for the pruning
            return True
        except Exception as error:
            failure = located(error, path=upload.to, rank=0, step=found.step)
            is_final = isinstance(failure, _FINAL)
            known = self._failure  # of the try before
            is_known = known is not None and (known.message, known.step) == (failure.message, found.step)
            logger.log(logging.DEBUG if is_known else logging.ERROR, "uploading %s failed: %s", path, failure)
            with self._changed:
                self._failure, self._loss = (None, failure) if is_final else (failure, self._loss)
            text = f"{type(failure).__name__}: {failure}"
            self._tell(Uploaded(upload.to, found.step, time.monotonic() - begun, None, text))
            if is_final:
                self._settle(found)
            return is_final

    def _note_success(self) -> None:
        """Record in the lock file that an upload to the root has succeeded."""
        if has_uploaded(self._local):
            return
        with contextlib.suppress(OSError), open(os.path.join(self._local, _LOCK_NAME), "w") as file:
            file.write("some checkpoints were uploaded\n")


def has_uploaded(local: str) -> bool:
    """Return whether a checkpoint was ever uploaded from the folder ``local``."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(local, _LOCK_NAME)).st_size > 0
    return False


def copy_checkpoint(
    path: str, storage_for: Callable[[str], Storage], linkable: dict[FileStamp, LinkSource] | None = None
) -> Manifest | None:
    """Copy a checkpoint to the place named in its manifest, atomically, and verify all bytes.

    If the checkpoint exists there already, do nothing.

    Args:
        path: Folder of the checkpoint.
        storage_for: Return the storage of a path.
        linkable: Large files of the last copy, which this checkpoint may share. Replaced by the files of this copy.

    Returns:
        The manifest; None if the checkpoint existed already.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError: The local checkpoint cannot be read.
        CheckpointExistsError, StorageError: The copy cannot be written.
    """
    source = storage_for(path)
    with source.reading(path):
        manifest = _manifest(source, path)
        if (upload := manifest.upload) is None:
            raise CheckpointNotFoundError("this checkpoint is not to be uploaded any more", path=path)
        target = storage_for(upload.to)
        if _is_there(target, upload.to, manifest):
            return None
        existing: Existing = "set aside" if upload.sets_aside else "refuse"
        if not target.may_put(upload.to, existing):
            raise exists_error(upload.to, existing, manifest.step)
        name = f"{secrets.token_hex(6)}-{manifest.step}"
        orphan_s = _ORPHAN_S if target.has_locks else upload.timeout
        attempt = target.begin_checkpoint(upload.to, name, manifest.nbytes, orphan_s)
        try:
            linkable = {} if linkable is None else linkable
            copied = _copy_files(source, path, manifest, attempt, linkable)
            _write(attempt, MANIFEST_NAME, replace(manifest, attempt=name, keep=upload.keep, upload=None).encode())
            if missing := attempt.missing(manifest.files.keys()):
                raise StorageError(f"the uploaded file {min(missing)} is missing", path=attempt.path)
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
    """Copy several files at a time. The first failure ends all copies. Return the files that the next copy may link."""
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
    """Return whether an earlier attempt has copied the checkpoint, but could not report its success."""
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
    """Yield the bytes of ``file`` in parts, each in memory of its own."""
    for begin in range(0, nbytes, _READ_BYTES):
        if failures:
            raise StorageError("another file of the upload has failed", path=file.path)
        size = min(_READ_BYTES, nbytes - begin)
        # Use a new buffer for each part, because a part may still be sent while the next part is requested.
        part = memoryview(mmap.mmap(-1, round_up(size, file.block_bytes)))
        if file.read([part], begin) < size:
            raise DamagedCheckpointError("the file is damaged: it is shorter than it was written", path=file.path)
        yield part[:size]


def _checked_parts(file: InputFile, index: Index, failures: list[BaseException]) -> Iterator[memoryview]:
    """Yield parts as ``_parts`` does, the last part of a span only after the span's checksum was verified."""
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
