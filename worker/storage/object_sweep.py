"""What killed workers leave on an object store, and what of a listing is seen.

An *orphan* is an attempt that no record has finalized, and whose newest object is old. It is revoked before it is
removed: its worker may only be slow.
"""

from __future__ import annotations

import logging
import posixpath
import secrets
import threading
import time
from collections import defaultdict
from datetime import datetime, timedelta

from asyncckpt.errors import StorageError
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME
from asyncckpt.worker.storage.object_attempt import publish_metadata, remove_below
from asyncckpt.worker.storage.objects import Found, Objects
from asyncckpt.worker.storage.record import PARTS, Record, change_record, is_finalized, read_record

logger = logging.getLogger(__name__)

_PROBE = ".asyncckpt-probe-"
# A record that only says what was revoked: no worker begins, or ends, what is so old.
_REVOKED = timedelta(days=1)
# How often a root is swept by one process.
_EVERY_S = 300.0

_lock = threading.Lock()
_swept: dict[tuple[str, str], float] = {}
"""When each root was, by this process's monotonic clock."""


def seen_names(objects: Objects, place: str) -> set[str]:
    """What stands below a key, but for what is ours and not of a finalized attempt: names from there on."""
    names = {each.key.removeprefix(f"{place}/" if place else ""): each for each in objects.list(place)}
    return {
        name
        for name, found in names.items()
        if not any(part.startswith((PARTS, _PROBE)) for part in name.split("/"))
        and (posixpath.basename(name) != MANIFEST_NAME or is_finalized(found))
    }


def sweep(objects: Objects, root: str, orphan_s: float) -> None:
    """Remove orphans at the places in ``root`` that are at least so many seconds old, and give the stock readers what a
    worker that died owes them. Once in a while for each root; the first time it is found out whether the store knows
    conditions. Raises ``StorageError``.
    """
    now = time.monotonic()
    with _lock:
        last = _swept.get((objects.base, root))
        if last is not None and now - last < _EVERY_S:
            return
        _swept[objects.base, root] = now
    clock = _probe(objects, root)
    attempts: dict[str, list[Found]] = defaultdict(list)
    records: dict[str, Found] = {}
    published: set[str] = set()
    for found in objects.list(root):
        place, _, rest = found.key.partition(f"/{PARTS}")
        if rest:
            attempts[f"{place}/{PARTS}{rest.partition('/')[0]}"].append(found)
        elif posixpath.basename(found.key) == MANIFEST_NAME:
            records[posixpath.dirname(found.key)] = found
        elif posixpath.basename(found.key) == METADATA_NAME:
            published.add(posixpath.dirname(found.key))
    in_use = set()
    for place, found in records.items():
        if is_finalized(found):
            parts = posixpath.normpath(f"{place}/{read_record(objects, place)[0].parts}")
            in_use.add(parts)
            if place not in published and parts.startswith(f"{place}/"):
                _complete(objects, place, parts)
    for parts, its in attempts.items():
        if parts not in in_use and max(each.modified for each in its) <= clock - timedelta(seconds=orphan_s):
            _remove_orphan(objects, parts)
    with_files = {posixpath.dirname(parts) for parts in attempts}
    for place, found in records.items():
        if not is_finalized(found) and place not in with_files and found.modified <= clock - _REVOKED:
            objects.delete([found.key])


def _complete(objects: Objects, place: str, parts: str) -> None:
    metadata = objects.get(f"{parts}/{METADATA_NAME}")
    if metadata is not None:
        logger.warning(
            "%s/%s gets what stock readers need: a worker was killed before it wrote that", objects.base, place
        )
        publish_metadata(objects, place, parts.rpartition(PARTS)[2], metadata[0])


def _remove_orphan(objects: Objects, parts: str) -> None:
    place, its = posixpath.dirname(parts), parts.rpartition(PARTS)[2]
    finalized = False

    def revoke(found: Record) -> Record | None:
        nonlocal finalized
        finalized = found.is_of(its)
        return None if finalized or its in found.revoked else found.revoking(its)

    change_record(objects, place, revoke)
    if not finalized:
        logger.warning("removing %s/%s, which a worker left that was killed", objects.base, parts)
        remove_below(objects, parts)


def _probe(objects: Objects, root: str) -> datetime:
    """The time, by the clock of the store. Warns where that does not heed conditions."""
    key = f"{root}/{_PROBE}{secrets.token_hex(6)}".lstrip("/")
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
