"""The files for stock readers of a checkpoint on an object store, also when workers die or are slow."""

from __future__ import annotations

import os
from typing import Any

import pytest
from obstore.store import MemoryStore
from s3.proxy import Asked, StoreProxy
from support.checkpoints import Manifest
from support.link_contract import put
from support.object_stores import s3_root, s3_server, set_environment

from asyncckpt.errors import StorageError
from asyncckpt.extension import MANIFEST_NAME, METADATA_NAME
from asyncckpt.format.write_request import Existing
from asyncckpt.storage import object_attempt, object_store, object_sweep, objects
from asyncckpt.storage.object_store import ObjectStorage
from asyncckpt.storage.objects import Objects, objects_at, split_address
from asyncckpt.storage.record import list_below
from asyncckpt.storage.storage import OpenAttempt

__all__ = ["s3_root", "s3_server"]

FINAL = "memory://bucket/run/step-00000001"
# The first bytes of DCP's metadata. Only the names matter in these tests.
DCP = b"X\x0c\0\0\0__0_0.distcp"
FILES = {
    "a.json": b"a",
    "deep/b.json": b"b",
    "sharded/x/.metadata": DCP,
    "sharded/x/__0_0.distcp": b"x",
    ".metadata": DCP,
    "__0_0.distcp": b"top",
    "__0_0.index.json": b"{}",
}
SHOWN = ["a.json", "deep/b.json", "sharded/x/.metadata", ".metadata"]


@pytest.fixture
def storage() -> ObjectStorage:
    return ObjectStorage(Objects(MemoryStore(), "memory://bucket"))


def begun(storage: ObjectStorage, attempt: str, more: str = "more.json", without: str = "") -> OpenAttempt:
    """Begin an attempt, and write files to it. The content of each file ends with the name of the attempt."""
    opened = storage.begin_checkpoint(FINAL, attempt, 0)
    files = {**FILES, more: b""}
    files.pop(without, None)
    for name, data in files.items():
        put(opened, name, data, attempt.encode())
    facts = {name: {"bytes": len(data), "xxh3": ""} for name, data in files.items()}
    put(opened, MANIFEST_NAME, Manifest(attempt, 1, 0.0, 1, False, 0, facts, {}).encode())
    opened.names()  # the committer calls this, too
    return opened


def seen(storage: ObjectStorage) -> dict[str, bytes]:
    """Return the files that stock readers find under their own names."""
    store, found = storage._objects, {}
    for each in store.list("run/step-00000001"):
        name = each.key.removeprefix("run/step-00000001/")
        if ".parts-" not in name and name != MANIFEST_NAME:
            found[name] = store.get(each.key)[0]  # type: ignore[index]
    return found


def is_all_of(storage: ObjectStorage, attempt: str, more: str = "more.json") -> bool:
    return seen(storage).keys() == {*SHOWN, more} and all(
        data.endswith(attempt.encode()) for data in seen(storage).values()
    )


def sweep(storage: ObjectStorage) -> None:
    object_sweep._swept.clear()
    object_sweep.sweep(storage._objects, "run", 3600.0)


def test_each_comes_to_its_name_and_what_says_that_all_is_there_last(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    put_one, copy_one = Objects.put, Objects.copy

    def noted_put(self: Objects, key: str, data: bytes | memoryview) -> None:
        put_one(self, key, data)
        order.append(key.removeprefix("run/step-00000001/"))

    def noted_copy(self: Objects, key: str, to: str, nbytes: int) -> None:
        copy_one(self, key, to, nbytes)
        order.append(to.removeprefix("run/step-00000001/"))

    opened = begun(storage, "a-1")
    monkeypatch.setattr(Objects, "put", noted_put)
    monkeypatch.setattr(Objects, "copy", noted_copy)
    opened.finalize("refuse")
    assert is_all_of(storage, "a-1") and sorted(order) == sorted([*SHOWN, "more.json"])
    assert order[-2:] == SHOWN[-2:]
    found = seen(storage)
    (its,) = {each.key.split(".parts-")[1][:32] for each in storage._objects.list("run") if ".parts-" in each.key}
    assert found[".metadata"].startswith(b"X\x34\0\0\0" + f".parts-{its}/__0_0.distcp".encode())
    nested = f".parts-{its}-2/__0_0.distcp"
    assert found["sharded/x/.metadata"].startswith(b"X\x36\0\0\0" + nested.encode())
    assert storage._objects.get(f"run/step-00000001/sharded/x/{nested}")[0] == b"xa-1"  # type: ignore[index]


def test_a_worker_that_dies_while_it_copies(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next sweep copies the missing files. ``resolve`` does not wait for them."""

    def die(self: Objects, key: str, to: str, nbytes: int) -> None:
        raise StorageError("as the test wants", path=to)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "copy", die)
        opened = begun(storage, "a-1")
        opened.finalize("refuse")
        assert not seen(storage) and storage.is_finalized(FINAL, "a-1")
        assert storage.resolve(FINAL, "a-1", "refuse") == (True, None)
        sweep(storage)
        assert not seen(storage)
    for name in FILES:
        assert storage.read(f"{FINAL}/{name}") == FILES[name] + b"a-1"
    sweep(storage)
    assert is_all_of(storage, "a-1")


def test_what_is_there_is_not_copied_again(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(storage, "a-1").finalize("refuse")
    copied: list[str] = []
    monkeypatch.setattr(Objects, "copy", lambda self, key, to, nbytes: copied.append(to))
    sweep(storage)
    assert not copied
    storage._objects.delete(["run/step-00000001/deep/b.json"])
    sweep(storage)
    assert copied == ["run/step-00000001/deep/b.json"]


def test_what_is_being_copied_no_sweep_copies(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    real = Objects.copy

    def slow(self: Objects, key: str, to: str, nbytes: int) -> None:
        copied.append(to)
        if to.endswith("b.json") and copied.count(to) == 1:
            sweep(storage)
        real(self, key, to, nbytes)

    monkeypatch.setattr(Objects, "copy", slow)
    begun(storage, "a-1").finalize("refuse")
    assert is_all_of(storage, "a-1") and len(copied) == len({*copied})


@pytest.mark.parametrize("existing", ["replace", "set aside"])
@pytest.mark.parametrize("hides", [True, False])
def test_a_worker_that_is_only_slow_to_copy(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, existing: Existing, hides: bool
) -> None:
    """Another checkpoint replaces the slow worker's checkpoint. In the end stock readers find all of the other's files.

    The slow worker also removes files that it has copied in excess, if the other worker has not.
    """
    real = Objects.copy
    other = begun(storage, "a-2", more="other.json", without="a.json")

    def slow(self: Objects, key: str, to: str, nbytes: int) -> None:
        if to.endswith("b.json"):
            monkeypatch.setattr(Objects, "copy", real)
            other.finalize(existing)
        real(self, key, to, nbytes)

    opened = begun(storage, "a-1")
    if not hides:
        monkeypatch.setattr(object_attempt, "hide", lambda *_: None)
    monkeypatch.setattr(Objects, "copy", slow)
    opened.finalize("refuse")
    assert storage.is_finalized(FINAL, "a-2")
    found = seen(storage)
    assert found.keys() == {*SHOWN, "other.json"} - {"a.json"}
    assert all(data.endswith(b"a-2") for data in found.values())


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_that_is_slow_to_copy_what_was_removed(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Another worker removes the checkpoint. The copying worker itself refuses to remove it during the copy."""
    real = Objects.copy

    def slow(self: Objects, key: str, to: str, nbytes: int) -> None:
        if to.endswith("b.json"):
            assert not storage.remove_checkpoint(FINAL)
            with monkeypatch.context() as patch:
                patch.setattr(object_store, "is_under_way", lambda *_: False)
                assert storage.remove_checkpoint(FINAL)
            if fails:
                raise StorageError("as the test wants", path=to)
        real(self, key, to, nbytes)

    monkeypatch.setattr(Objects, "copy", slow)
    begun(storage, "a-1").finalize("refuse")
    assert not seen(storage) and storage.names_in("memory://bucket/run") == []
    assert storage.may_put(FINAL, "refuse")


def test_a_worker_that_dies_as_it_takes_the_place_of_another(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock readers find only some files, never files of two checkpoints, and no top-level metadata."""
    begun(storage, "a-1").finalize("refuse")
    real = Objects.copy

    def die(self: Objects, key: str, to: str, nbytes: int) -> None:
        if to.endswith("b.json"):
            raise StorageError("as the test wants", path=to)
        real(self, key, to, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "copy", die)
        begun(storage, "a-2").finalize("replace")
    found = seen(storage)
    assert found.keys() < {"a.json", "more.json"} | {"deep/b.json"} and METADATA_NAME not in found
    assert all(data.endswith(b"a-2") for data in found.values())
    sweep(storage)
    assert is_all_of(storage, "a-2")


@pytest.mark.parametrize("how", ["answer lost", "killed"])
def test_the_names_of_what_it_took_the_place_of_go(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """They also go if the answer to the deciding write is lost, or if the worker dies just after it."""
    begun(storage, "a-1", more="old.json").finalize("refuse")
    opened, real = begun(storage, "a-2"), Objects.put_if
    lost: list[str] = []

    def lose(self: Objects, key: str, *args: Any) -> bool:
        done = real(self, key, *args)
        if not done or lost:
            return done
        lost.append(key)
        return False

    def die(*_: Any) -> None:
        raise StorageError("as the test wants")

    with monkeypatch.context() as patch:
        if how == "killed":
            patch.setattr(object_attempt, "hide", die)
        else:
            patch.setattr(Objects, "put_if", lose)
        opened.finalize("replace")
    if how == "killed":
        object_sweep._swept.clear()
        object_sweep.sweep(storage._objects, "run", 0.0)
    assert is_all_of(storage, "a-2") and storage.may_put(FINAL, "replace")
    assert (
        len({each.key.split(".parts-")[1][:32] for each in storage._objects.list("run") if ".parts-" in each.key}) == 1
    )


def test_files_of_others_with_such_names_stay(storage: ObjectStorage) -> None:
    storage._objects.put("run/notes/.parts-list/mine.txt", b"mine")
    object_sweep._swept.clear()
    object_sweep.sweep(storage._objects, "run", 0.0)
    assert storage.read("memory://bucket/run/notes/.parts-list/mine.txt") == b"mine"


def test_what_killed_workers_leave_in_folders_goes(storage: ObjectStorage) -> None:
    opened = storage.begin_checkpoint(FINAL, "a-1", 0)
    put(opened, "sharded/x/__0_0.distcp", b"x")  # no other file yet
    other = storage.begin_checkpoint("memory://bucket/run/other/step-00000001", "a-2", 0)
    put(other, "sharded/x/__0_0.distcp", b"x")
    object_sweep._swept.clear()
    object_sweep.sweep(storage._objects, "run", 0.0)
    (left,) = [each.key for each in storage._objects.list("run") if ".parts-" in each.key]
    assert "run/other/" in left


@pytest.mark.parametrize("how", ["sent", "refused", "missing", "sent, missing"])
def test_what_a_store_cannot_copy_goes_by_way_of_here(
    s3_root: str, s3_server: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Asked] = []

    def spoil(asked: Asked) -> str | None:
        if asked.method != "PUT" or not asked.path.endswith("/to") or asked.nbytes:
            return None
        copies.append(asked)
        return "403" if how == "refused" else None

    with StoreProxy(s3_server, spoil) as proxy:
        set_environment(monkeypatch, proxy.endpoint)
        store, key = objects_at(s3_root), split_address(s3_root)[1]
        if how.startswith("sent"):
            monkeypatch.setattr(objects, "_MOST_COPIED", 1 << 20)
        data = os.urandom((40 << 20) + 5)
        if "missing" not in how:
            store.put(f"{key}/from", data)
        store.copy(f"{key}/from", f"{key}/to", len(data))
        found = store.get(f"{key}/to")
        assert (found is None) == ("missing" in how)
        assert found is None or found[0] == data
        assert bool(copies) != how.startswith("sent")
        store.put(f"{key}/small", b"small")
        if how == "refused":
            with pytest.raises(StorageError, match="copying"):
                store.copy(f"{key}/small", f"{key}/to", 5)


def test_names(storage: ObjectStorage) -> None:
    opened = begun(storage, "a-1")
    opened.finalize("refuse")
    its = storage._objects
    listed = list_below(its, "run/step-00000001")
    ((_, files),) = listed.parts.items()
    assert files.keys() == {*FILES, "more.json"}
    # A listing from inside the checkpoint omits parts that belong to a place further up.
    assert not list_below(its, "run/step-00000001/sharded/x").parts
    assert list_below(its, "run").parts.keys() == {
        f"step-00000001/{next(iter(listed.parts))}",
    }
