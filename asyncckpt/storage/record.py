"""The record of a place on an object store: the one object that decides which attempt is finalized there.

The record is the object ``asyncckpt.json``. The record begins with the manifest of the finalized attempt, if there is
one. The next line has the place of the attempt's files, and the attempts that were revoked. Every change is
conditional: a change fails if another process has changed the record meanwhile. So if one process finalizes an attempt
and another process revokes it, the first change wins, and the other process sees it.
"""

from __future__ import annotations

import json
import posixpath
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import xxhash

from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import MANIFEST_NAME, is_data
from asyncckpt.storage.objects import Found, Objects, ObjectVersion

PARTS = ".parts-"
"""Prefix of the folder with the files of an attempt. The attempt's ``digest`` follows, and in nested folders the depth
of the folder, see ``part_key``."""

# Minimum size of a record with a manifest, in bytes, reached by padding. A record without a manifest is shorter. So the
# size in a listing tells the two kinds apart.
_FINALIZED_BYTES = 4096
# Number of revoked attempts to remember. The worker of an attempt is gone when this many later attempts were revoked.
_MOST_REVOKED = 64
_MOST_CHANGES = 100


def digest(attempt: str) -> str:
    """Return the digest that names an attempt on a store."""
    return xxhash.xxh3_128_hexdigest(attempt.encode())


def parts_name(its: str, folder: str = "") -> str:
    """Return the folder name where the attempt with the digest ``its`` keeps DCP's data files of ``folder``.

    ``folder`` is "" at the top of the checkpoint.
    """
    return f"{PARTS}{its}-{folder.count('/') + 1}" if folder else PARTS + its


def part_key(parts: str, name: str) -> str:
    """Return the key of the file ``name`` of an attempt with its files at ``parts``.

    In a set, a data file of DCP stays below its folder. Stock readers find the file through the ``.metadata`` of this
    folder, which can only name files below the folder.
    """
    folder, base = posixpath.split(name)
    if not folder or not is_data(base):
        return f"{parts}/{name}"
    place, its = posixpath.split(parts)
    return f"{place}/{folder}/{parts_name(its.removeprefix(PARTS), folder)}/{base}"


@dataclass(frozen=True)
class PlaceRecord:
    """The contents of a record.

    ``manifest``: bytes of the manifest; empty if no attempt is finalized. ``parts``: place of the finalized attempt's
    files, relative to the record's place. ``revoked``: digests of attempts that will never be finalized, oldest first.
    """

    manifest: bytes = b""
    parts: str = ""
    revoked: tuple[str, ...] = ()

    @property
    def is_finalized(self) -> bool:
        """Whether there is a checkpoint."""
        return bool(self.manifest)

    def is_of(self, digest: str) -> bool:
        """Return whether the attempt with this digest is the finalized attempt."""
        return self.is_finalized and posixpath.basename(self.parts) == PARTS + digest

    def has(self, name: str) -> bool:
        """Return whether the manifest lists a file with this name."""
        try:
            return name in json.loads(self.manifest)["files"]
        except (ValueError, KeyError, TypeError):
            return False

    def revoking(self, digest: str) -> PlaceRecord:
        """Return a copy of this record with one more revoked attempt."""
        return replace(self, revoked=(*self.revoked, digest)[-_MOST_REVOKED:])

    def encode(self) -> bytes:
        """Return the object's bytes. A random number makes each encoding, and so its e-tag, unique."""
        line = {"parts": self.parts, "revoked": self.revoked, "written": f"{random.getrandbits(64):016x}"}
        body = self.manifest + json.dumps(line).encode() + b"\n"
        return body.ljust(_FINALIZED_BYTES) if self.is_finalized else body

    @classmethod
    def parse(cls, body: bytes) -> PlaceRecord:
        """Parse a record. Treat a damaged record as a manifest without parts, so that its reader reports the damage."""
        text = body.rstrip(b" \n")
        manifest, _, line = text.rpartition(b"\n")
        try:
            found = json.loads(line)
            parts, revoked = str(found["parts"]), tuple(map(str, found["revoked"]))
        except (ValueError, KeyError, TypeError):
            return cls(body)
        return cls(manifest + b"\n" if manifest else b"", parts, revoked)


def is_finalized(found: Found) -> bool:
    """Return whether the listed record ``found`` has a manifest."""
    return found.nbytes >= _FINALIZED_BYTES


def record_key(place: str) -> str:
    """Return the key of the record of ``place``."""
    return f"{place}/{MANIFEST_NAME}"


def read_record(objects: Objects, place: str) -> tuple[PlaceRecord, ObjectVersion | None]:
    """Return the record of ``place`` (empty if there is none) and its version. Raises ``StorageError``."""
    found = objects.get(record_key(place))
    return (PlaceRecord(), None) if found is None else (PlaceRecord.parse(found[0]), found[1])


def change_record(
    objects: Objects, place: str, change: Callable[[PlaceRecord], PlaceRecord | None], *, is_new: bool = False
) -> PlaceRecord:
    """Replace a record on the condition that no other process has changed it meanwhile.

    Args:
        objects: Objects of the bucket.
        place: Key of the checkpoint.
        change: Return the new record for the current record; None: keep the record. Called again after a concurrent
            change.
        is_new: Assume that there is no record yet. A correct assumption saves a request.

    Returns:
        The record before the change, or the record that was kept.

    Raises:
        StorageError: The store refuses. Errors of ``change`` are raised unchanged.
    """
    for attempt in range(_MOST_CHANGES):
        before, version = (PlaceRecord(), None) if is_new and not attempt else read_record(objects, place)
        after = change(before)
        if after is None or objects.put_if(record_key(place), after.encode(), version):
            return before
        time.sleep(random.random() * min(0.02 * (attempt + 1), 0.5))
    raise StorageError("other writers keep changing this; check which jobs save here", path=f"{objects.base}/{place}")


PROBE = ".asyncckpt-probe-"
# Keys made by ``part_key``: the folder, the digest of the attempt, the depth of the folder, the file.
_PART = re.compile(rf"((?:.*?/)?){re.escape(PARTS)}([0-9a-f]{{32}})(?:-(\d{{1,4}}))?/(.*)", re.DOTALL)


@dataclass
class Listing:
    """The result of a listing. All names are relative to the key that was listed."""

    seen: dict[str, Found] = field(default_factory=dict)
    """The files that callers may see. The files of finalized attempts are also in ``parts``."""
    parts: dict[str, dict[str, Found]] = field(default_factory=lambda: defaultdict(dict))
    """By folder of an attempt: its files, by name relative to that folder."""
    records: dict[str, Found] = field(default_factory=dict)
    """The records by place ("" is the key itself), finalized or not."""

    @property
    def own_record(self) -> Found | None:
        """The record of the key itself."""
        return self.records.get("")

    def of_attempt(self, its: str) -> Mapping[str, Found]:
        """Return the files of the attempt at the key itself with the digest ``its``."""
        return self.parts.get(PARTS + its, {})

    def add_part(self, folder: str, its: str, depth: int, file: str, found: Found) -> None:
        """Add a ``file`` of the attempt with the digest ``its``. The ``folder`` is ``depth`` levels below its place.

        Skip a file of a place above the key.
        """
        folders = folder.split("/")[:-1]
        above = len(folders) - depth
        if above >= 0:
            parts = "/".join([*folders[:above], PARTS + its])
            self.parts[parts]["/".join([*folders[above:], file])] = found


def list_below(objects: Objects, key: str) -> Listing:
    """List a key. Raises ``StorageError``."""
    listing = Listing()
    for found in objects.list(key):
        name = found.key.removeprefix(f"{key}/" if key else "")
        if part := _PART.match(name):
            listing.add_part(part[1], part[2], int(part[3] or 0), part[4], found)
            continue
        folder, base = posixpath.split(name)
        if base == MANIFEST_NAME:
            listing.records[folder] = found
        if not base.startswith(PROBE) and (base != MANIFEST_NAME or is_finalized(found)):
            listing.seen[name] = found
    return listing
