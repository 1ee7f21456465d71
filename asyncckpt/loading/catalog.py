"""Which checkpoints there are, and what each is; without torch, and without reading a pickle."""

from __future__ import annotations

import os
import time

from asyncckpt.errors import CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME, Manifest
from asyncckpt.worker.steps import step_of
from asyncckpt.worker.storage import storage_for

_POLL_S = 0.02


def is_stock(path: str) -> bool:
    """Whether stock DCP wrote the checkpoint ``path``: it has DCP's metadata, and not our manifest."""
    has_metadata, has_manifest = (
        storage_for(path).exists(os.path.join(path, name)) for name in (METADATA_NAME, MANIFEST_NAME)
    )
    return has_metadata and not has_manifest


def read_manifest(path: str) -> Manifest:
    """The manifest of the checkpoint ``path``, which has to be of the step that the name of the folder says.

    Raises ``CheckpointNotFoundError`` where there is none, ``DamagedCheckpointError``, ``StorageError``.
    """
    storage, name = storage_for(path), os.path.join(path, MANIFEST_NAME)
    if is_stock(path):
        raise DamagedCheckpointError(
            f"there is no {MANIFEST_NAME} beside {METADATA_NAME}: it was removed, or another program wrote this"
            " (then torch.distributed.checkpoint loads it, and nothing can verify it)",
            path=path,
        )
    if not storage.exists(name):
        raise CheckpointNotFoundError("there is no checkpoint here", path=path)
    manifest, step = Manifest.parse(storage.read(name), name), step_of(path)
    if step is not None and manifest.step not in (None, step):
        raise DamagedCheckpointError(
            f"this is the checkpoint of step {manifest.step}, under the name of step {step}: it was renamed, or copied"
            " here; give it back its name, or remove it",
            path=path,
            step=step,
        )
    return manifest


def wait_for_attempts(root: str, timeout: float) -> None:
    """Wait until no worker is writing under ``root`` any more: one whose trainer died may be about to finalize.

    Raises ``StorageError`` after ``timeout`` seconds.
    """
    storage, deadline = storage_for(root), time.monotonic() + timeout
    while attempts := storage.attempts_under_way(root):
        if time.monotonic() >= deadline:
            raise StorageError(
                f"a worker is still writing here after {timeout:g} s; wait for it, or name the step to load",
                path=attempts[0],
            )
        time.sleep(_POLL_S)
