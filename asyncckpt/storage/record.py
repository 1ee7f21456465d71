"""The record of a place on an object store: the one object that decides which attempt is finalized there.

It stands at ``asyncckpt.json``: the manifest of the finalized attempt, if there is one, then a line that says where
that attempt's files are, and which attempts were revoked there. It is only ever changed on the condition that nobody
else has changed it meanwhile. So of one that finalizes an attempt and one that revokes it, one comes first, and the
other sees it.
"""

from __future__ import annotations

import json
import posixpath
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import xxhash

from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import MANIFEST_NAME, is_data
from asyncckpt.storage.objects import Found, Objects, ObjectVersion

PARTS = ".parts-"
"""How the name begins below which the files of an attempt stand; the rest is its ``digest``, in nested folders followed
by how deep these are: see ``part_key``.
"""

# A record with a manifest is padded to so many bytes, and one without is shorter: a listing tells them apart.
_FINALIZED_BYTES = 4096
# Those that are remembered; with so many attempts behind it, a worker that has begun one is gone.
_MOST_REVOKED = 64
_MOST_CHANGES = 100


def digest(attempt: str) -> str:
    """What stands for the name of an attempt on a store."""
    return xxhash.xxh3_128_hexdigest(attempt.encode())


def parts_name(its: str, folder: str = "") -> str:
    """The name below which the attempt with that digest keeps data files of DCP's in a ``folder``; "" is the place."""
    return f"{PARTS}{its}-{folder.count('/') + 1}" if folder else PARTS + its


def part_key(parts: str, name: str) -> str:
    """Where the file ``name`` of an attempt stands, whose files are at ``parts``.

    A data file of DCP's in a folder of a set stands below that folder: stock readers find it through the ``.metadata``
    there, which can only name what is below itself.
    """
    folder, base = posixpath.split(name)
    if not folder or not is_data(base):
        return f"{parts}/{name}"
    place, its = posixpath.split(parts)
    return f"{place}/{folder}/{parts_name(its.removeprefix(PARTS), folder)}/{base}"


@dataclass(frozen=True)
class PlaceRecord:
    """``manifest``: its bytes, empty where no attempt is finalized. ``parts``: where the files of that stand, from the
    place of the record on. ``revoked``: the digests of attempts that never will be finalized, the latest last.
    """

    manifest: bytes = b""
    parts: str = ""
    revoked: tuple[str, ...] = ()

    @property
    def is_finalized(self) -> bool:
        """Whether there is a checkpoint."""
        return bool(self.manifest)

    def is_of(self, digest: str) -> bool:
        """Whether the attempt with that digest is the finalized one."""
        return self.is_finalized and posixpath.basename(self.parts) == PARTS + digest

    def has(self, name: str) -> bool:
        """Whether the manifest has a file of that name."""
        try:
            return name in json.loads(self.manifest)["files"]
        except (ValueError, KeyError, TypeError):
            return False

    def revoking(self, digest: str) -> PlaceRecord:
        """This one, with one attempt more revoked."""
        return replace(self, revoked=(*self.revoked, digest)[-_MOST_REVOKED:])

    def encode(self) -> bytes:
        """The object's bytes. No two are the same, so that each has an e-tag of its own."""
        line = {"parts": self.parts, "revoked": self.revoked, "written": f"{random.getrandbits(64):016x}"}
        body = self.manifest + json.dumps(line).encode() + b"\n"
        return body.ljust(_FINALIZED_BYTES) if self.is_finalized else body

    @classmethod
    def parse(cls, body: bytes) -> PlaceRecord:
        """A damaged one may be a manifest without parts: whoever reads that finds the damage."""
        text = body.rstrip(b" \n")
        manifest, _, line = text.rpartition(b"\n")
        try:
            found = json.loads(line)
            parts, revoked = str(found["parts"]), tuple(map(str, found["revoked"]))
        except (ValueError, KeyError, TypeError):
            return cls(body)
        return cls(manifest + b"\n" if manifest else b"", parts, revoked)


def is_finalized(found: Found) -> bool:
    """Whether that record has a manifest, as a listing shows it."""
    return found.nbytes >= _FINALIZED_BYTES


def record_key(place: str) -> str:
    """Where the record of the key ``place`` stands."""
    return f"{place}/{MANIFEST_NAME}"


def read_record(objects: Objects, place: str) -> tuple[PlaceRecord, ObjectVersion | None]:
    """The record of the key ``place``, an empty one where there is none, and its version. Raises ``StorageError``."""
    found = objects.get(record_key(place))
    return (PlaceRecord(), None) if found is None else (PlaceRecord.parse(found[0]), found[1])


def change_record(
    objects: Objects, place: str, change: Callable[[PlaceRecord], PlaceRecord | None], *, is_new: bool = False
) -> PlaceRecord:
    """Replace a record on the condition that nobody else has changed it meanwhile.

    Args:
        objects: The bucket's.
        place: The key of the checkpoint.
        change: Makes the new one of what is there; None: leave it. Called again where somebody else was faster.
        is_new: Suppose that there is none; this spares a request, if it is so.

    Returns:
        What was there before it was changed, or is left.

    Raises:
        StorageError: The store refuses. What ``change`` raises is raised.
    """
    for attempt in range(_MOST_CHANGES):
        before, version = (PlaceRecord(), None) if is_new and not attempt else read_record(objects, place)
        after = change(before)
        if after is None or objects.put_if(record_key(place), after.encode(), version):
            return before
        time.sleep(random.random() * min(0.02 * (attempt + 1), 0.5))
    raise StorageError("others change this again and again; look who saves here", path=f"{objects.base}/{place}")
