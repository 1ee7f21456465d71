"""One listing of an object store below a key: the visible files, and asyncckpt's own objects."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncckpt.format.manifest import MANIFEST_NAME
from asyncckpt.storage.objects import Found, Objects
from asyncckpt.storage.record import PARTS, is_finalized

PROBE = ".asyncckpt-probe-"
# Keys made by ``part_key``: the folder, the digest of the attempt, the depth of the folder, the file.
_PART = re.compile(rf"((?:.*?/)?){re.escape(PARTS)}([0-9a-f]{{32}})(?:-(\d{{1,4}}))?/(.*)", re.DOTALL)


@dataclass
class Listing:
    """The result of a listing. All names are relative to the key that was listed."""

    seen: dict[str, Found] = field(default_factory=dict)
    """The files that anybody may see. The files of finalized attempts are in ``parts``, too."""
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
        """Add a ``file`` of the attempt with the digest ``its``. Its ``folder`` is ``depth`` levels below its place.

        A file of a place above the key is left out.
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
