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
from collections import defaultdict
from datetime import datetime, timedelta

from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import METADATA_NAME
from asyncckpt.storage.listing import PROBE, Listing, list_below
from asyncckpt.storage.object_attempt import is_named, remove_attempt, revoke_attempt
from asyncckpt.storage.objects import Found, Objects
from asyncckpt.storage.record import PARTS, is_finalized, read_record, record_key
from asyncckpt.storage.stock_names import behind, hide, is_under_way, show, shown

logger = logging.getLogger(__name__)

# At least so long stays a record that only says what was revoked: no worker begins, or ends, what is so old.
_REVOKED = timedelta(hours=1)
# How often a root is swept by one process.
_EVERY_S = 300.0

_lock = threading.Lock()
_swept: dict[tuple[str, str], float] = {}
"""When each root was, by this process's monotonic clock."""


def sweep(objects: Objects, root: str, orphan_s: float) -> None:
    """Remove orphans at the places directly in ``root`` that are at least so many seconds old, and give stock readers
    what a worker that died owes them. Once in a while for each root; each time it is found out whether the store heeds
    conditions.

    Raises ``StorageError`` where the store cannot be used; what cannot be removed stays, and the log says so.
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
        logger.warning("what killed workers left stays for now: %s", error)


def renew(objects: Objects, place: str) -> None:
    """An attempt begins there: a record that only says what was revoked is not old any more. No store removes on a
    condition, and who is about to forget it would remove what the attempt makes of it. Raises ``StorageError``.
    """
    found, version = read_record(objects, place)
    if version is not None and not found.is_finalized:
        objects.put_if(record_key(place), found.encode(), version)


class _Sweep:
    """What was found by one ``listing`` of ``root``, at ``clock``, which is the store's; ``orphan``: how old one is."""

    def __init__(self, objects: Objects, root: str, clock: datetime, orphan: timedelta, listing: Listing) -> None:
        self._objects, self._root, self._listing = objects, root, listing
        self._orphan, self._revoked = clock - orphan, clock - max(orphan, _REVOKED)
        # Those deeper down are of other roots, whose saves may take longer.
        self._records = {name: found for name, found in listing.records.items() if name and "/" not in name}
        self._attempts: dict[str, list[str]] = defaultdict(list)
        for parts in listing.parts:
            if (place := posixpath.dirname(parts)) and "/" not in place:
                self._attempts[place].append(parts)
        self._in_use: set[str] = set()
        self._unsettled: set[str] = set()

    def remove(self) -> None:
        """Remove what is old. Raises ``StorageError``."""
        for name, found in self._records.items():
            try:
                self._look(name, found)
            except StorageError as error:
                self._unsettled.add(name)
                logger.warning("what stock readers are owed of %s/%s has to wait: %s", self._root, name, error)
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
        """Find out which attempt a record names; give stock readers its files, or take away the metadata of none."""
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
            self._unsettled.add(name)  # it has changed since it was listed
        elif PARTS not in parts:
            self._unsettled.add(parts)  # it is damaged, and does not say which
        else:
            self._in_use.add(parts)
            if record.parts.startswith(PARTS) and (late := self._behind(name, parts, found)):
                show(self._objects, place, record.parts.removeprefix(PARTS), late)

    def _behind(self, name: str, parts: str, found: Found) -> dict[str, Found]:
        """Those files at ``parts`` that stock readers do not find at the place ``name``, whose record was ``found``."""
        if is_under_way(self._objects, posixpath.join(self._root, name)):
            return {}
        files, seen = shown(self._listing.parts.get(parts, {})), self._listing.seen
        there = {each: seen[path] for each in files if (path := posixpath.join(name, each)) in seen}
        return behind(files, there, found.modified)

    def _hide_names(self, place: str, parts: str) -> None:
        """Take away what stock readers find of an attempt that has made way for the one that is finalized there."""
        current = [self._listing.parts[each] for each in self._attempts[place] if each in self._in_use]
        if current:
            kept = {name for files in current for name in shown(files)}
            left = [name for name in shown(self._listing.parts[parts]) if name not in kept]
            there = [name for name in left if posixpath.join(place, name) in self._listing.seen]
            hide(self._objects, posixpath.join(self._root, place), there)

    def _forget(self, name: str, found: Found) -> None:
        """Remove a record that only says what was revoked long ago."""
        if (now := self._objects.head(found.key)) is not None and now.e_tag == found.e_tag:
            self._objects.delete([found.key])


def _remove_orphan(objects: Objects, parts: str) -> None:
    place, its = posixpath.dirname(parts), posixpath.basename(parts).removeprefix(PARTS)
    if not is_named(objects, parts) and not revoke_attempt(objects, place, its):
        logger.warning("removing %s/%s, which a worker left that was killed", objects.base, parts)
        remove_attempt(objects, place, its)


def _probe(objects: Objects, root: str) -> datetime:
    """The time, by the clock of the store. Warns where that does not heed conditions."""
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
            "%s changes objects whatever the condition: a worker that is taken for dead and is not could finalize what"
            " was given up; use a store that heeds If-None-Match and If-Match",
            objects.base,
        )
    if found is None:
        raise StorageError("an object that was just made is not there", path=f"{objects.base}/{key}")
    return found.modified
