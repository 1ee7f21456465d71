"""Which checkpoints there are, and what is in them; without torch, and without reading a pickle."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME, Index, Manifest, checksum, index_name
from asyncckpt.worker.steps import attempts_under_way, complete_steps
from asyncckpt.worker.storage import translated

_POLL_S = 0.02


def is_ours(path: str) -> bool:
    """Whether the checkpoint ``path`` has our manifest; stock DCP's have not."""
    return os.path.exists(os.path.join(path, MANIFEST_NAME))


def read_manifest(path: str) -> Manifest:
    """The manifest of the checkpoint ``path``.

    Raises ``CheckpointNotFoundError`` where there is none, ``DamagedCheckpointError``, ``StorageError``.
    """
    name = os.path.join(path, MANIFEST_NAME)
    if not os.path.exists(name):
        if os.path.exists(os.path.join(path, METADATA_NAME)):
            raise DamagedCheckpointError(
                f"there is no {MANIFEST_NAME} beside {METADATA_NAME}: it was removed, or another program wrote this"
                " (then torch.distributed.checkpoint loads it, and nothing can verify it)",
                path=path,
            )
        raise CheckpointNotFoundError("there is no checkpoint here", path=path)
    return Manifest.parse(_read(name), name)


def read_index(path: str, manifest: Manifest, data: str) -> Index:
    """The index of the file ``data`` of the checkpoint ``path``, checked. Raises as ``read_manifest`` does."""
    name = index_name(data)
    return Index.parse(read_checked(path, manifest, name), os.path.join(path, name))


def read_checked(path: str, manifest: Manifest, name: str) -> bytes:
    """All of the small file ``name`` of the checkpoint ``path``, if its bytes are those that were written."""
    file = os.path.join(path, name)
    facts = manifest.files.get(name)
    if facts is None:
        raise DamagedCheckpointError(f"the manifest knows no {name}", path=path)
    check_size(path, manifest, name)
    data = _read(file)
    if f"{checksum(data):016x}" != facts["xxh3"]:
        raise DamagedCheckpointError("the file is damaged: its checksum does not match", path=file)
    return data


def check_size(path: str, manifest: Manifest, name: str) -> None:
    """Raise ``DamagedCheckpointError`` unless the file ``name`` is there, with the size it was written with."""
    file = os.path.join(path, name)
    try:
        size = os.stat(file).st_size
    except FileNotFoundError as error:
        raise DamagedCheckpointError("a file of this checkpoint is missing", path=file) from error
    if size != manifest.files[name]["bytes"]:
        raise DamagedCheckpointError(
            f"the file is damaged: it has {size:,} bytes and was written with {manifest.files[name]['bytes']:,}",
            path=file,
        )


def indexes(path: str, manifest: Manifest) -> Iterator[Index]:
    """The indexes of all data files."""
    for data in manifest.data_files():
        yield read_index(path, manifest, data)


def latest(root: str) -> int | None:
    """The newest step under ``root`` with a complete checkpoint."""
    steps = complete_steps(root)
    return steps[-1] if steps else None


def settle(root: str, timeout: float) -> None:
    """Wait until no worker is writing under ``root`` any more: one whose trainer died may be about to publish.

    Raises ``StorageError`` after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while attempts := attempts_under_way(root):
        if time.monotonic() >= deadline:
            raise StorageError(
                f"a worker is still writing here after {timeout:g} s; wait for it, or name the step to load",
                path=attempts[0],
            )
        time.sleep(_POLL_S)


def _read(file: str) -> bytes:
    with translated("reading", file), open(file, "rb") as opened:
        return opened.read()
