"""Storage of checkpoints: the kind of storage of a path, the steps of a root, and the outcome of a save.

``storage.py`` is the interface of all kinds. A root has a folder for each step, ``root/step-00000100``. A step is
complete when its worker has committed it; ``complete_steps`` lists the complete steps. ``history.py`` orders the steps
by their creation.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import SupportsIndex

from xxhash import xxh3_64_hexdigest

from asyncckpt.errors import SaveTimeoutError, StorageError
from asyncckpt.format.manifest import MANIFEST_NAME
from asyncckpt.format.write_request import Existing, WriteRequest
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.object_store import ObjectStorage
from asyncckpt.storage.objects import SCHEMES, forget_connections, objects_at
from asyncckpt.storage.record import PARTS, PROBE
from asyncckpt.storage.storage import Storage

logger = logging.getLogger(__name__)

_local_storage = functools.cache(LocalStorage)
_object_storage = functools.cache(ObjectStorage)  # one for each bucket
_STEP = re.compile(r"step-(\d{8,})")
# Control characters, and surrogates, which stand for bytes that are not UTF-8.
_NO_KEY = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def storage_for(path: str, *, direct_io: bool = True) -> Storage:
    """Return the storage that ``path`` is in. ``direct_io``: write past the page cache, if there is one.

    Raises ``StorageError`` if the client for this kind of storage is missing.
    """
    return _object_storage(objects_at(path)) if is_address(path) else _local_storage(direct_io)


def forget_clients() -> None:
    """Forget the cached clients. The next ``storage_for`` makes new clients from the changed environment."""
    _object_storage.cache_clear()
    forget_connections()


def is_address(path: str) -> bool:
    """Return whether ``path`` is on an object store."""
    return _URL.match(path) is not None


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute form of ``path``, with "~" expanded, or the normalized address on an object store.

    Raises ``StorageError`` for an unsupported kind of address, and for an impossible path.
    """
    text = os.fspath(path)
    if not text:
        raise StorageError("the path is empty: name a folder ('.' is the current one)")
    if "\0" in text:
        raise StorageError(f"the path {text!a} has a zero byte in it")
    if is_address(text):
        scheme, _, rest = text.partition("://")
        parts = [part for part in rest.split("/") if part]
        if scheme not in SCHEMES or not parts or any(part in (".", "..") or PARTS in part for part in parts):
            known = ", ".join(f"{each}://bucket/folder" for each in SCHEMES)
            raise StorageError(f"{text} is no address that checkpoints are saved to: these are {known}; or mount it")
        return f"{scheme}://{'/'.join(parts)}"
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise StorageError(f"the path {text!a} begins with the home of an unknown user; './~' is a folder")
    try:
        os.fsencode(expanded)
    except UnicodeEncodeError as error:
        raise StorageError(
            f"this process cannot use the path {text!a}: its locale encodes names as {error.encoding}; set"
            " LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        ) from error
    try:
        return os.path.abspath(expanded)
    except FileNotFoundError as error:
        raise StorageError(
            f"the path {text!a} begins at the current folder, which was removed: change to another, or give a path from"
            " '/' on"
        ) from error


def may_be_key(name: str) -> bool:
    """Return whether a file of a set can have this name on an object store.

    Some names are reserved by asyncckpt there, and no store accepts control characters.
    """
    parts = name.split("/")
    is_ours = parts[-1] == MANIFEST_NAME or PARTS in name or any(part.startswith(PROBE) for part in parts)
    return not is_ours and not _NO_KEY.search(name)


def refuse_address(path: str) -> None:
    """Raise ``StorageError`` if ``path`` is on an object store, for callers that need a file system."""
    if is_address(path):
        raise StorageError(f"{path} is an address, and this saves to file systems only: mount it")


def whole_number(value: SupportsIndex, what: str) -> int:
    """Return a step or a version as an ``int``. The value may be a numpy integer or a tensor.

    Args:
        value: The number.
        what: The name of the number, for the error.

    Raises:
        TypeError: The value is not a whole number.
        ValueError: The value is below 0.
    """
    try:
        if isinstance(value, bool):
            raise TypeError("a bool")
        number = operator.index(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a {what} is a whole number, not {value!r}") from error
    if number < 0:
        raise ValueError(f"a {what} is a number from 0 on, not {number}")
    return number


def tier_folders(root: str, local_root: str | None) -> Sequence[str]:
    """Return the folders of a run, the nearest first. ``local_root``: ``Config.local_root``."""
    return (root,) if local_root is None else (os.path.join(absolute(local_root), _local_name(root)), root)


def _local_name(root: str) -> str:
    """Return the name of the local folder of a root: recognisable, and unique to the root."""
    place = root if is_address(root) else os.path.realpath(root)
    return f"{os.path.basename(place)[:64]}-{xxh3_64_hexdigest(os.fsencode(place))[:8]}"


def step_folder(root: str, step: int) -> str:
    """Return the folder of the checkpoint of ``step``."""
    return os.path.join(root, f"step-{step:08d}")


def step_of(path: str) -> int | None:
    """Return the step that the folder ``path`` is named after; None if ``path`` is not the folder of a step."""
    name = _STEP.fullmatch(os.path.basename(path))
    return int(name[1]) if name else None


def split_place(place: str) -> tuple[str, int | None]:
    """Return the root of a place, and the only step that counts there; None: all steps count.

    A place is a root, or one checkpoint of a root. Raises ``StorageError``.
    """
    step = step_of(place)
    if step is None or not storage_for(place).exists(os.path.join(place, MANIFEST_NAME)):
        return place, None
    return os.path.dirname(place), step


def named_steps(root: str) -> list[int]:
    """Return the steps that folders under ``root`` are named after, ascending. Raises ``StorageError``."""
    steps = map(step_of, storage_for(root).names_in(root))
    return sorted(step for step in steps if step is not None)


def complete_steps(*places: str) -> list[int]:
    """Return the steps with a committed checkpoint at any of ``places``, ascending. A missing root has no steps.

    Raises ``StorageError``.
    """
    return sorted({step for place in places for step in _complete_steps(place)})


def _complete_steps(place: str) -> list[int]:
    root, only = split_place(place)
    if only is not None:
        return [only]
    storage = storage_for(root)
    if (stamps := storage.stamps_in(root, MANIFEST_NAME)) is not None:
        return [step for name, stamp in stamps.items() if stamp and (step := step_of(name)) is not None]
    return [step for step in named_steps(root) if storage.exists(os.path.join(step_folder(root, step), MANIFEST_NAME))]


def place_to_put(path: str | os.PathLike[str], existing: Existing) -> str:
    """Return the final place of a checkpoint saved to ``path``. "replace" and "join" follow a link at ``path``.

    Raises as ``absolute``.
    """
    place = absolute(path)
    return os.path.realpath(place) if existing in ("replace", "join") and os.path.islink(place) else place


def replace_or_set_aside(path: str) -> Existing:
    """Return how to save to ``path`` without loss of foreign files: replace a checkpoint, set anything else aside."""
    with contextlib.suppress(StorageError):  # the save itself fails with this error, on all ranks
        if not storage_for(path).may_put(path, "replace"):
            return "set aside"
    return "replace"


def set_aside(root: str, step: int) -> None:
    """Rename a damaged checkpoint, so that its step can be saved again. No files are removed. Raises nothing."""
    try:
        storage_for(root).set_aside(step_folder(root, step), "damaged")
    except StorageError as error:
        logger.warning("a damaged checkpoint could not be renamed: %s", error)


def remove_old_checkpoint(path: str) -> None:
    """Remove a checkpoint that a newer checkpoint replaces. First take its final name. Raises nothing.

    If the checkpoint is being read, or cannot be removed, it stays, and a message is logged.
    """
    try:
        if not storage_for(path).remove_checkpoint(path):
            logger.info("%s is being read and stays for now", path)
    except StorageError as error:
        logger.warning("an old checkpoint could not be removed: %s", error)


def resolve(request: WriteRequest, timeout: float, inode: int | None = None) -> bool:
    """Return whether a save is finalized. If not, revoke the attempt, so that it never will be.

    Call this function on a rank that has written its part and cannot learn the outcome, or if the rank's worker is dead
    and will not write the part. The answer is the same on all ranks and never changes.

    Args:
        request: The save.
        timeout: Maximum seconds to wait for storage.
        inode: The inode that a single file was written to (see ``OpenAttempt``).

    Raises:
        SaveTimeoutError: Storage fails, or does not answer in time. Only then is the outcome unknown.
    """
    outcome: Future[bool] = Future()

    def find_out() -> None:
        try:
            storage = storage_for(request.path)
            is_finalized, leftover = storage.resolve(request.path, request.attempt, request.existing, inode)
        except Exception as error:
            outcome.set_exception(error if isinstance(error, StorageError) else StorageError(repr(error)))
            return
        outcome.set_result(is_finalized)
        storage.remove(leftover)

    begun = time.monotonic()
    thread = threading.Thread(target=find_out, name="asyncckpt-resolve", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        outcome.set_exception(StorageError(f"the storage cannot be asked: {error}"))
    try:
        is_finalized = outcome.result(timeout)
    except (FutureTimeoutError, StorageError) as error:
        why = f"fails ({error})" if isinstance(error, StorageError) else f"has not answered for {timeout:g} s"
        raise SaveTimeoutError(
            f"storage {why}, and the outcome of the save is not known",
            path=request.path,
            rank=None if request.party else request.rank,
            step=request.step,
        ) from error
    thread.join(max(0.0, begun + timeout - time.monotonic()))  # wait until the revoked attempt is removed
    return is_finalized
