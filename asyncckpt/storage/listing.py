"""What stands below a key of an object store, as one listing shows it: what is seen there, and what is ours alone."""

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
# As ``part_key`` makes them: the folder, the digest of the attempt, how deep that folder is, the file.
_PART = re.compile(rf"((?:.*?/)?){re.escape(PARTS)}([0-9a-f]{{32}})(?:-(\d{{1,4}}))?/(.*)", re.DOTALL)


@dataclass
class Listing:
    """All names are from the key on that was listed."""

    seen: dict[str, Found] = field(default_factory=dict)
    """What anybody may see. The files of finalized attempts are ``parts``, too."""
    parts: dict[str, dict[str, Found]] = field(default_factory=lambda: defaultdict(dict))
    """By the folder of each attempt, its files, by their names from there on."""
    records: dict[str, Found] = field(default_factory=dict)
    """By their places ("" is the key itself), finalized and not."""

    @property
    def own_record(self) -> Found | None:
        """The record of the key itself."""
        return self.records.get("")

    def of_attempt(self, its: str) -> Mapping[str, Found]:
        """The files of the attempt with that digest at the key itself."""
        return self.parts.get(PARTS + its, {})

    def add_part(self, folder: str, its: str, depth: int, file: str, found: Found) -> None:
        """A ``file`` of the attempt with that digest, in a ``folder`` that is so deep below the place. One of a place
        above the key is left out.
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
