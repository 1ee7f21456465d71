"""What killed workers leave on an object store.

An *orphan* is an attempt that no record has finalized, and whose newest object is old. It is revoked before it is
removed: its worker may only be slow.
"""

from __future__ import annotations

import logging
import posixpath
import secrets
import threading
import time
from datetime import datetime, timedelta

from asyncckpt.errors import StorageError
from asyncckpt.worker.manifest import METADATA_NAME
from asyncckpt.worker.storage.listing import PROBE, list_below
from asyncckpt.worker.storage.object_attempt import publish_metadata, remove_below, revoke_attempt
from asyncckpt.worker.storage.objects import Objects
from asyncckpt.worker.storage.record import PARTS, is_finalized, read_record

logger = logging.getLogger(__name__)

# A record that only says what was revoked: no worker begins, or ends, what is so old.
_REVOKED = timedelta(days=1)
# How often a root is swept by one process.
_EVERY_S = 300.0

_lock = threading.Lock()
_swept: dict[tuple[str, str], float] = {}
"""When each root was, by this process's monotonic clock."""


def sweep(objects: Objects, root: str, orphan_s: float) -> None:
    """Remove orphans at the places in ``root`` that are at least so many seconds old, and give stock readers what a
    worker that died owes them. Once in a while for each root; each time it is found out whether the store heeds
    conditions. Raises ``StorageError``.
    """
    now = time.monotonic()
    with _lock:
        last = _swept.get((objects.base, root))
        if last is not None and now - last < _EVERY_S:
            return
    clock = _probe(objects, root)
    listing = list_below(objects, root)
    in_use = set()
    for name, found in listing.records.items():
        if is_finalized(found):
            record, _ = read_record(objects, place := posixpath.join(root, name))
            in_use.add(posixpath.normpath(posixpath.join(name, record.parts)))
            if record.parts.startswith(PARTS) and posixpath.join(name, METADATA_NAME) not in listing.seen:
                logger.warning("%s/%s gets what stock readers need, as its worker was killed", objects.base, place)
                publish_metadata(objects, place, record.parts.removeprefix(PARTS))
    for parts, files in listing.parts.items():
        newest = max(each.modified for each in files.values())
        if parts not in in_use and newest <= clock - timedelta(seconds=orphan_s):
            _remove_orphan(objects, posixpath.join(root, parts))
    with_files = {posixpath.dirname(parts) for parts in listing.parts}
    for name, found in listing.records.items():
        if not is_finalized(found) and name not in with_files and found.modified <= clock - _REVOKED:
            objects.delete([found.key])
    with _lock:
        _swept[objects.base, root] = now


def _remove_orphan(objects: Objects, parts: str) -> None:
    place, its = posixpath.dirname(parts), posixpath.basename(parts).removeprefix(PARTS)
    if not revoke_attempt(objects, place, its):
        logger.warning("removing %s/%s, which a worker left that was killed", objects.base, parts)
        remove_below(objects, parts)


def _probe(objects: Objects, root: str) -> datetime:
    """The time, by the clock of the store. Warns where that does not heed conditions."""
    key = posixpath.join(root, PROBE + secrets.token_hex(6))
    objects.put_if(key, b"one", None)
    heeds = not objects.put_if(key, b"two", None)
    found = objects.head(key)
    objects.delete([key])
    if not heeds:
        logger.warning(
            "%s makes objects that are there already: it does not heed conditions, and a worker that is taken for"
            " dead and is not could finalize what was given up; use a store that does",
            objects.base,
        )
    if found is None:
        raise StorageError("an object that was just made is not there", path=f"{objects.base}/{key}")
    return found.modified
