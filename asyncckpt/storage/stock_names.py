"""The files of a checkpoint on an object store at the names that stock readers expect.

The files of an attempt stay in the folder of the attempt, for asyncckpt's own readers. When the attempt is finalized,
DCP's ``.metadata`` is written to its own name, and points to the data files in the attempt's folder. The other files of
a set are copied to their own names. All these objects can be made again. They are made again if a worker died
meanwhile, or if another checkpoint has taken the place. Readers of asyncckpt do not need these objects.
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
from asyncckpt.storage.objects import Found, Objects
from asyncckpt.storage.record import PARTS, list_below, parts_name, read_record

_COPIES_AT_ONCE = 8
_under_way: set[str] = set()
"""The places whose files this process is copying to their own names."""
# The pickle opcode that makes the name of a data file: its length, then the name.
_DATA_NAME = re.compile(rb"X(.{4})([^\x00-\x1f]{0,4000}?__\d+_\d+\.distcp)", re.DOTALL)


def shown(files: Mapping[str, Found]) -> dict[str, Found]:
    """Return the ``files`` of an attempt that stock readers find at their own names, in the order of their copying.

    The ``.metadata`` of a folder comes after the other files of the folder, and the top ``.metadata`` comes last. So a
    reader that finds ``.metadata`` finds all files. Data files of DCP are excluded, because ``.metadata`` points to
    them. Indexes are excluded, because only asyncckpt reads them.
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
    """Return whether any of the shown ``names`` is not a ``.metadata``, and needs a copy, which takes time."""
    return not all(map(_is_metadata, names))


def behind(files: Mapping[str, Found], there: Mapping[str, Found], since: datetime) -> dict[str, Found]:
    """Return the ``files`` that are missing in ``there``, or seem to belong to another attempt.

    An object belongs to another attempt if it was written before ``since``, or has another size.
    """

    def is_late(name: str, part: Found) -> bool:
        if name not in there or there[name].modified < since:
            return True
        return not _is_metadata(name) and there[name].nbytes != part.nbytes

    return {name: part for name, part in files.items() if is_late(name, part)}


def in_the_way(before: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names of the checkpoint ``before`` to remove before ``names`` are shown in its place.

    If copies are needed, return all names. Otherwise stock readers would see a mixture of both checkpoints for a while.
    If no copies are needed, return only the names that are not replaced.
    """
    names = {*names}
    return [name for name in before if name not in names or has_copies(names)]


def show(
    objects: Objects, place: str, its: str, files: Mapping[str, Found], metadata: Mapping[str, bytes] | None = None
) -> None:
    """Copy files of a finalized attempt to the names that stock readers expect.

    Args:
        objects: Objects of the bucket.
        place: Key of the checkpoint.
        its: Digest of the attempt.
        files: Files to copy, by name, in the order of ``shown``.
        metadata: The contents of each ``.metadata`` as written, by name, if they are in memory.

    Raises:
        StorageError: The store refuses.
    """
    _under_way.add(where := f"{objects.base}/{place}")
    try:
        _show(objects, place, its, files, metadata or {})
    finally:
        _under_way.discard(where)


def is_under_way(objects: Objects, place: str) -> bool:
    """Return whether this process is already copying files of ``place``."""
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
        # During the copies the place has got another checkpoint, or lost its checkpoint.
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
    """Remove the files that stock readers find at ``names``, every ``.metadata`` first. Raises ``StorageError``."""
    last: list[str] = []
    others: list[str] = []
    for name in names:
        (last if _is_metadata(name) else others).append(f"{place}/{name}")
    objects.delete(last)
    objects.delete(others)


def _is_metadata(name: str) -> bool:
    return posixpath.basename(name) == METADATA_NAME


def _copy(objects: Objects, place: str, name: str, found: Found) -> None:
    objects.copy(found.key, f"{place}/{name}", found.nbytes)  # ignores a missing source: its attempt was removed


def _put_metadata(objects: Objects, place: str, its: str, name: str, metadata: bytes | None) -> None:
    if metadata is None and (stored := objects.get(f"{place}/{PARTS}{its}/{name}")) is not None:
        metadata = stored[0]
    if metadata is not None:
        objects.put(f"{place}/{name}", _below(parts_name(its, posixpath.dirname(name)), metadata))


def _below(folder: str, metadata: bytes) -> bytes:
    """Return DCP's ``.metadata`` with its data files moved into ``folder``."""
    before = f"{folder}/".encode()

    def rename(found: re.Match[bytes]) -> bytes:
        name = found[2]
        if int.from_bytes(found[1], "little") != len(name):
            return found[0]
        return b"X" + (len(before) + len(name)).to_bytes(4, "little") + before + name

    return _DATA_NAME.sub(rename, metadata)
