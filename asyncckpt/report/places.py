"""What there is at a path that somebody has named: checkpoints of ours, or what others have stored."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Literal

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.loading.contents import checkpoints_at
from asyncckpt.loading.data_file import read_plain
from asyncckpt.loading.source import is_stock, read_manifest
from asyncckpt.report.answers import Answers
from asyncckpt.report.archives import records
from asyncckpt.worker.manifest import METADATA_NAME, Manifest
from asyncckpt.worker.storage import is_address, storage_for

OursKind = Literal["asyncckpt", "file set"]
OthersKind = Literal["dcp", "torch.save", "safetensors"]
Kind = OursKind | OthersKind

ARCHIVE_BEGIN, _ARCHIVE_END, _END_BYTES = b"PK\3\4", b"PK\5\6", 22
# What torch.save wrote before torch 1.6, and still does where it is asked to: a pickle of a magic number comes first.
_LEGACY_BEGIN = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_SAFETENSORS_PREFIX_BYTES = 8
_HEAD_BYTES = 512
# What every file of torch.save has, and the names that its first record may have: torch puts the pickle first.
_PICKLE = re.compile(rb"/data\.pkl\Z")
_RECORD = re.compile(rb"/(data\.pkl|data/0|byteorder|version|\.data/|\.format_version|\.storage_alignment)")


def found_at(path: str) -> list[str]:
    """The checkpoints that ``path`` stands for, as ``checkpoints_at`` finds them; or a file of another kind.

    Raises ``CheckpointNotFoundError`` where there is neither; ``StorageError``.
    """
    try:
        return checkpoints_at(path)
    except CheckpointNotFoundError:
        if _kind_of_file(path) is None:
            raise
        return [path]


def newest_of(answers: Answers, paths: list[str]) -> str | None:
    """What was created last, which after going back is not the highest step; None: nothing can be read, as was said."""
    found: list[tuple[float, int, str]] = []
    for number_of, path in enumerate(paths):
        with answers.about(path), still_there(path, ""):
            # What stock DCP wrote does not say when: it comes before all that does.
            found.append((-math.inf if is_stock(path) else read_manifest(path).created, number_of, path))
    return max(found)[2] if found else None


def kind_of_others(path: str) -> OthersKind | None:
    """What others have stored at ``path``; None: it is ours, also without its manifest, or is not there.

    Raises ``StorageError``.
    """
    return "dcp" if is_stock(path) else _kind_of_file(path)


def kind_of_ours(manifest: Manifest) -> OursKind:
    """What a manifest is of."""
    return "asyncckpt" if METADATA_NAME in manifest.files else "file set"


def is_archive(head: bytes, tail: bytes) -> bool:
    """Whether what begins and ends so is a ZIP archive; one of both may be damaged."""
    return head.startswith(ARCHIVE_BEGIN) or _ARCHIVE_END in tail[-_END_BYTES:]


def is_legacy(path: str) -> bool:
    """Whether the file of ``torch.save`` at ``path`` is no archive: it has no checksums, and no table of tensors."""
    with closing(storage_for(path).open(path)) as file:
        return read_plain(file, 0, len(_LEGACY_BEGIN)) == _LEGACY_BEGIN


def _kind_of_file(path: str) -> Literal["torch.save", "safetensors"] | None:
    storage = storage_for(path)
    if not (is_address(path) or os.path.isfile(path)) or not (size := storage.size(path)):
        return None
    with closing(storage.open(path)) as file:
        head, tail = read_plain(file, 0, min(size, _HEAD_BYTES)), read_plain(file, max(0, size - _END_BYTES), size)
    if path.endswith(".safetensors") or head[_SAFETENSORS_PREFIX_BYTES:].startswith(b'{"'):
        return "safetensors"
    if head.startswith(_LEGACY_BEGIN) or (is_archive(head, tail) and _is_of_torch(path, head)):
        return "torch.save"
    return None


def _is_of_torch(path: str, head: bytes) -> bool:
    """Whether an archive is one of ``torch.save``, and no wheel, say: of one that is damaged its first record says."""
    try:
        return any(_PICKLE.search(name.encode(errors="replace")) for name, _ in records(path))
    except DamagedCheckpointError:
        return _RECORD.search(head) is not None


def manifests_at(answers: Answers, given: str) -> Iterator[tuple[str, Manifest]]:
    """The paths and manifests of the checkpoints at ``given``; what cannot be read of them is said."""
    with answers.about(given):
        paths = found_at(given)
        if paths == [given] and (kind := kind_of_others(given)) is not None:
            raise CheckpointNotFoundError(
                f"this is of the kind {kind}: only what asyncckpt has written says how long it took", path=given
            )
        for path in paths:
            with answers.about(path), still_there(path, given):
                yield path, read_manifest(path)


@contextlib.contextmanager
def still_there(path: str, given: str) -> Iterator[None]:
    """Pass over a checkpoint that was listed and is gone since, as by retention; not one that was ``given``."""
    try:
        yield
    except CheckpointError:
        if path == given or storage_for(path).exists(path):
            raise
