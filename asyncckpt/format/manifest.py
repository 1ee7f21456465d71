"""The manifest, which says what a checkpoint is: its files, and what they have to be.

``asyncckpt.json`` is JSON, free of pickles, and ends with a checksum of itself. A folder without it is no checkpoint of
ours. What stands in a data file, its index says (``index.py``).
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
from itertools import pairwise
from typing import Any

import xxhash

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, FormatError

CALLED_AT = "called_at"
"""The name of what is no duration: when ``save`` was called, in seconds since the epoch."""


def note(timings: MutableMapping[str, float], phase: str, begun: float, called_at: float) -> None:
    """A phase ends now.

    Args:
        timings: Get how long it took, and when it began.
        phase: Its name.
        begun: When it did, by ``time.perf_counter``.
        called_at: When ``save`` was called, by ``time.time``, on this host.
    """
    timings[f"{phase}_s"] = seconds = time.perf_counter() - begun
    timings[f"{phase}_from_s"] = max(0.0, time.time() - seconds - called_at)


def of_all_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """What a manifest keeps: by name, the number of each rank; None where a rank has none, as its trainer died."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [round(rank[name], 6) if name in rank else None for rank in ranks] for name in names}


FORMAT = 6
MANIFEST_NAME = "asyncckpt.json"
METADATA_NAME = ".metadata"
UPLOADED_NAME = "asyncckpt.uploaded"
"""A file of a local checkpoint that is at its other place, too. It holds the attempt of that checkpoint."""
_DATA_NAME = re.compile(r".*__(\d+)_(\d+)\.distcp", re.DOTALL)
_INDEX_NAME = re.compile(r"__\d+_\d+\.index\.json")
_LONGEST_S = 1e12  # also of moments, in seconds since the epoch
_SHORT_BYTES = 240
DIGEST_BYTES = 16
MOST_BYTES, _MOST_RANKS = 1 << 63, 10_000_000
# What a text raises that is no manifest, or no index, in one of many ways.
NOT_AS_WRITTEN = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
# Fields that have another name in the file.
_KEYS = {"nbytes": "bytes"}


def data_name(rank: int, number: int = 0, prefix: str = "") -> str:
    """The data file ``number`` of ``rank``; DCP's own naming, behind a ``prefix`` of the caller's."""
    return f"{prefix}__{rank}_{number}.distcp"


def index_name(rank: int, number: int = 0) -> str:
    """The index of the large file ``number`` of ``rank``; it has no prefix: who removes what begins so keeps it."""
    return f"__{rank}_{number}.index.json"


def is_data(name: str) -> bool:
    """Whether ``name`` is that of a data file of DCP's, in whatever folder."""
    return _DATA_NAME.fullmatch(name) is not None


def place_of_data(name: str) -> tuple[int, int]:
    """The rank that has written a data file of that ``name``, and its number among those of the rank; (-1, 0): none."""
    match = _DATA_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else (-1, 0)


def data_of_rank(names: Iterable[str], rank: int) -> list[str]:
    """The data files of ``rank`` among ``names``, in the order of their numbers."""
    found = ((int(match[2]), match[0]) for match in map(_DATA_NAME.fullmatch, names) if match and int(match[1]) == rank)
    return [name for _, name in sorted(found)]


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of that name belongs to a checkpoint, ours or stock DCP's."""
    return (
        name in (MANIFEST_NAME, METADATA_NAME, UPLOADED_NAME)
        or is_index(name)
        or ("/" not in name and name.endswith(".distcp"))
    )


def is_index(name: str) -> bool:
    """Whether ``name`` is that of an index."""
    return _INDEX_NAME.fullmatch(name) is not None


def checksum(data: bytes | memoryview) -> int:
    """XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def digest_of(data: memoryview) -> bytes:
    """XXH3, 128 bits: ``DIGEST_BYTES``."""
    return xxhash.xxh3_128_digest(data)


def checksums_in(digests: bytes, bounds: Sequence[int], data: memoryview) -> array[int]:
    """The checksums of the spans of ``data`` between the ``bounds``, out of their ``digests``, one after the other.

    Of more than 240 bytes XXH3 makes both of one state: the low half of the longer is the shorter (its specification,
    and ``xxhash.h``).
    """
    halves = array("Q", digests)
    if sys.byteorder == "little":  # the digests are big-endian, the high half first
        halves.byteswap()
    found = halves[1::2]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end - begin <= _SHORT_BYTES:
            found[number] = checksum(data[begin:end])
    return found


@dataclass(frozen=True)
class Upload:
    """The intent to copy a checkpoint to another place.

    Attributes:
        to: Folder of the copy, of the same step.
        sets_aside: Rename a checkpoint that stands there. Otherwise none may stand there.
        must: Copy it even if a newer checkpoint waits, too.
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
    """What a checkpoint is; the fields in the order of the file. ``keep``: whether retention leaves it alone.

    ``created``: seconds since the epoch; of the steps of a root, later for each that was committed later. ``began``:
    when the training that saved this began, by the same clock. Retention leaves older checkpoints alone.
    ``version``: of the asyncckpt that has written this.

    ``files`` maps names, with "/" between the parts of a path, to ``{"bytes": int, "xxh3": hex}``, or, of a large file,
    to ``{"bytes": int, "index": name}``.

    ``timings``: by name, that of each rank (see ``manifest.py``).

    ``upload``: the intent to copy this checkpoint to another place; None: it stays here alone.
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
        """The file's bytes."""
        body = {"format": FORMAT} | {_KEYS.get(name, name): value for name, value in vars(self).items()}
        body["upload"] = self.upload and vars(self.upload)
        return _dump({**body, "xxh3": f"{checksum(_dump(body)):016x}"})

    @classmethod
    def parse(cls, text: bytes, path: str) -> Manifest:
        """Read a manifest and check it against its own checksum; ``path`` is for the error.

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
        # Byte for byte, so that not even a changed space goes unseen.
        if encoded != text:
            raise DamagedCheckpointError("this manifest is damaged (its checksum does not match)", path=path)
        return manifest

    def small_files(self) -> Iterator[str]:
        """The names of those of a set that have no index."""
        known = (MANIFEST_NAME, METADATA_NAME)
        return (
            name
            for name, facts in self.files.items()
            if "index" not in facts and os.path.basename(name) not in known and not is_index(name)
        )

    def data_files(self) -> Iterator[str]:
        """The names of the files that have an index."""
        return (name for name, facts in self.files.items() if "index" in facts)


def merged(reports: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    """Return the files of a manifest, of which each rank reports its own.

    Raises ``CheckpointError`` where two ranks have written one file.
    """
    files: dict[str, Mapping[str, Any]] = {}
    for rank, report in enumerate(reports):
        if known := sorted(files.keys() & report.keys()):
            raise CheckpointError(
                f"two ranks have written {known[0]}, and only one can have: give one of them another name", rank=rank
            )
        files |= report
    return files


def parsed_json(text: bytes) -> Any:
    """What JSON says, in which there is no NaN, and nothing infinite. Raises ``ValueError``, ``RecursionError``."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number")

    return json.loads(text, parse_constant=refuse)


def is_size(number: object) -> bool:
    """Whether it is a number of bytes, or of elements, that can be computed with."""
    return type(number) is int and 0 <= number < MOST_BYTES


def _check_fields(manifest: Manifest) -> None:
    """That all is of its type, and can be computed with. Raises one of ``NOT_AS_WRITTEN``."""
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
        raise ValueError(f"what it says of {', '.join(name for name, is_wrong in wrong.items() if is_wrong)}")
    for name, facts in its.files.items():
        _check_file(name, facts)
    _check_timings(its.timings, its.world_size)


def _is_moment(number: object) -> bool:
    return type(number) in (int, float) and math.isfinite(number)  # type: ignore[arg-type]


def _is_upload(found: Upload) -> bool:
    types = type(found.to), type(found.sets_aside), type(found.must), type(found.keep)
    keep_last = found.keep_last
    is_count = keep_last is None or (is_size(keep_last) and keep_last > 0)
    return types == (str, bool, bool, bool) and is_count and _is_moment(found.timeout)


def _check_file(name: str, facts: Mapping[str, Any]) -> None:
    """Whoever wrote a manifest may not have meant well: a file is one of its folder. Raises ``ValueError``."""
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError(f"{name!r} is no name of a file here")
    nbytes, digest = facts["bytes"], facts.get("xxh3")
    is_told = isinstance(digest, str)
    if "index" in facts:
        is_told = digest is None and isinstance(facts["index"], str) and is_index(facts["index"])
    if not is_size(nbytes) or not is_told:
        raise ValueError(f"what it says of {name!r}")


def _check_timings(timings: Mapping[str, Sequence[float | None]], nranks: int) -> None:
    """Raises ``ValueError``, ``TypeError``, ``AttributeError`` for what are no timings of ``nranks``."""
    for name, each in timings.items():
        if len(each) != nranks or not all(number is None or _is_timing(number) for number in each):
            raise ValueError(f"what it says of {name!r}")


def _is_timing(number: object) -> bool:
    """Whether it can be computed with: no text, no NaN, and not so large that a sum would be infinite."""
    return type(number) in (int, float) and 0 <= number < _LONGEST_S  # type: ignore[operator]


def check_format(found: Mapping[str, Any], path: str) -> None:
    """Raise ``FormatError`` unless what was ``found`` in the file ``path`` is of this ``FORMAT``.

    Raises one of ``NOT_AS_WRITTEN`` if there is no number of a format.
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
            f"this was written in format {number} by {writer}, and asyncckpt {own_version()} reads format {FORMAT}:"
            f" install {wanted} to read it",
            path=path,
        )


@functools.cache
def own_version() -> str:
    """Return the version of this asyncckpt, or "unknown" if it is not installed."""
    from importlib import metadata  # here, as each worker that starts would take an eighth longer

    try:
        return metadata.version("asyncckpt")
    except metadata.PackageNotFoundError:
        return "unknown"


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode() + b"\n"
