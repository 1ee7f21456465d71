"""Removal of orphans: leftovers of killed workers on an object store.

An *orphan* is an old attempt that no record has finalized. The age of an attempt is the age of its newest object. The
sweep revokes an orphan before it removes it, because the orphan's worker may only be slow.
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
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.storage.object_attempt import is_named, remove_attempt, revoke_attempt
from asyncckpt.storage.objects import Found, Objects
from asyncckpt.storage.record import PARTS, PROBE, Listing, is_finalized, list_below, read_record, record_key
from asyncckpt.storage.stock_names import behind, hide, is_under_way, show, shown

logger = logging.getLogger(__name__)

# Minimum age to remove a record that only lists revoked attempts. No attempt of that age is still under way.
_REVOKED = timedelta(hours=1)
# Seconds between two sweeps of a root by one process.
_EVERY_S = 300.0

_lock = threading.Lock()
_swept: dict[tuple[str, str], float] = {}
"""The time of the last sweep of each root, by this process's monotonic clock."""


def sweep(objects: Objects, root: str, orphan_s: float) -> None:
    """Remove orphans directly below ``root``, and make missing files for stock readers.

    Orphans are at least ``orphan_s`` seconds old. Files for stock readers are missing if a worker died while it made
    the files. Each root is swept only occasionally. Each sweep tests whether the store supports conditional writes.

    Raises ``StorageError`` if the store cannot be used. Objects that cannot be removed stay, and a message is logged.
    """
    now = time.monotonic()
    with _lock:
        last = _swept.get((objects.base, root))
        if not root or (last is not None and now - last < _EVERY_S):
            return
        _swept[objects.base, root] = now
    clock = _probe(objects, root)
    try:
        _Sweep(objects, root, clock, timedelta(seconds=orphan_s), list_below(objects, root)).remove()
    except StorageError as error:
        logger.warning("unfinished objects of killed workers stay for now: %s", error)


def renew(objects: Objects, place: str) -> None:
    """Rewrite a record that only lists revoked attempts, so that no sweep deletes the record. Raises ``StorageError``.

    Call this when an attempt begins at ``place``. Stores have no conditional delete. So a sweep that deletes an old
    record could delete the record of a new attempt that was just finalized.
    """
    found, version = read_record(objects, place)
    if version is not None and not found.is_finalized:
        objects.put_if(record_key(place), found.encode(), version)


class _Sweep:
    """One ``listing`` of ``root``, made at ``clock`` (by the store's clock). ``orphan``: minimum age of an orphan."""

    def __init__(self, objects: Objects, root: str, clock: datetime, orphan: timedelta, listing: Listing) -> None:
        self._objects, self._root, self._listing = objects, root, listing
        self._orphan, self._revoked = clock - orphan, clock - max(orphan, _REVOKED)
        # Skip deeper records, because they belong to other roots, and saves there may take longer.
        self._records = {name: found for name, found in listing.records.items() if name and "/" not in name}
        self._attempts: dict[str, list[str]] = defaultdict(list)
        for parts in listing.parts:
            if (place := posixpath.dirname(parts)) and "/" not in place:
                self._attempts[place].append(parts)
        self._in_use: set[str] = set()
        self._unsettled: set[str] = set()

    def remove(self) -> None:
        """Remove old objects. Raises ``StorageError``."""
        for name, found in self._records.items():
            try:
                self._look(name, found)
            except StorageError as error:
                self._unsettled.add(name)
                logger.warning("the copies of %s/%s for stock readers are delayed: %s", self._root, name, error)
        for place, attempts in self._attempts.items():
            for parts in attempts if place not in self._unsettled else ():
                newest = max(each.modified for each in self._listing.parts[parts].values())
                if parts not in self._in_use and newest <= self._orphan:
                    self._hide_names(place, parts)
                    _remove_orphan(self._objects, posixpath.join(self._root, parts))
        for name, found in self._records.items():
            if not is_finalized(found) and found.modified <= self._revoked and not self._attempts.get(name):
                self._forget(name, found)

    def _look(self, name: str, found: Found) -> None:
        """Find out which attempt a record names, and make its missing files for stock readers.

        If the record names no attempt, remove an old ``.metadata`` at its place.
        """
        place, attempts = posixpath.join(self._root, name), self._attempts.get(name, [])
        if not is_finalized(found):
            metadata = self._listing.seen.get(posixpath.join(name, METADATA_NAME))
            is_old = metadata is not None and metadata.modified <= self._revoked
            if is_old and not read_record(self._objects, place)[0].is_finalized:
                self._objects.delete([posixpath.join(place, METADATA_NAME)])
            return
        if len(attempts) == 1 and not self._behind(name, attempts[0], found):
            self._in_use.add(attempts[0])
            return
        record, version = read_record(self._objects, place)
        parts = posixpath.normpath(posixpath.join(name, record.parts))
        if version is None or version.get("e_tag") != found.e_tag:
            self._unsettled.add(name)  # the record has changed since it was listed
        elif PARTS not in parts:
            self._unsettled.add(parts)  # the record is damaged, and names no attempt
        else:
            self._in_use.add(parts)
            if record.parts.startswith(PARTS) and (late := self._behind(name, parts, found)):
                show(self._objects, place, record.parts.removeprefix(PARTS), late)

    def _behind(self, name: str, parts: str, found: Found) -> dict[str, Found]:
        """Return the files at ``parts`` that stock readers miss at the place ``name`` with the record ``found``."""
        if is_under_way(self._objects, posixpath.join(self._root, name)):
            return {}
        files, seen = shown(self._listing.parts.get(parts, {})), self._listing.seen
        there = {each: seen[path] for each in files if (path := posixpath.join(name, each)) in seen}
        return behind(files, there, found.modified)

    def _hide_names(self, place: str, parts: str) -> None:
        """Remove the files for stock readers of an attempt that another finalized attempt has replaced."""
        current = [self._listing.parts[each] for each in self._attempts[place] if each in self._in_use]
        if current:
            kept = {name for files in current for name in shown(files)}
            left = [name for name in shown(self._listing.parts[parts]) if name not in kept]
            there = [name for name in left if posixpath.join(place, name) in self._listing.seen]
            hide(self._objects, posixpath.join(self._root, place), there)

    def _forget(self, name: str, found: Found) -> None:
        """Remove a record that only lists attempts that were revoked long ago."""
        if (now := self._objects.head(found.key)) is not None and now.e_tag == found.e_tag:
            self._objects.delete([found.key])


def _remove_orphan(objects: Objects, parts: str) -> None:
    place, its = posixpath.dirname(parts), posixpath.basename(parts).removeprefix(PARTS)
    if not is_named(objects, parts) and not revoke_attempt(objects, place, its):
        logger.warning("%s/%s is removed: a killed worker left it unfinished", objects.base, parts)
        remove_attempt(objects, place, its)


def _probe(objects: Objects, root: str) -> datetime:
    """Return the time by the store's clock. Log a warning if the store does not support conditional writes."""
    key = posixpath.join(root, PROBE + secrets.token_hex(6))
    objects.put_if(key, b"one", None)
    first = objects.get(key)
    heeds = first is not None and not objects.put_if(key, b"two", None)
    objects.put(key, b"three")
    heeds = heeds and first is not None and not objects.put_if(key, b"four", first[1])
    found = objects.head(key)
    objects.delete([key])
    if not heeds:
        logger.warning(
            "%s changes objects whatever the condition: a worker that is wrongly taken for dead could finalize an"
            " abandoned attempt; use a store that supports If-None-Match and If-Match",
            objects.base,
        )
    if found is None:
        raise StorageError("an object that was just made is not there", path=f"{objects.base}/{key}")
    return found.modified
