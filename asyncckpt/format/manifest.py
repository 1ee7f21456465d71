"""The manifest, which describes a checkpoint: its files, with their sizes and checksums.

``asyncckpt.json`` is JSON, free of pickles, and ends with a checksum of itself. A folder without it is not a checkpoint
of asyncckpt. The contents of a data file are in its index (``index.py``).
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import xxhash

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, FormatError

CALLED_AT = "called_at"
"""Name of the only timing that is not a duration: the time of the call of ``save``, in seconds since the epoch."""


def note(timings: MutableMapping[str, float], phase: str, begun: float, called_at: float) -> None:
    """Record the duration and the start of a phase that ends now.

    Args:
        timings: Receives the two values, in seconds.
        phase: Name of the phase.
        begun: Start of the phase, by ``time.perf_counter``.
        called_at: Time of the call of ``save``, by ``time.time``, on this host.
    """
    timings[f"{phase}_s"] = seconds = time.perf_counter() - begun
    timings[f"{phase}_from_s"] = max(0.0, time.time() - seconds - called_at)


def of_all_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Return the timings for a manifest: by name, the value of each rank. A rank has None if its trainer died."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [round(rank[name], 6) if name in rank else None for rank in ranks] for name in names}


FORMAT = 6
MANIFEST_NAME = "asyncckpt.json"
METADATA_NAME = ".metadata"
UPLOADED_NAME = "asyncckpt.uploaded"
"""A file in a local checkpoint that was uploaded. It holds the name of the checkpoint's attempt."""
_DATA_NAME = re.compile(r".*__(\d+)_(\d+)\.distcp", re.DOTALL)
_INDEX_NAME = re.compile(r"__\d+_\d+\.index\.json")
_LONGEST_S = 1e12  # limit of a timing; one timing, ``CALLED_AT``, is in seconds since the epoch
_SHORT_BYTES = 240
DIGEST_BYTES = 16
MOST_BYTES, _MOST_RANKS = 1 << 63, 10_000_000
# Errors of parsing a text that is not a valid manifest or index.
NOT_AS_WRITTEN = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
# Fields that have another name in the file.
_KEYS = {"nbytes": "bytes"}


def data_name(rank: int, number: int = 0, prefix: str = "") -> str:
    """Return the name of data file ``number`` of ``rank``: DCP's own naming behind the caller's ``prefix``."""
    return f"{prefix}__{rank}_{number}.distcp"


def index_name(rank: int, number: int = 0) -> str:
    """Return the name of the index of the large file ``number`` of ``rank``.

    It has no prefix, so that removing files with a certain prefix keeps the index.
    """
    return f"__{rank}_{number}.index.json"


def is_data(name: str) -> bool:
    """Return whether ``name`` is the name of a data file of DCP, in any folder."""
    return _DATA_NAME.fullmatch(name) is not None


def place_of_data(name: str) -> tuple[int, int]:
    """Return the rank that has written the data file ``name``, and its number on that rank; (-1, 0) for other names."""
    match = _DATA_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else (-1, 0)


def data_of_rank(names: Iterable[str], rank: int) -> list[str]:
    """Return the data files of ``rank`` among ``names``, in the order of their numbers."""
    found = ((int(match[2]), match[0]) for match in map(_DATA_NAME.fullmatch, names) if match and int(match[1]) == rank)
    return [name for _, name in sorted(found)]


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file of that name belongs to a checkpoint of asyncckpt or of stock DCP."""
    return (
        name in (MANIFEST_NAME, METADATA_NAME, UPLOADED_NAME)
        or is_index(name)
        or ("/" not in name and name.endswith(".distcp"))
    )


def is_index(name: str) -> bool:
    """Return whether ``name`` is the name of an index."""
    return _INDEX_NAME.fullmatch(name) is not None


def checksum(data: bytes | memoryview) -> int:
    """Return the 64-bit XXH3 checksum of ``data``."""
    return xxhash.xxh3_64_intdigest(data)


def digest_of(data: memoryview) -> bytes:
    """Return the 128-bit XXH3 digest of ``data``, which has ``DIGEST_BYTES``."""
    return xxhash.xxh3_128_digest(data)


def checksums_in(digests: bytes, spans: Iterable[tuple[int, int]], data: memoryview) -> array[int]:
    """Return the checksums of ``spans`` of ``data``, each with its begin and end, from their concatenated ``digests``.

    For more than 240 bytes, XXH3 computes checksum and digest from one state, and the low half of the digest is the
    checksum (see its specification, and ``xxhash.h``).
    """
    halves = array("Q", digests)
    if sys.byteorder == "little":  # the digests are big-endian, the high half first
        halves.byteswap()
    found = halves[1::2]
    for number, (begin, end) in enumerate(spans):
        if end - begin <= _SHORT_BYTES:
            found[number] = checksum(data[begin:end])
    return found


@dataclass(frozen=True)
class Upload:
    """The intent to copy a checkpoint to another place.

    Attributes:
        to: Folder of the copy, of the same step.
        sets_aside: Rename an existing checkpoint at ``to``. With False, an existing checkpoint is an error.
        must: Copy this checkpoint even if a newer checkpoint is also waiting for its upload.
        keep_last, keep: Retention at the other place, as in ``WriteRequest``.
        timeout: Seconds until the copy has to be complete.
    """

    to: str
    sets_aside: bool
    must: bool
    keep_last: int | None
    keep: bool
    timeout: float


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint; the fields are in the order of the file. ``keep``: retention leaves it alone.

    ``created``: time of the commit, in seconds since the epoch. Among the steps of a root, a later commit has a later
    time. ``began``: start of the training that saved the checkpoint, by the same clock. Retention leaves checkpoints
    from before this time alone. ``version``: the version of asyncckpt that wrote the checkpoint.

    ``files`` maps names, with "/" between the parts of a path, to ``{"bytes": int, "xxh3": hex}``. A large file maps to
    ``{"bytes": int, "index": name}``.

    ``timings``: by name, the value of each rank (see ``of_all_ranks``).

    ``upload``: the intent to copy this checkpoint to another place; None: there is no such intent.
    """

    attempt: str
    step: int | None
    created: float
    world_size: int
    keep: bool
    nbytes: int
    files: Mapping[str, Mapping[str, Any]]
    timings: Mapping[str, Sequence[float | None]]
    began: float = 0.0
    version: str = ""
    upload: Upload | None = None

    def encode(self) -> bytes:
        """Return the file's bytes."""
        body = {"format": FORMAT} | {_KEYS.get(name, name): value for name, value in vars(self).items()}
        body["upload"] = self.upload and vars(self.upload)
        return _dump({**body, "xxh3": f"{checksum(_dump(body)):016x}"})

    @classmethod
    def parse(cls, text: bytes, path: str) -> Manifest:
        """Read a manifest and verify its own checksum. ``path`` is for the error.

        Raises ``DamagedCheckpointError``, ``FormatError``.
        """
        try:
            found = parsed_json(text)
            check_format(found, path)
            values = {each.name: found[_KEYS.get(each.name, each.name)] for each in fields(cls)}
            values["upload"] = values["upload"] and Upload(**values["upload"])
            manifest = cls(**values)
            _check_fields(manifest)
            encoded = manifest.encode()
        except NOT_AS_WRITTEN as error:
            raise DamagedCheckpointError(f"this manifest is damaged ({error})", path=path) from error
        # Compare byte for byte, so that even a changed space is found.
        if encoded != text:
            raise DamagedCheckpointError("this manifest is damaged (its checksum does not match)", path=path)
        return manifest

    def small_files(self) -> Iterator[str]:
        """Yield the names of the files of a set that have no index."""
        known = (MANIFEST_NAME, METADATA_NAME)
        return (
            name
            for name, facts in self.files.items()
            if "index" not in facts and os.path.basename(name) not in known and not is_index(name)
        )

    def data_files(self) -> Iterator[str]:
        """Yield the names of the files that have an index."""
        return (name for name, facts in self.files.items() if "index" in facts)


def merged(reports: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    """Merge the reports of all ranks about their own files into the files of a manifest.

    Raises ``CheckpointError`` if two ranks have written the same file.
    """
    files: dict[str, Mapping[str, Any]] = {}
    for rank, report in enumerate(reports):
        if known := sorted(files.keys() & report.keys()):
            raise CheckpointError(
                f"two ranks have written the file {known[0]}: give one of them another name", rank=rank
            )
        files |= report
    return files


def parsed_json(text: bytes) -> Any:
    """Parse JSON that contains no NaN and no infinity. Raises ``ValueError``, ``RecursionError``."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number")

    return json.loads(text, parse_constant=refuse)


def is_size(number: object) -> bool:
    """Return whether ``number`` is a plausible number of bytes or elements, safe for arithmetic."""
    return type(number) is int and 0 <= number < MOST_BYTES


def _check_fields(manifest: Manifest) -> None:
    """Check the type and the range of each field. Raises one of ``NOT_AS_WRITTEN``."""
    its = manifest
    wrong = {
        "attempt": type(its.attempt) is not str,
        "step": its.step is not None and type(its.step) is not int,
        "created": not _is_moment(its.created),
        "began": not _is_moment(its.began),
        "world_size": type(its.world_size) is not int or not 1 <= its.world_size <= _MOST_RANKS,
        "keep": type(its.keep) is not bool,
        "version": type(its.version) is not str,
        "bytes": not is_size(its.nbytes),
        "upload": its.upload is not None and not _is_upload(its.upload),
    }
    if any(wrong.values()):
        raise ValueError(f"the entry {', '.join((name for name, is_wrong in wrong.items() if is_wrong))}")
    for name, facts in its.files.items():
        _check_file(name, facts)
    _check_timings(its.timings, its.world_size)


def _is_moment(number: object) -> bool:
    return type(number) in (int, float) and math.isfinite(number)  # type: ignore[arg-type]


def _is_upload(found: Upload) -> bool:
    types = type(found.to), type(found.sets_aside), type(found.must), type(found.keep)
    keep_last = found.keep_last
    is_count = keep_last is None or (is_size(keep_last) and keep_last > 0)
    return types == (str, bool, bool, bool) and is_count and _is_timing(found.timeout)


def _check_file(name: str, facts: Mapping[str, Any]) -> None:
    """Check a file's entry. A malicious manifest must not name files outside of its folder. Raises ``ValueError``."""
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError(f"{name!r} is no name of a file here")
    nbytes, digest = facts["bytes"], facts.get("xxh3")
    is_told = isinstance(digest, str)
    if "index" in facts:
        is_told = digest is None and isinstance(facts["index"], str) and is_index(facts["index"])
    if not is_size(nbytes) or not is_told:
        raise ValueError(f"the entry {name!r}")


def _check_timings(timings: Mapping[str, Sequence[float | None]], nranks: int) -> None:
    """Check the timings of ``nranks`` ranks. Raises ``ValueError``, ``TypeError``, ``AttributeError``."""
    for name, each in timings.items():
        if len(each) != nranks or not all(number is None or _is_timing(number) for number in each):
            raise ValueError(f"the entry {name!r}")


def _is_timing(number: object) -> bool:
    """Return whether ``number`` is safe for arithmetic: no text, no NaN, and not so large that a sum is infinite."""
    return type(number) in (int, float) and 0 <= number < _LONGEST_S  # type: ignore[operator]


def check_format(found: Mapping[str, Any], path: str) -> None:
    """Raise ``FormatError`` unless the contents ``found`` of the file ``path`` have this ``FORMAT``.

    Raises one of ``NOT_AS_WRITTEN`` if the format is not a number.
    """
    number = found["format"]
    if type(number) is not int:
        raise ValueError(f"format {number!r}")
    if number != FORMAT:
        if isinstance(version := found.get("version"), str) and version:
            writer = wanted = f"asyncckpt {version}"
        else:
            writer, wanted = (
                "a newer asyncckpt" if number > FORMAT else "an older asyncckpt",
                "the version that wrote it",
            )
        raise FormatError(
            f"this checkpoint was written in format {number} by {writer}, and asyncckpt {own_version()} reads"
            f" format {FORMAT}: install {wanted} to read it, or read its state with torch.distributed.checkpoint.load",
            path=path,
        )


@functools.cache
def own_version() -> str:
    """Return the version of this asyncckpt, or "unknown" if it is not installed."""
    from importlib import metadata  # imported here, because it would add an eighth to each worker's start time

    try:
        return metadata.version("asyncckpt")
    except metadata.PackageNotFoundError:
        return "unknown"


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode() + b"\n"
