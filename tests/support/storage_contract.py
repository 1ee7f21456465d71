"""The contract of every storage: a class of tests that the tests of each storage derive from."""

from __future__ import annotations

import contextlib
import json
import os
from abc import abstractmethod
from pathlib import Path

import pytest

from asyncckpt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, StorageError
from asyncckpt.extension import MANIFEST_NAME, METADATA_NAME
from asyncckpt.format.write_request import Existing
from asyncckpt.shm.huge import huge_buffer
from asyncckpt.storage.storage import Storage
from support.abilities import can_link, keeps_inodes, need_locks, need_space_told
from support.checkpoints import PAGE
from support.faulty_storage import POINTS, FaultyStorage
from support.link_contract import DATA, LinkContract, put, put_checkpoint


class StorageContract(LinkContract):
    """Base class. Subclasses define the fixtures ``storage``, and ``root``: an unused place in it."""

    @pytest.fixture
    @abstractmethod
    def storage(self) -> Storage: ...

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path / "root")

    @pytest.fixture
    def final(self, root: str) -> str:
        return f"{root}/final"

    @abstractmethod
    def put_strange(self, storage: Storage, path: str) -> None:
        """Write a file with the text "mine" that belongs to no checkpoint."""

    def save(self, storage: Storage, final: str, attempt: str, existing: Existing = "refuse") -> None:
        opened = storage.begin_checkpoint(final, attempt, 0)
        put_checkpoint(opened, attempt, attempt.encode())
        try:
            opened.finalize(existing)
            opened.release()
        except CheckpointError:
            opened.discard()
            raise

    def test_what_is_written_is_there_when_it_is_finalized(self, storage: Storage, root: str, final: str) -> None:
        assert storage.may_put(final, "refuse")
        opened = storage.begin_checkpoint(final, "a-1", 100)
        put_checkpoint(opened, "a-1")
        assert opened.names() == {DATA, METADATA_NAME, MANIFEST_NAME}
        assert not storage.exists(final) and not storage.is_finalized(final, "a-1")
        opened.finalize("refuse")
        opened.release()
        assert storage.is_finalized(final, "a-1") and not storage.is_finalized(final, "a-2")
        assert storage.names_in(root) == ["final"]
        assert sorted(storage.names_in(final)) == sorted([DATA, METADATA_NAME, MANIFEST_NAME])
        assert storage.read(f"{final}/{DATA}") == b"data" and storage.size(f"{final}/{DATA}") == 4
        assert storage.may_put(final, "replace")

    @pytest.mark.parametrize("large", [False, True])
    def test_a_file_has_the_bytes_that_were_written(self, storage: Storage, final: str, large: bool) -> None:
        opened = storage.begin_checkpoint(final, "a-1", 3 * PAGE)
        pages = huge_buffer(3 * PAGE)
        pages[:] = os.urandom(len(pages))
        file = opened.create(DATA, large=large)
        file.write(pages[PAGE:], PAGE)
        file.write(pages[:PAGE], 0)
        file.truncate(2 * PAGE + 1)
        file.sync()
        file.close()
        file.close()
        assert storage.read(f"{opened.path}/{DATA}") == bytes(pages[: 2 * PAGE + 1])
        self.read_in_ranges(storage, f"{opened.path}/{DATA}", pages)
        with pytest.raises(StorageError):
            opened.create(DATA, large=large)
        opened.discard()

    def read_in_ranges(self, storage: Storage, path: str, expected: memoryview) -> None:
        """Check that the file has the first two pages of ``expected`` and one more byte."""
        with contextlib.closing(storage.open(path)) as file:
            memory = huge_buffer(4 * PAGE)
            assert file.read([memory[:PAGE]], PAGE) == PAGE and memory[:PAGE] == expected[PAGE : 2 * PAGE]
            found = file.read_in_place([memory[:PAGE], memory[PAGE:]], 0) if file.alignment else None
            if found is None:
                found = file.read([memory[:PAGE], memory[PAGE:]], 0)
            assert found == 2 * PAGE + 1 and memory[:found] == expected[:found]

    def test_all_ranks_write_into_the_same_attempt(self, storage: Storage, root: str, final: str) -> None:
        first, second = (storage.begin_checkpoint(final, "a-1", 0) for _ in range(2))
        put(second, "__1_0.distcp", b"second")
        put_checkpoint(first, "a-1")
        assert "__1_0.distcp" in first.names() and not first.missing(["__1_0.distcp"])
        first.finalize("refuse")
        first.release()
        second.release()
        assert storage.read(f"{final}/__1_0.distcp") == b"second" and storage.names_in(root) == ["final"]

    def test_a_rank_discards_its_own_files(self, storage: Storage, root: str, final: str) -> None:
        first, second = (storage.begin_checkpoint(final, "a-1", 0) for _ in range(2))
        put(first, DATA, b"first")
        put(second, "__1_0.distcp", b"second")
        second.discard(["__1_0.distcp"])
        assert first.names() == {DATA}
        first.discard()
        assert storage.names_in(root) == []

    @pytest.mark.parametrize("existing", ["refuse", "replace", "join", "set aside"])
    def test_a_checkpoint_where_another_is(self, storage: Storage, root: str, final: str, existing: Existing) -> None:
        self.save(storage, final, "a-1")
        assert storage.may_put(final, existing) == (existing != "refuse")
        if existing == "refuse":
            with pytest.raises(CheckpointExistsError):
                self.save(storage, final, "a-2", existing)
        else:
            self.save(storage, final, "a-2", existing)
        assert storage.is_finalized(final, "a-1" if existing == "refuse" else "a-2")
        aside = ["final.abandoned-1"] if existing == "set aside" else []
        assert sorted(storage.names_in(root)) == ["final", *aside]
        assert all(storage.is_finalized(f"{root}/{name}", "a-1") for name in aside)

    @pytest.mark.parametrize("existing", ["refuse", "replace", "join"])
    def test_a_checkpoint_where_files_of_others_are(
        self, storage: Storage, root: str, final: str, existing: Existing
    ) -> None:
        self.put_strange(storage, f"{final}/mine.txt")
        assert storage.may_put(final, existing) == (existing == "join")
        if existing == "join":
            self.save(storage, final, "a-1", existing)
        else:
            with pytest.raises(CheckpointExistsError):
                self.save(storage, final, "a-1", existing)
        assert storage.is_finalized(final, "a-1") == (existing == "join")
        assert storage.read(f"{final}/mine.txt") == b"mine" and storage.names_in(root) == ["final"]

    def test_a_revoked_attempt_is_never_finalized(self, storage: Storage, root: str, final: str) -> None:
        opened = storage.begin_checkpoint(final, "a-1", 0)
        put_checkpoint(opened, "a-1")
        storage.remove(storage.revoke(final, "a-1"))
        with pytest.raises(StorageError):
            opened.finalize("refuse")
        opened.discard()
        assert storage.names_in(root) == []
        assert storage.revoke(final, "a-1") is None

    @pytest.mark.parametrize("existing", ["refuse", "replace", "join"])
    def test_resolving_first_decides(self, storage: Storage, root: str, final: str, existing: Existing) -> None:
        if existing != "refuse":
            self.save(storage, final, "a-1")
        opened = storage.begin_checkpoint(final, "a-2", 0)
        put_checkpoint(opened, "a-2")
        for _ in range(2):
            is_finalized, leftover = storage.resolve(final, "a-2", existing)
            assert not is_finalized
            storage.remove(leftover)
        with pytest.raises(StorageError):
            opened.finalize(existing)
        opened.discard()
        assert not storage.is_finalized(final, "a-2")
        assert existing != "replace" or storage.is_finalized(final, "a-1")

    def test_resolving_later_changes_nothing(self, storage: Storage, root: str, final: str) -> None:
        self.save(storage, final, "a-1")
        assert storage.resolve(final, "a-1", "refuse") == (True, None)
        assert storage.is_finalized(final, "a-1") and storage.names_in(root) == ["final"]

    def test_looking_where_nothing_is(self, storage: Storage, final: str) -> None:
        assert storage.names_in(final) == [] and not storage.exists(final) and storage.size(final) is None
        assert all(storage.may_put(final, existing) for existing in ("refuse", "replace", "join"))
        assert storage.stamp(final) is None
        assert not storage.is_finalized(final, "a-1") and storage.resolve(final, "a-1", "refuse") == (False, None)
        for refused in (
            lambda: storage.read(final),
            lambda: storage.open(final),
            lambda: storage.set_aside(final, "damaged"),
        ):
            with pytest.raises(StorageError):
                refused()
        with pytest.raises(StorageError):
            storage.remove_checkpoint(final)
        with pytest.raises(CheckpointNotFoundError), storage.reading(final):
            pass

    def test_a_pointer_advances(self, storage: Storage, root: str, final: str) -> None:
        self.save(storage, final, "a-1")
        at = 10**18
        for text, later in (("one", 0), ("another", 0), ("last", 10**9)):  # file times may be whole seconds
            assert storage.advance(f"{root}/latest", text, at + later)
            assert storage.read(f"{root}/latest").decode() == text
        if storage.has_locks:
            assert not storage.advance(f"{root}/latest", "older", at)
            assert storage.read(f"{root}/latest") == b"last"
        assert sorted(storage.names_in(root)) == ["final", "latest"]

    def test_one_loses_its_name_before_its_files(self, storage: Storage, root: str, final: str) -> None:
        self.save(storage, final, "a-1")
        leftover = storage.take_name(final)
        assert leftover is not None and not storage.exists(final)
        storage.remove(leftover or None)
        assert storage.names_in(root) == []

    def test_a_damaged_one_is_set_aside(self, storage: Storage, root: str, final: str) -> None:
        for attempt in ("a-1", "a-2"):
            self.save(storage, final, attempt)
            storage.set_aside(final, "damaged")
        assert sorted(storage.names_in(root)) == ["final.damaged-1", "final.damaged-2"]
        assert storage.is_finalized(f"{final}.damaged-1", "a-1")

    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("existing", ["refuse", "replace"])
    def test_after_a_fault_all_is_as_it_was_or_as_it_is_meant_to_be(
        self, storage: Storage, root: str, final: str, point: str, existing: Existing
    ) -> None:
        """After a fault at any point, the folder has only the old or the new checkpoint, and the next save succeeds."""
        if existing == "replace":
            self.save(storage, final, "a-1")
        before = json.loads(storage.read(f"{final}/{MANIFEST_NAME}")) if existing == "replace" else None

        def reach(here: str, path: str) -> None:
            if here == point:
                raise StorageError("as the test wants", path=path)

        faulty, opened = FaultyStorage(storage, reach), None
        with pytest.raises(StorageError, match="as the test wants"):
            opened = faulty.begin_checkpoint(final, "a-2", 0)
            put_checkpoint(opened, "a-2")
            opened.finalize(existing)
        if opened is not None:
            opened.discard()
        assert storage.is_finalized(final, "a-2") == (point == "finalized")
        if point != "finalized":
            assert storage.exists(final) == (existing == "replace")
            if before is not None:
                assert json.loads(storage.read(f"{final}/{MANIFEST_NAME}")) == before
        assert storage.names_in(root) == (["final"] if storage.exists(final) else [])
        self.save(storage, final, "a-3", "replace")
        assert storage.is_finalized(final, "a-3") and storage.names_in(root) == ["final"]

    def save_folders(self, storage: Storage, final: str) -> None:
        """Save a checkpoint of two ranks that write into the same subfolders."""
        one, other = (storage.begin_checkpoint(final, "a-1", 0) for _ in range(2))
        for opened, name in ((one, "deep/in/one"), (other, "deep/in/two"), (one, f"deep/{DATA}")):
            put(opened, name, name.encode())
        put_checkpoint(one, "a-1")
        assert one.names() == {DATA, METADATA_NAME, MANIFEST_NAME, "deep/in/one", "deep/in/two", f"deep/{DATA}"}
        one.finalize("refuse")
        one.release()
        other.release()

    def test_names_with_parts(self, storage: Storage, root: str, final: str) -> None:
        self.save_folders(storage, final)
        storage.read(f"{final}/{MANIFEST_NAME}")  # all readers read the manifest first
        for name in ("deep/in/one", "deep/in/two", f"deep/{DATA}"):
            assert storage.read(f"{final}/{name}") == name.encode() and storage.size(f"{final}/{name}") == len(name)
        assert {"in"} <= {*storage.names_in(f"{final}/deep")} <= {"in", DATA}
        assert sorted(storage.names_in(final)) == sorted([DATA, METADATA_NAME, MANIFEST_NAME, "deep"])
        assert not storage.exists(f"{final}/deep/else") and storage.size(f"{final}/deep/else") is None

    def test_a_rank_discards_its_own_files_in_folders(self, storage: Storage, root: str, final: str) -> None:
        first, second = (storage.begin_checkpoint(final, "a-1", 0) for _ in range(2))
        theirs = ["deep/in/two", "deep/else/three", f"deep/{DATA}"]
        put(first, "deep/in/one", b"first")
        for name in theirs:
            put(second, name, b"second")
        second.discard(theirs)
        assert first.names() == {"deep/in/one"}
        first.discard()
        assert storage.names_in(root) == []

    def test_folders_are_set_aside_and_removed(self, storage: Storage, root: str, final: str) -> None:
        self.save_folders(storage, final)
        storage.set_aside(final, "damaged")
        assert storage.names_in(root) == ["final.damaged-1"] and storage.names_in(final) == []
        storage.read(f"{final}.damaged-1/{MANIFEST_NAME}")
        assert storage.read(f"{final}.damaged-1/deep/{DATA}") == f"deep/{DATA}".encode()
        self.save(storage, final, "a-2")
        assert storage.remove_checkpoint(f"{final}.damaged-1")
        assert storage.names_in(root) == ["final"] and storage.read(f"{final}/{DATA}") == b"a-2"


class FileSystemContract(StorageContract):
    """The contract of file systems alone: links, empty folders, single files, locks, and free space."""

    @pytest.fixture
    def can_link(self, tmp_path: Path) -> bool:
        return can_link(tmp_path)

    def put_strange(self, storage: Storage, path: str) -> None:
        os.makedirs(os.path.dirname(path))
        Path(path).write_text("mine")

    def test_too_little_space_is_seen_first(self, storage: Storage, root: str, final: str, tmp_path: Path) -> None:
        need_space_told(tmp_path)
        with pytest.raises(StorageError, match="the checkpoint needs .* bytes and"):
            storage.begin_checkpoint(final, "a-1", 1 << 60)
        assert storage.names_in(root) == []
        with pytest.raises(StorageError, match="the file needs .* bytes and"):
            storage.begin_file(final, "a-1", 1 << 60, 60.0)

    @pytest.mark.parametrize("existing", ["refuse", "replace", "set aside"])
    @pytest.mark.parametrize("target", ["other", "nothing"])
    def test_a_checkpoint_where_a_link_is(
        self, storage: Storage, root: str, final: str, existing: Existing, target: str
    ) -> None:
        """A save never changes the target of the link: another checkpoint, or nothing."""
        self.save(storage, f"{root}/other", "a-1")
        Path(final).symlink_to(target)
        assert storage.may_put(final, existing) == (existing == "set aside")
        if existing == "set aside":
            self.save(storage, final, "a-2", existing)
            assert not os.path.islink(final) and storage.is_finalized(final, "a-2")
        else:
            with pytest.raises(CheckpointExistsError):
                self.save(storage, final, "a-2", existing)
            assert os.path.islink(final)
        assert sorted(storage.names_in(root)) == ["final", "other"]
        assert storage.is_finalized(f"{root}/other", "a-1") and storage.read(f"{root}/other/{DATA}") == b"a-1"

    def test_a_checkpoint_where_a_file_is(self, storage: Storage, root: str, final: str) -> None:
        os.makedirs(root)
        Path(final).write_text("mine")
        assert not storage.may_put(final, "replace") and storage.may_put(final, "set aside")
        self.save(storage, final, "a-1", "set aside")
        assert storage.is_finalized(final, "a-1") and storage.read(f"{final}.abandoned-1") == b"mine"

    def test_to_remove_a_link_removes_nothing_else(self, storage: Storage, root: str, final: str) -> None:
        self.save(storage, f"{root}/other", "a-1")
        Path(final).symlink_to("other")
        assert storage.remove_checkpoint(final)
        assert storage.names_in(root) == ["other"] and storage.read(f"{root}/other/{DATA}") == b"a-1"

    def test_a_single_file(self, storage: Storage, root: str, final: str, tmp_path: Path) -> None:
        with pytest.raises(StorageError):
            storage.check_file_place(final)
        os.makedirs(root)
        storage.check_file_place(final)
        for text, is_revoked in ((b"one", False), (b"two", False), (b"three", True)):
            opened = storage.begin_file(final, f"0123456789ab-{len(text)}", 3, 60.0)
            put(opened, "", text)
            attempt, inode = f"0123456789ab-{len(text)}", opened.inode
            assert inode is not None and not storage.is_finalized(final, attempt, inode)
            if is_revoked:
                is_finalized, leftover = storage.resolve(final, attempt, "replace", inode)
                storage.remove(leftover)
                assert not is_finalized
                with pytest.raises(StorageError):
                    opened.finalize("replace")
                opened.discard()
            else:
                opened.finalize("replace")
                opened.release()
                is_known = keeps_inodes(tmp_path)  # otherwise a finished save may be reported as failed
                assert storage.resolve(final, attempt, "replace", inode) == (is_known, None)
                assert storage.read(final) == text
        assert storage.read(final) == b"two" and storage.names_in(root) == ["final"]
        with pytest.raises(StorageError):
            storage.check_file_place(root)

    def test_an_attempt_is_under_way_until_it_is_released(
        self, storage: Storage, root: str, final: str, tmp_path: Path
    ) -> None:
        need_locks(tmp_path)
        assert storage.attempts_under_way(root) == []
        opened = storage.begin_checkpoint(final, "a-1", 0)
        assert storage.attempts_under_way(root) == [opened.path]
        opened.release()
        assert storage.attempts_under_way(root) == []
        opened.release()
        opened.discard()

    def test_what_is_read_is_not_removed(self, storage: Storage, root: str, final: str, tmp_path: Path) -> None:
        need_locks(tmp_path)
        self.save(storage, final, "a-1")
        with storage.reading(final), storage.reading(final):
            assert not storage.remove_checkpoint(final)
        assert storage.remove_checkpoint(final)
        assert storage.names_in(root) == []

    def test_of_names_with_parts_nothing_stays(self, storage: Storage, root: str, final: str) -> None:
        """The second rank discards its files, and the first rank finalizes."""
        one, other = (storage.begin_checkpoint(final, "a-1", 0) for _ in range(2))
        put(one, "deep/in/one", b"1")
        put(other, "deep/in/two", b"2")
        put(other, "deep/else/three", b"3")
        put_checkpoint(one, "a-1")
        other.discard(["deep/in/two", "deep/else/three"])
        assert one.names() == {DATA, METADATA_NAME, MANIFEST_NAME, "deep/in/one"}
        one.finalize("refuse")
        one.release()
        last = storage.begin_checkpoint(f"{root}/deeper/final", "a-2", 0)
        put(last, "a/b", b"")
        last.discard(["a/b", "c/d"])
        assert storage.exists(f"{root}/deeper") and not storage.names_in(f"{root}/deeper")
        assert not storage.may_put(final, "replace")  # its manifest does not list deep/in/one
