"""Object storage: the contract of every storage, and tests of objects and conditional writes."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from obstore.store import MemoryStore
from support.checkpoints import Manifest
from support.link_contract import put, put_checkpoint
from support.object_stores import s3_root, s3_server
from support.storage_contract import StorageContract

from asyncckpt.errors import CheckpointExistsError, SaveTimeoutError, StorageError
from asyncckpt.extension import MANIFEST_NAME, METADATA_NAME, storage_for
from asyncckpt.format.write_request import Existing
from asyncckpt.storage import object_attempt, object_sweep
from asyncckpt.storage.object_store import ObjectStorage
from asyncckpt.storage.objects import Objects, objects_at, split_address
from asyncckpt.storage.record import Listing, PlaceRecord, list_below, read_record
from asyncckpt.storage.stock_names import show
from asyncckpt.storage.storage import OpenAttempt, Storage

__all__ = ["s3_root", "s3_server"]


class _ObjectStorageContract(StorageContract):
    def put_strange(self, storage: Storage, path: str) -> None:
        objects = objects_at(path) if path.startswith("s3://") else storage._objects  # type: ignore[attr-defined]
        objects.put(split_address(path)[1], b"mine")


def files_below(storage: Storage, root: str) -> set[str]:
    objects, key = storage._objects, split_address(root)[1]  # type: ignore[attr-defined]
    return {each.key.removeprefix(f"{key}/") for each in objects.list(key)}


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


def memory() -> ObjectStorage:
    return ObjectStorage(Objects(MemoryStore(), "memory://bucket"))


def test_nothing_is_shared() -> None:
    storage = memory()
    begun(storage, 1, "a-1").finalize("refuse")
    path = "memory://bucket/run/step-00000001/__0_0.distcp"
    before = storage.stamp(path)
    assert before is not None and storage.identity(path) is None
    storage.distrust(path)
    assert storage.stamp(path) == before


def begun(storage: Storage, step: int, attempt: str) -> OpenAttempt:
    opened = storage.begin_checkpoint(f"memory://bucket/run/step-{step:08d}", attempt, 0)
    put_checkpoint(opened, attempt)
    return opened


def test_what_killed_workers_leave_goes_once_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_sweep, "_swept", {})
    storage = memory()
    begun(storage, 1, "a-1").finalize("refuse")
    late = begun(storage, 1, "a-2")
    begun(storage, 2, "a-3")
    assert storage.names_in("memory://bucket/run") == ["step-00000001"]
    before = files_below(storage, "memory://bucket/run")
    object_sweep.sweep(storage._objects, "run", 3600.0)
    assert files_below(storage, "memory://bucket/run") == before
    monkeypatch.setattr(object_sweep, "_swept", {})
    object_sweep.sweep(storage._objects, "run", 0.0)
    left = files_below(storage, "memory://bucket/run")
    assert len({name.split("/")[1] for name in left if ".parts-" in name}) == 1
    with pytest.raises(StorageError, match="revoked"):
        late.finalize("replace")
    assert storage.is_finalized("memory://bucket/run/step-00000001", "a-1")
    assert storage.read("memory://bucket/run/step-00000001/__0_0.distcp") == b"data"
    monkeypatch.setattr(object_sweep, "_swept", {})
    monkeypatch.setattr(object_sweep, "_REVOKED", timedelta(0))
    object_sweep.sweep(storage._objects, "run", 0.0)
    assert {name.split("/")[0] for name in files_below(storage, "memory://bucket/run")} == {"step-00000001"}


def test_a_worker_that_dies_when_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next sweep or resolve writes the files that stock readers need."""
    for finish in ("sweep", "resolve"):
        monkeypatch.setattr(object_sweep, "_swept", {})
        storage, opened = memory(), None
        with monkeypatch.context() as patch:
            patch.setattr(object_attempt, "show", lambda *_: None)
            opened = begun(storage, 1, "a-1")
            opened.finalize("refuse")
        final = "memory://bucket/run/step-00000001"
        assert storage.is_finalized(final, "a-1") and storage.read(f"{final}/.metadata") == b"metadata"
        assert "step-00000001/.metadata" not in files_below(storage, "memory://bucket/run")
        if finish == "sweep":
            object_sweep.sweep(storage._objects, "run", 3600.0)
        else:
            assert storage.resolve(final, "a-1", "refuse") == (True, None)
        assert "step-00000001/.metadata" in files_below(storage, "memory://bucket/run")


def test_a_worker_that_is_only_slow_to_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another checkpoint replaces the slow worker's checkpoint. Stock readers get the newer metadata."""
    storage = memory()

    def slow(*given: Any) -> None:
        monkeypatch.setattr(object_attempt, "show", show)
        begun(storage, 1, "a-2").finalize("replace")
        show(*given)

    monkeypatch.setattr(object_attempt, "show", slow)
    opened = storage.begin_checkpoint(final := "memory://bucket/run/step-00000001", "a-1", 0)
    put(opened, METADATA_NAME, b"older")
    put(opened, MANIFEST_NAME, Manifest("a-1", 1, 0.0, 1, False, 0, {}, {}).encode())
    opened.finalize("refuse")
    assert storage.is_finalized(final, "a-2")
    assert storage._objects.get("run/step-00000001/.metadata")[0] == b"metadata"  # type: ignore[index]


def test_of_two_that_decide_at_once_one_wins(s3_root: str) -> None:
    """Many threads finalize and revoke the same attempt."""
    storage = storage_for(s3_root)
    for number in range(10):
        final, attempt = f"{s3_root}/{number}", f"a-{number}"
        opened = storage.begin_checkpoint(final, attempt, 0)
        put_checkpoint(opened, attempt)
        start = threading.Barrier(5)

        def finalize(opened: OpenAttempt = opened, start: threading.Barrier = start) -> bool:
            start.wait()
            try:
                opened.finalize("refuse")
            except StorageError:
                return False
            return True

        def resolve(final: str = final, attempt: str = attempt, start: threading.Barrier = start) -> bool:
            start.wait()
            time.sleep(random.random() * 0.03)
            return storage.resolve(final, attempt, "refuse").is_finalized

        with ThreadPoolExecutor(5) as pool:
            answers = {each.result() for each in [pool.submit(finalize), *(pool.submit(resolve) for _ in range(4))]}
        assert len(answers) == 1 and storage.is_finalized(final, attempt) in answers


def test_a_store_that_does_not_heed_conditions(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_sweep, "_swept", {})
    storage = memory()
    monkeypatch.setattr(Objects, "put_if", lambda self, key, data, version: self.put(key, data) is not None)
    object_sweep.sweep(storage._objects, "run", 0.0)
    assert "whatever the condition" in caplog.text


def test_large_objects_are_sent_in_parts_from_where_they_are(s3_root: str) -> None:
    storage = storage_for(s3_root)
    opened = storage.begin_checkpoint(f"{s3_root}/it", "a-1", 0)
    data = bytearray(os.urandom((40 << 20) + 4096))
    file = opened.create("__0_0.distcp", large=True)
    pieces = [(at, memoryview(data)[at : at + (16 << 20)]) for at in range(0, len(data), 16 << 20)]
    for at, piece in [pieces[1], pieces[2], pieces[0]]:
        file.write(piece, at)
    file.truncate(len(data) - 4000)
    file.sync()
    file.close()
    assert storage.read(f"{opened.path}/__0_0.distcp") == data[:-4000]
    metadata = opened.create(METADATA_NAME, large=False)
    for at, piece in pieces[:2]:
        metadata.write(piece, at)
    metadata.sync()
    put(opened, MANIFEST_NAME, Manifest("a-1", 1, 0.0, 1, False, 0, {}, {}).encode())
    broken = opened.create("__1_0.distcp", large=True)
    for at, piece in pieces[:2]:
        broken.write(piece, at)
    broken.close()  # before the file is complete
    gap = opened.create("__2_0.distcp", large=True)
    gap.write(pieces[0][1], 0)
    gap.write(pieces[2][1], pieces[2][0])
    with pytest.raises(StorageError, match="nothing was written"):
        gap.sync()
    gap.close()
    assert opened.names() == {"__0_0.distcp", METADATA_NAME, MANIFEST_NAME}
    opened.finalize("refuse")
    assert objects_at(s3_root).get(f"{split_address(s3_root)[1]}/it/.metadata")[0] == data[: 32 << 20]  # type: ignore[index]


def run_of(storage: Storage) -> set[str]:
    return files_below(storage, "memory://bucket/run")


def sweep_again(storage: ObjectStorage) -> None:
    object_sweep._swept.clear()
    object_sweep.sweep(storage._objects, "run", 0.0)


def test_a_request_that_comes_late_finalizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deciding request is stuck while the store is gone. The attempt is discarded before the request arrives."""
    storage = memory()
    opened = begun(storage, 1, "a-1")
    late: list[tuple[str, bytes, dict[str, str] | None]] = []

    def stuck(self: Objects, key: str, data: bytes, version: dict[str, str] | None) -> bool:
        late.append((key, data, version))
        raise StorageError("as the test wants", path=key)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "put_if", stuck)
        with pytest.raises(SaveTimeoutError, match="outcome of the save is not known"):
            opened.finalize("refuse")
    opened.discard()
    assert not storage._objects.put_if(*late[0])
    assert not storage.is_finalized("memory://bucket/run/step-00000001", "a-1")
    assert storage.names_in("memory://bucket/run") == []


@pytest.mark.parametrize("existing", ["replace", "set aside"])
def test_stock_readers_never_keep_the_metadata_of_another(existing: Existing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker replaces a checkpoint, and dies before it updates the metadata for stock readers."""
    storage = memory()
    for attempt, metadata in (("a-1", b"older"), ("a-2", b"newer")):
        opened = storage.begin_checkpoint("memory://bucket/run/step-00000001", attempt, 0)
        put(opened, METADATA_NAME, metadata)
        put(opened, MANIFEST_NAME, Manifest(attempt, 1, 0.0, 1, False, 0, {}, {}).encode())
        with monkeypatch.context() as patch:
            if attempt == "a-2":
                patch.setattr(object_attempt, "show", lambda *_: None)
            opened.finalize(existing)
    sweep_again(storage)
    found = storage._objects.get("run/step-00000001/.metadata")
    assert found is not None and found[0] == b"newer"
    assert ("step-00000001.abandoned-1/asyncckpt.json" in run_of(storage)) == (existing == "set aside")
    if existing == "set aside":
        assert storage.is_finalized("memory://bucket/run/step-00000001.abandoned-1", "a-1")
        assert storage.read("memory://bucket/run/step-00000001.abandoned-1/.metadata") == b"older"


def test_one_that_is_set_aside_while_others_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = memory()
    final = "memory://bucket/run/step-00000001"
    begun(storage, 1, "a-1").finalize("refuse")
    other = begun(storage, 1, "a-2")

    def meanwhile(objects: Objects, key: str) -> Listing:
        listing = list_below(objects, key)
        other.finalize("set aside")
        return listing

    monkeypatch.setattr("asyncckpt.storage.object_sweep.list_below", meanwhile)
    sweep_again(storage)
    assert storage.read(f"{final}.abandoned-1/__0_0.distcp") == storage.read(f"{final}/__0_0.distcp") == b"data"


def test_a_damaged_record_costs_no_data() -> None:
    storage = memory()
    begun(storage, 1, "a-1").finalize("refuse")
    key = "run/step-00000001/asyncckpt.json"
    body = storage._objects.get(key)
    assert body is not None
    storage._objects.put(key, body[0].replace(b'"parts"', b'"pants"'))
    before = run_of(storage)
    sweep_again(storage)
    assert run_of(storage) == before
    with pytest.raises(StorageError, match="damaged"):
        storage.revoke("memory://bucket/run/step-00000001", "a-2")


def test_other_roots_below_are_left_alone() -> None:
    storage = memory()
    opened = storage.begin_checkpoint("memory://bucket/run/other/step-00000001", "a-1", 0)
    put_checkpoint(opened, "a-1")
    sweep_again(storage)
    opened.finalize("refuse")
    assert storage.read("memory://bucket/run/other/step-00000001/__0_0.distcp") == b"data"


def test_retention_beside_a_save_of_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is committed during the removal of an older checkpoint of its step stays."""
    storage = memory()
    final = "memory://bucket/run/step-00000001"
    begun(storage, 1, "a-1").finalize("refuse")
    other = begun(storage, 1, "a-2")

    def meanwhile(objects: Objects, place: str, record: PlaceRecord) -> None:
        other.finalize("refuse")
        object_attempt.remove_parts(objects, place, record)

    monkeypatch.setattr("asyncckpt.storage.object_store.remove_parts", meanwhile)
    with pytest.raises(CheckpointExistsError):
        begun(storage, 1, "a-3").finalize("refuse")
    assert storage.remove_checkpoint(final)
    assert storage.is_finalized(final, "a-2") and storage.read(f"{final}/__0_0.distcp") == b"data"
    assert "step-00000001/.metadata" in run_of(storage)


@pytest.mark.parametrize("first", ["step", "alias"])
def test_what_two_places_name_goes_with_the_last_of_them(first: str) -> None:
    storage = memory()
    final = "memory://bucket/run/step-00000001"
    begun(storage, 1, "a-1").finalize("refuse")
    found, _ = read_record(storage._objects, "run/step-00000001")
    object_attempt.keep_aside(storage._objects, "run/step-00000001", found, "abandoned")
    places = [final, f"{final}.abandoned-1"]
    for place in places if first == "step" else reversed(places):
        assert storage.read(f"{place}/__0_0.distcp") == b"data"
        assert storage.remove_checkpoint(place)
    assert not any(".parts-" in name for name in run_of(storage))


def test_a_record_is_not_forgotten_by_which_something_is_finalized_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_sweep, "_swept", {})
    monkeypatch.setattr(object_sweep, "_REVOKED", timedelta(0))
    storage, path = memory(), "memory://bucket/run/step-00000001"
    storage.revoke(path, "a-0")  # an old failed save of this step
    look, head = list_below, Objects.head
    opened: list[OpenAttempt] = []

    def look_and_wait(objects: Objects, key: str) -> Listing:
        monkeypatch.setattr(object_sweep, "list_below", look)
        found = look(objects, key)
        # Another worker begins the step again, while this worker is still removing other files.
        opened.append(storage.begin_checkpoint(path, "a-1", 0, 60.0))
        put_checkpoint(opened[0], "a-1")
        return found

    def head_and_wait(self: Objects, key: str) -> Any:
        found = head(self, key)
        if key.endswith("step-00000001/asyncckpt.json"):
            monkeypatch.setattr(Objects, "head", head)
            opened[0].finalize("refuse")
            assert storage.is_finalized(path, "a-1")
        return found

    monkeypatch.setattr(object_sweep, "list_below", look_and_wait)
    monkeypatch.setattr(Objects, "head", head_and_wait)
    time.sleep(1.1)
    object_sweep.sweep(storage._objects, "run", 0.0)
    assert storage.is_finalized(path, "a-1")
