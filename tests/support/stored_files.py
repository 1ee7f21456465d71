"""Files of a test, written into an attempt at a checkpoint."""

from __future__ import annotations

from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME, Manifest
from asyncckpt.worker.storage.storage import OpenAttempt

DATA = "__0_0.distcp"


def put(opened: OpenAttempt, name: str, *parts: bytes, large: bool = False) -> None:
    """Write ``parts`` one after the other into a new file of an attempt, durably."""
    file = opened.create(name, large=large)
    try:
        offset = 0
        for part in parts:
            file.write(memoryview(part), offset)
            offset += len(part)
        file.sync()
    finally:
        file.close()


def put_checkpoint(opened: OpenAttempt, attempt: str, data: bytes = b"data") -> None:
    """Write a whole checkpoint into ``opened``, which is to be finalized."""
    put(opened, DATA, data)
    put(opened, METADATA_NAME, b"metadata")
    files = {DATA: {"bytes": len(data), "index": "__0_0.index.json"}}
    put(opened, MANIFEST_NAME, Manifest(attempt, 1, 0.0, 1, False, len(data), files, {}).encode())
