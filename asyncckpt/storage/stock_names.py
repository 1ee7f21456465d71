"""What stock readers find of a checkpoint on an object store: its files, at the names that they have in it.

The files stand below the name of their attempt, and stay there: that is what asyncckpt reads. When the attempt is
finalized, DCP's ``.metadata`` comes to its own name, with the names of the data files as they stand there, and other
files of a set are copied to theirs. All that is at such a name can be made again, and is made again where a worker has
died meanwhile, or another checkpoint has taken the place: no reader of ours goes by it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial

from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME, is_data, is_index
from asyncckpt.storage.listing import list_below
from asyncckpt.storage.objects import Found, Objects
from asyncckpt.storage.record import PARTS, parts_name, read_record

_COPIES_AT_ONCE = 8
_under_way: set[str] = set()
"""The places whose files this process is just giving their names."""
# The step of a pickle that makes the name of a data file: its length, then itself.
_DATA_NAME = re.compile(rb"X(.{4})([^\x00-\x1f]{0,4000}?__\d+_\d+\.distcp)", re.DOTALL)


def shown(files: Mapping[str, Found]) -> dict[str, Found]:
    """Those of all ``files`` of an attempt, by name, that stock readers find at their own names, in the order in which
    they come there: who finds ``.metadata`` finds all of its folder, and who finds that of the top finds all.

    Data files of DCP's are found through ``.metadata``, and indexes are ours alone.
    """
    own = {
        name: found
        for name, found in files.items()
        if name != MANIFEST_NAME
        and not is_index(name)
        and not (is_data(name) and posixpath.join(posixpath.dirname(name), METADATA_NAME) in files)
    }
    return {name: own[name] for name in sorted(own, key=lambda name: (_is_metadata(name), name == METADATA_NAME, name))}


def has_copies(names: Iterable[str]) -> bool:
    """Whether any of the names that are ``shown`` is not that of a ``.metadata``: a copy takes its time."""
    return not all(map(_is_metadata, names))


def behind(files: Mapping[str, Found], there: Mapping[str, Found], since: datetime) -> dict[str, Found]:
    """Those ``files`` to be shown that are not ``there``, or, as far as is known, are another attempt's: they were
    written before ``since``, or have another size.
    """

    def is_late(name: str, part: Found) -> bool:
        if name not in there or there[name].modified < since:
            return True
        return not _is_metadata(name) and there[name].nbytes != part.nbytes

    return {name: part for name, part in files.items() if is_late(name, part)}


def in_the_way(before: Iterable[str], names: Iterable[str]) -> list[str]:
    """Which names of the checkpoint ``before`` go, before ``names`` are shown in its place: as copies take their time,
    all, or for a while stock readers would find some of both; else those that are not replaced.
    """
    names = {*names}
    return [name for name in before if name not in names or has_copies(names)]


def show(
    objects: Objects, place: str, its: str, files: Mapping[str, Found], metadata: Mapping[str, bytes] | None = None
) -> None:
    """Have stock readers find files of a finalized attempt at their own names.

    Args:
        objects: The bucket's.
        place: The key of the checkpoint.
        its: The digest of the attempt.
        files: Which ones, by name, in the order of ``shown``.
        metadata: Each ``.metadata`` as it was written, by name, as far as that is at hand.

    Raises:
        StorageError: The store refuses.
    """
    _under_way.add(where := f"{objects.base}/{place}")
    try:
        _show(objects, place, its, files, metadata or {})
    finally:
        _under_way.discard(where)


def is_under_way(objects: Objects, place: str) -> bool:
    """Whether this process is doing that already."""
    return f"{objects.base}/{place}" in _under_way


def _show(objects: Objects, place: str, its: str, files: Mapping[str, Found], metadata: Mapping[str, bytes]) -> None:
    put: set[str] = set()
    while True:
        put.update(files)
        failure: StorageError | None = None
        try:
            _put(objects, place, its, files, metadata)
        except StorageError as error:
            failure = error
        record, _ = read_record(objects, place)
        if record.is_of(its):
            if failure is not None:
                raise failure
            return
        # This took so long that another has taken its place, or nothing has.
        its, metadata, files = posixpath.basename(record.parts).removeprefix(PARTS), {}, {}
        if record.parts.startswith(PARTS):
            files = shown(list_below(objects, place).of_attempt(its))
        hide(objects, place, in_the_way(put, files))
        if not files:
            return


def _put(objects: Objects, place: str, its: str, files: Mapping[str, Found], metadata: Mapping[str, bytes]) -> None:
    copies = [name for name in files if not _is_metadata(name)]
    with ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="asyncckpt-names") as pool:
        list(pool.map(partial(_copy, objects, place), copies, [files[name] for name in copies]))
    for name in filter(_is_metadata, files):
        _put_metadata(objects, place, its, name, metadata.get(name))


def hide(objects: Objects, place: str, names: Iterable[str]) -> None:
    """Take away what stock readers find at ``names``, first what says that all is there. Raises ``StorageError``."""
    last: list[str] = []
    others: list[str] = []
    for name in names:
        (last if _is_metadata(name) else others).append(f"{place}/{name}")
    objects.delete(last)
    objects.delete(others)


def _is_metadata(name: str) -> bool:
    return posixpath.basename(name) == METADATA_NAME


def _copy(objects: Objects, place: str, name: str, found: Found) -> None:
    objects.copy(found.key, f"{place}/{name}", found.nbytes)  # where it is gone, so is its attempt


def _put_metadata(objects: Objects, place: str, its: str, name: str, metadata: bytes | None) -> None:
    if metadata is None and (stored := objects.get(f"{place}/{PARTS}{its}/{name}")) is not None:
        metadata = stored[0]
    if metadata is not None:
        objects.put(f"{place}/{name}", _below(parts_name(its, posixpath.dirname(name)), metadata))


def _below(folder: str, metadata: bytes) -> bytes:
    """DCP's ``.metadata`` with the data files in a ``folder`` beside it."""
    before = f"{folder}/".encode()

    def rename(found: re.Match[bytes]) -> bytes:
        name = found[2]
        if int.from_bytes(found[1], "little") != len(name):
            return found[0]
        return b"X" + (len(before) + len(name)).to_bytes(4, "little") + before + name

    return _DATA_NAME.sub(rename, metadata)
