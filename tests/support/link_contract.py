"""The contract of every storage for linked files: written once, and part of several checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import pytest

from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME
from asyncckpt.format.write_request import Existing
from asyncckpt.storage.storage import OpenAttempt, Storage
from support.checkpoints import Manifest

DATA = "__0_0.distcp"


def put(opened: OpenAttempt, name: str, *parts: bytes, large: bool = False) -> None:
    """Write ``parts`` one after the other to a new file of an attempt, and sync the file."""
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
    """Write a whole checkpoint into ``opened``, but do not finalize it."""
    put(opened, DATA, data)
    put_checkpoint_but_data(opened, attempt, len(data))


def put_checkpoint_but_data(opened: OpenAttempt, attempt: str, nbytes: int) -> None:
    """Write the metadata and the manifest of a checkpoint that has its data file."""
    put(opened, METADATA_NAME, b"metadata")
    files = {DATA: {"bytes": nbytes, "index": "__0_0.index.json"}}
    put(opened, MANIFEST_NAME, Manifest(attempt, 1, 0.0, 1, False, nbytes, files, {}).encode())


class LinkContract(ABC):
    """A part of ``StorageContract``."""

    @abstractmethod
    def save(self, storage: Storage, final: str, attempt: str, existing: Existing = "refuse") -> None: ...

    @pytest.fixture
    def can_link(self) -> bool:
        return True

    def test_a_file_of_another_checkpoint_is_linked(
        self, storage: Storage, root: str, final: str, can_link: bool
    ) -> None:
        if not can_link:
            pytest.skip("no file can be linked here")
        opened = storage.begin_checkpoint(final, "a-1", 0)
        put(opened, DATA, data := os.urandom(100_000), large=False)
        put(opened, "below/" + DATA, data, large=False)
        put_checkpoint_but_data(opened, "a-1", len(data))
        sources = {name: opened.link_source(name) for name in (DATA, "below/" + DATA)}
        opened.finalize("refuse")
        opened.release()
        for number in (2, 3):
            another = storage.begin_checkpoint(f"{root}/{number}", f"a-{number}", 100_000, linked_bytes=100_000)
            for name, source in sources.items():
                assert source is not None and another.link(name, source)
                sources[name] = another.link_source(name)
            assert {DATA, "below/" + DATA} <= another.names()
            put_checkpoint_but_data(another, f"a-{number}", len(data))
            another.finalize("refuse")
            another.release()
            storage.remove_checkpoint(final if number == 2 else f"{root}/2")
        assert storage.read(f"{root}/3/{DATA}") == data and storage.is_finalized(f"{root}/3", "a-3")

    def test_nothing_is_linked_that_is_gone_or_another(self, storage: Storage, root: str, final: str) -> None:
        self.save(storage, final, "a-1")
        opened = storage.begin_checkpoint(f"{root}/2", "a-2", 0)
        put(opened, "__1_0.distcp", b"data")
        source = opened.link_source("__1_0.distcp")
        assert source is not None
        other = storage.begin_checkpoint(f"{root}/3", "a-3", 0)
        assert not other.link(DATA, source._replace(facts=(*source.facts[:-1], -1)))
        opened.discard()
        assert not other.link(DATA, source)
        put(other, DATA, b"written")  # the name is free: the links before were refused
        other.discard()
