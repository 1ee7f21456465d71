"""Object storage: the contract that every kind keeps, and what is particular to objects and conditions."""

from __future__ import annotations

import pytest
from obstore.store import MemoryStore
from support.object_stores import s3_root, s3_server
from support.storage_contract import StorageContract

from asyncckpt.worker.storage import storage_for
from asyncckpt.worker.storage.object_store import ObjectStorage
from asyncckpt.worker.storage.objects import Objects, objects_at, split_address
from asyncckpt.worker.storage.storage import Storage

__all__ = ["s3_root", "s3_server"]


class _ObjectStorageContract(StorageContract):
    def put_strange(self, storage: Storage, path: str) -> None:
        objects = objects_at(path) if path.startswith("s3://") else storage._objects  # type: ignore[attr-defined]
        objects.put(split_address(path)[1], b"mine")


class TestMemory(_ObjectStorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return ObjectStorage(Objects(MemoryStore(), "memory://bucket"))

    @pytest.fixture
    def root(self) -> str:
        return "memory://bucket/root"


class TestS3(_ObjectStorageContract):
    @pytest.fixture
    def storage(self, s3_root: str) -> Storage:
        return storage_for(s3_root)

    @pytest.fixture
    def root(self, s3_root: str) -> str:
        return s3_root
