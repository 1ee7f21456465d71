"""The manifest, ``asyncckpt.json``: what a checkpoint is, its files with their sizes, and checksums of the small ones.

It is JSON, free of pickles, and ends with a checksum of itself. A folder without it is no checkpoint of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import xxhash

from asyncckpt.errors import DamagedCheckpointError

FORMAT = 1
MANIFEST_NAME = "asyncckpt.json"
METADATA_NAME = ".metadata"
# Fields that have another name in the file.
_KEYS = {"nbytes": "bytes"}


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of that name belongs to a checkpoint, ours or stock DCP's."""
    return name in (MANIFEST_NAME, METADATA_NAME) or name.endswith((".distcp", ".index.json"))


def checksum(data: bytes | memoryview) -> int:
    """XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is; the fields in the order of the file. ``keep``: whether retention leaves it alone.

    ``files`` maps names to ``{"bytes": int, "xxh3": hex or null}`` (null: see its index).
    """

    attempt: str
    step: int | None
    created: float
    world_size: int
    keep: bool
    nbytes: int
    files: Mapping[str, Mapping[str, Any]]
    timings: Mapping[str, float]

    def encode(self) -> bytes:
        """The file's bytes."""
        body = {"format": FORMAT} | {_KEYS.get(name, name): value for name, value in vars(self).items()}
        return _dump({**body, "xxh3": f"{checksum(_dump(body)):016x}"})

    @classmethod
    def parse(cls, text: bytes, path: str) -> Manifest:
        """Read a manifest and check it against its own checksum; ``path`` is for the error.

        Raises ``DamagedCheckpointError``.
        """
        try:
            found = json.loads(text)
            check_format(found, path)
            manifest = cls(**{each.name: found[_KEYS.get(each.name, each.name)] for each in fields(cls)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"this manifest is damaged ({error})", path=path) from error
        # Byte for byte, so that not even a changed space goes unseen.
        if manifest.encode() != text:
            raise DamagedCheckpointError("this manifest is damaged (its checksum does not match)", path=path)
        return manifest

    def data_files(self) -> Iterator[str]:
        """The names of the files that have an index."""
        return (name for name, facts in self.files.items() if facts["xxh3"] is None)


def check_format(found: Mapping[str, Any], path: str) -> None:
    """Raise ``DamagedCheckpointError``, which names ``path``, for a file of another format than ours."""
    if found["format"] != FORMAT:
        raise DamagedCheckpointError(
            f"this file has format {found['format']!r} and this asyncckpt reads format {FORMAT}: use one that fits",
            path=path,
        )


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode() + b"\n"
