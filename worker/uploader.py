"""The uploader: copies committed checkpoints to another root, as from a local disk to an object store, in the
background.

The local copy is held against retention until it is there. Where the other root is slower than they come, one that
waits makes way for a newer one, unless it is to be kept for good.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from xxhash import xxh3_64

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, StorageError, located
from asyncckpt.shm.segment import PAGE, round_up
from asyncckpt.worker.manifest import MANIFEST_NAME, Index, Manifest, checksum
from asyncckpt.worker.messages import Existing
from asyncckpt.worker.storage.history import prune
from asyncckpt.worker.storage.storage import InputFile, OpenAttempt, Storage, exists_error
from asyncckpt.worker.uploads import Upload, UploadEnded

logger = logging.getLogger(__name__)

UPLOADED_NAME = "asyncckpt.uploaded"
"""A file beside local checkpoints, from the first upload on: a root that is empty in spite of it was emptied."""

_READ_BYTES = 16 << 20  # at once; a multiple of the page
# Each has some ten of these in memory, where it goes to an object store.
_FILES_AT_ONCE = 4


class Uploader:
    """Copies one checkpoint after the other, on a thread that is there while there are any."""

    def __init__(self, storage_for: Callable[[str], Storage], send: Callable[[UploadEnded], None]) -> None:
        """Start nothing yet.

        Args:
            storage_for: The storage that a path is in.
            send: Tells the trainer.
        """
        self._storage_for = storage_for
        self._send = send
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Upload, contextlib.ExitStack]] = deque()
        self._thread: threading.Thread | None = None

    def add(self, upload: Upload) -> None:
        """Begin it when those before it have ended. Its checkpoint is held from now on. Raises nothing."""
        held = contextlib.ExitStack()
        try:
            held.enter_context(self._storage_for(upload.path).reading(upload.path))
        except CheckpointError as error:
            self._end(upload, error)
            return
        with self._changed:
            passed = [each for each in self._waiting if not each[0].keep]
            for each in passed:
                self._waiting.remove(each)
            self._waiting.append((upload, held))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="asyncckpt-upload")
                self._thread.start()
        for other, its in passed:
            its.close()
            logger.warning("%s is not uploaded, as uploads take too long: %s goes instead", other.path, upload.path)
            self._send(UploadEnded(other.to, None))

    def close(self) -> None:
        """Wait for all of them."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                upload, held = self._waiting.popleft()
            failure: Exception | None = None
            with held:
                try:
                    copy_checkpoint(upload, self._storage_for)
                except Exception as error:
                    failure = error
            self._end(upload, failure)

    def _end(self, upload: Upload, failure: Exception | None) -> None:
        error = None if failure is None else located(failure, path=upload.to, rank=0, step=upload.step)
        if error is not None:
            logger.error("uploading %s failed: %s", upload.path, error)
        else:
            with contextlib.suppress(OSError):
                Path(os.path.dirname(upload.path), UPLOADED_NAME).touch()
            if upload.keep_last is not None:
                prune(os.path.dirname(upload.to), upload.keep_last, lambda step: step == upload.step)
        self._send(UploadEnded(upload.to, error))


def copy_checkpoint(upload: Upload, storage_for: Callable[[str], Storage]) -> None:
    """Copy a checkpoint, each byte checked, to where it is complete or not there.

    Raises ``CheckpointNotFoundError``, ``DamagedCheckpointError``, ``CheckpointExistsError``, ``StorageError``.
    """
    source, target = storage_for(upload.path), storage_for(upload.to)
    manifest = _manifest(source, upload.path)
    if _is_there(target, upload.to, manifest):
        return
    existing: Existing = "set aside" if upload.sets_aside else "refuse"
    if not target.may_put(upload.to, existing):
        raise exists_error(upload.to, existing, upload.step)
    name = f"{secrets.token_hex(6)}-{upload.step}"
    attempt = target.begin_checkpoint(upload.to, name, manifest.nbytes, upload.timeout)
    try:
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="asyncckpt-upload") as pool:
            copying = [pool.submit(_copy_file, source, upload.path, manifest, each, attempt) for each in manifest.files]
            wait(copying, return_when=FIRST_EXCEPTION)
            for each in copying:
                each.cancel()
        for each in copying:
            if not each.cancelled():
                each.result()
        _write(attempt, MANIFEST_NAME, replace(manifest, attempt=name, keep=upload.keep).encode())
        if missing := manifest.files.keys() - attempt.names():
            raise StorageError(f"{min(missing)} was written, and is not there", path=attempt.path)
        attempt.finalize(existing)
    except BaseException:
        attempt.discard()
        raise
    attempt.release()


def _copy_file(source: Storage, folder: str, manifest: Manifest, name: str, attempt: OpenAttempt) -> None:
    facts, path = manifest.files[name], os.path.join(folder, name)
    if "index" not in facts:
        _write(attempt, name, _small_file(source, path, facts["xxh3"]))
        return
    where = os.path.join(folder, facts["index"])
    index = Index.parse(_small_file(source, where, manifest.files[facts["index"]]["xxh3"]), where)
    with contextlib.closing(source.open(path)) as file:
        attempt.copy(name, facts["bytes"], partial(_checked_parts, file, index))


def _manifest(source: Storage, path: str) -> Manifest:
    name = os.path.join(path, MANIFEST_NAME)
    if not source.exists(name):
        raise CheckpointNotFoundError("there is no checkpoint here any more", path=path)
    return Manifest.parse(source.read(name), name)


def _is_there(target: Storage, path: str, manifest: Manifest) -> bool:
    """Whether it was copied already, as by the worker of a trainer that has died."""
    with contextlib.suppress(DamagedCheckpointError):
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


def _checked_parts(file: InputFile, index: Index) -> Iterator[memoryview]:
    """The bytes of ``file``, in memory of their own; the last of a span only once that was found to be good."""
    bounds, digest, span = index.bounds, xxh3_64(), 0
    for begin in range(0, bounds[-1], _READ_BYTES):
        end = min(begin + _READ_BYTES, bounds[-1])
        # Not one buffer for all: what is sent is still read while the next is asked for.
        part = memoryview(mmap.mmap(-1, max(round_up(end - begin), PAGE)))
        if file.read([part], begin) < end - begin:
            raise DamagedCheckpointError("the file is damaged: it is shorter than it was written", path=file.path)
        at = begin
        while at < end:
            stop = min(end, bounds[span + 1])
            digest.update(part[at - begin : stop - begin])
            if stop == bounds[span + 1]:
                if digest.intdigest() != index.checksums[span]:
                    names = ", ".join(map(repr, index.names_at(bounds[span], stop)))
                    raise DamagedCheckpointError(
                        f"the bytes {bounds[span]:,} to {stop:,} are damaged: {names}", path=file.path
                    )
                digest.reset()
                span += 1
            at = stop
        yield part[: end - begin]
