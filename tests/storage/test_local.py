"""Local storage: the contract of every storage, and tests of folders and renames."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial as partial_of
from pathlib import Path

import pytest
from support.abilities import can_exchange, need_inodes, need_links, need_locks, need_permissions
from support.attempts import checkpoint_attempt
from support.checkpoints import PAGE, Manifest, complete_steps, step_folder
from support.faulty_storage import FaultyStorage
from support.link_contract import DATA, put, put_checkpoint, put_checkpoint_but_data
from support.storage_contract import FileSystemContract

from asyncckpt.errors import CheckpointExistsError, StorageError
from asyncckpt.format.manifest import MANIFEST_NAME
from asyncckpt.format.write_request import Existing
from asyncckpt.shm.segment import Segment
from asyncckpt.storage import file_system, history, local, named_steps, partial, remove_old_checkpoint, storage_for
from asyncckpt.storage.file_system import remove_folder
from asyncckpt.storage.history import prune
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.storage import OpenAttempt, Storage


class TestLocalStorage(FileSystemContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return LocalStorage()


class TestThroughThePageCache(FileSystemContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return LocalStorage(direct_io=False)


class TestWithoutAnExchangeOfNames(FileSystemContract):
    @pytest.fixture
    def storage(self, monkeypatch: pytest.MonkeyPatch) -> Storage:
        monkeypatch.setattr(partial, "exchange", lambda *_: False)
        return LocalStorage()


class TestFaultyStorage(FileSystemContract):
    """The faulty storage, without a fault."""

    @pytest.fixture
    def storage(self) -> Storage:
        return FaultyStorage(LocalStorage(), lambda point, path: None)


def test_a_read_that_is_told_to_come_again_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems answer EAGAIN. The kernel's own file systems never do so for a file."""
    file, told = tmp_path / "file", [True]
    file.write_bytes(b"bytes")
    storage, read = LocalStorage(), os.read

    def read_later(fd: int, nbytes: int) -> bytes:
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
        if told.pop() if told else False:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return read(fd, min(nbytes, 2))

    monkeypatch.setattr(os, "read", read_later)
    with pytest.raises(StorageError, match="reading failed: Resource temporarily unavailable"):
        storage.read(str(file))
    assert storage.read(str(file)) == b"bytes"


class CachingClient:
    """Caches the listing of a folder for 30 seconds, as clients of network file systems do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listed: dict[int, tuple[float, list[str]]] = {}
        for module in (partial, file_system, local):
            monkeypatch.setattr(module, "files_under", partial_of(self._list, file_system.files_under))

    def _list(self, real: Callable[[int], Iterator[str]], folder: int) -> Iterator[str]:
        inode, now = os.fstat(folder).st_ino, time.monotonic()
        if inode not in self.listed or now - self.listed[inode][0] > 30:
            self.listed[inode] = now, list(real(folder))
        return iter(self.listed[inode][1])


def _put(opened: OpenAttempt, name: str) -> None:
    with contextlib.closing(opened.create(name, large=False)) as file:
        file.write(memoryview(b"bytes"), 0)
        file.sync()


def test_a_file_of_another_host_is_looked_up_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_locks(tmp_path)
    client, final = CachingClient(monkeypatch), str(tmp_path / "step-00000001")
    storage = LocalStorage()
    first = storage.begin_checkpoint(final, "aa-1", 0, 0.0)
    _put(first, "__0_0.distcp")
    # Another save begins meanwhile, and sweeps. The sweep does not list a locked attempt.
    storage.begin_checkpoint(str(tmp_path / "step-00000002"), "aa-2", 0, 0.0).discard()
    assert not client.listed
    assert first.names() == {"__0_0.distcp"}
    other = LocalStorage().begin_checkpoint(final, "aa-1", 0)
    _put(other, "__1_0.distcp")
    assert first.names() == {"__0_0.distcp"}  # the cached listing
    assert first.missing({"__0_0.distcp", "__1_0.distcp"}) == set()
    first.finalize("refuse")
    first.release()
    other.release()
    assert sorted(os.listdir(final)) == ["__0_0.distcp", "__1_0.distcp"]


def test_a_file_may_be_seen_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = LocalStorage().begin_checkpoint(str(tmp_path / "step-00000001"), "aa-1", 0, 0.0)

    def put_later() -> None:
        time.sleep(3)
        _put(opened, "__1_0.distcp")

    with ThreadPoolExecutor() as pool:
        coming = pool.submit(put_later)
        assert opened.missing({"__1_0.distcp"}) == set()
        coming.result()
    monkeypatch.setattr(partial, "ANSWER_S", 0.2)
    assert opened.missing({"__1_0.distcp", "__2_0.distcp"}) == {"__2_0.distcp"}
    opened.discard()


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to become nobody")
def test_a_folder_that_is_not_writable_is_seen_without_a_write(tmp_path: Path) -> None:
    need_permissions(tmp_path)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    LocalStorage().check_writable(str(tmp_path / "file"))
    os.seteuid(65534)
    try:
        LocalStorage().check_writable(str(open_to_all / "deep" / "in"))
        for check in (LocalStorage().check_writable, LocalStorage().check_file_place):
            with pytest.raises(StorageError, match="Permission denied; check the permissions"):
                check(str(tmp_path / "file"))
    finally:
        os.seteuid(0)


def test_every_path_is_local() -> None:
    assert isinstance(storage_for("/somewhere/step-00000001"), LocalStorage)


def test_finalizing_over_something(tmp_path: Path) -> None:
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        cases: list[tuple[Existing, list[str], bool]] = [
            ("refuse", [], True),
            ("refuse", ["__0_0.distcp"], False),
            ("replace", ["__0_0.distcp", ".metadata"], True),
            ("replace", ["__0_0.distcp", "mine.txt"], False),
            ("join", [], True),
            ("join", ["__0_0.distcp", ".metadata", "mine.txt"], True),
        ]
        for existing, standing, works in cases:
            final = tmp_path / "root" / "final"
            final.mkdir(parents=True, exist_ok=True)
            for old in final.iterdir():
                old.unlink()
            for name in standing:
                (final / name).write_text("old")
            attempt = checkpoint_attempt(tmp_path, segment, existing)
            attempt.write(pool)
            if works:
                attempt.commit([json.loads(attempt.seal())])
                attempt.release()
                assert (final / "asyncckpt.json").exists() and (final / ".metadata").read_bytes() != b"old"
                assert (final / "mine.txt").exists() == ("mine.txt" in standing)
            else:
                with pytest.raises(CheckpointExistsError):
                    attempt.commit([json.loads(attempt.seal())])
                attempt.discard()
                assert sorted(path.name for path in final.iterdir()) == sorted(standing)
            assert os.listdir(tmp_path / "root") == ["final"]


def test_a_folder_on_another_file_system_is_not_touched(tmp_path: Path) -> None:
    """No file can be moved to another file system, such as a folder to join that is a mount point."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as final:
        if os.stat(final).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("there is but one file system")
        opened = LocalStorage().begin_checkpoint(str(tmp_path / "final"), "a-1", 0)
        put(opened, ".metadata", b"")
        Path(final, ".metadata").touch()
        (tmp_path / "final").symlink_to(final)
        with pytest.raises(StorageError, match="another file system"):
            opened.finalize("join")
        opened.release()
        assert os.listdir(final) == os.listdir(opened.path) == [".metadata"]


def test_replacing_without_an_exchange_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "exchange", lambda one, other: False)
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            attempt = checkpoint_attempt(tmp_path, segment, "replace")
            attempt.write(pool)
            attempt.commit([json.loads(attempt.seal())])
            attempt.release()
        assert os.listdir(tmp_path / "root") == ["final"]


def test_an_attempt_under_way_is_told_from_a_leftover(tmp_path: Path) -> None:
    need_locks(tmp_path)
    opened = LocalStorage().begin_checkpoint(str(tmp_path / "final"), "attempt", 0)
    assert file_system.is_locked(opened.path)
    opened.release()
    assert not file_system.is_locked(opened.path)


def test_a_folder_that_stays_locked_is_an_error_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_locks(tmp_path)
    monkeypatch.setattr(file_system, "SILENCE_S", 0.05)
    storage, folder = LocalStorage(), str(tmp_path)
    with file_system.opened(folder) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="locked"), storage.reading(folder):
            pass
    with storage.reading(folder):
        pass


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
@pytest.mark.parametrize("existing", ["refuse", "replace"])
def test_a_rename_that_is_done_and_answered_with_an_error_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing, code: int
) -> None:
    """A network file system may answer so after it has repeated a call."""
    need_inodes(tmp_path)
    if existing == "replace" and not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange names")
    real = os.rename

    def rename(one: str, other: str) -> None:
        real(one, other)
        raise OSError(code, os.strerror(code))

    def swap(one: str, other: str, flags: int) -> bool:
        assert real_exchange(one, other, flags)
        raise OSError(code, os.strerror(code))

    real_exchange = partial._renameat2
    if existing == "replace":
        (final := tmp_path / "root" / "final").mkdir(parents=True)
        (final / ".metadata").write_text("old")
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment, existing)
        attempt.write(pool)
        report = json.loads(attempt.seal())
        with monkeypatch.context() as patched:
            if existing == "replace":
                patched.setattr(partial, "_renameat2", swap)
            else:
                patched.setattr(os, "rename", rename)
            attempt.commit([report])
        attempt.release()
        assert (tmp_path / "root" / "final" / "asyncckpt.json").exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_a_rename_that_fails_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def rename(one: str, other: str) -> None:
        raise OSError(code, os.strerror(code))

    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment)
        attempt.write(pool)
        report = json.loads(attempt.seal())
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", rename)
            with pytest.raises(StorageError, match=os.strerror(code)):
                attempt.commit([report])
        attempt.discard()
        assert not (tmp_path / "root" / "final").exists()


def test_what_was_just_committed_is_not_removed(tmp_path: Path) -> None:
    """A recent step stays even if its number is low, because training may have gone back during a slow removal."""
    for step in (1, 2, 3):
        (folder := tmp_path / f"step-{step:08d}").mkdir()
        manifest = Manifest(f"attempt {step}", step, 0.0, 1, False, 0, {}, {})
        (folder / "asyncckpt.json").write_bytes(manifest.encode())
    prune(str(tmp_path), 1, lambda step: step == 1)
    assert complete_steps(str(tmp_path)) == [1, 3]


def _checkpoint(root: Path, step: int) -> Path:
    (folder := root / f"step-{step:08d}").mkdir()
    (folder / "asyncckpt.json").write_bytes(Manifest(f"attempt {step}", step, 0.0, 1, False, 0, {}, {}).encode())
    (folder / "__0_0.distcp").write_bytes(b"data")
    return folder


def test_a_checkpoint_has_lost_its_name_for_good_before_its_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the checkpoint could reappear after a power cut, without some of its files."""
    folder, seen = _checkpoint(tmp_path, 1), []

    def sync(path: str) -> None:
        (left,) = os.listdir(path)
        seen.append((left.endswith(".asyncckpt-trash"), sorted(os.listdir(os.path.join(path, left)))))
        if len(seen) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(local, "sync_folder", sync)
    with pytest.raises(StorageError, match="removing a checkpoint failed: Input/output error"):
        LocalStorage().remove_checkpoint(str(folder))
    whole = ["__0_0.distcp", "asyncckpt.json"]
    assert sorted(os.listdir(folder)) == whole
    assert LocalStorage().remove_checkpoint(str(folder)) and not os.listdir(tmp_path)
    assert seen == [(True, whole)] * 2


def test_a_folder_may_have_another_inode_when_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems change the inode."""
    folder, other = _checkpoint(tmp_path, 1), _checkpoint(tmp_path, 2)
    real, renamed = os.path.samestat, [True, True]
    # The first comparison of each removal is for the renamed folder.
    monkeypatch.setattr(os.path, "samestat", lambda *both: not renamed.pop() if renamed else real(*both))
    (other / "asyncckpt.json").unlink()  # without its manifest, the folder is left alone
    assert not LocalStorage().remove_checkpoint(str(other)) and other.exists()
    assert LocalStorage().remove_checkpoint(str(folder)) and not folder.exists()


@pytest.mark.parametrize("said", ["nothing", "ENOSYS"])
def test_a_file_system_need_not_say_how_much_space_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        if said == "ENOSYS":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return os.statvfs_result([0] * 10)

    monkeypatch.setattr(os, "statvfs", statvfs)
    LocalStorage().begin_checkpoint(str(tmp_path / "final"), "aa-1", 1000).discard()
    LocalStorage().begin_file(str(tmp_path / "file"), "a" * 12 + "-1", 1000, 60.0).discard()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EXDEV])
def test_a_file_system_that_cannot_rename_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def rename(one: str, other: str) -> None:
        raise OSError(code, os.strerror(code))

    opened = LocalStorage().begin_checkpoint(str(tmp_path / "final"), "aa-1", 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        with pytest.raises(
            StorageError, match=rf"cannot rename a folder \({os.strerror(code)}\), .*--rename-dir-limit"
        ):
            opened.finalize("refuse")
    opened.discard()


def _file(path: Path, number: int, data: bytes) -> OpenAttempt:
    opened = LocalStorage().begin_file(str(path), f"{'a' * 12}-{number}", 0, 60.0)
    put(opened, "", data)
    return opened


def test_a_file_system_may_refuse_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chmod(path: str, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", chmod)
    for number in (1, 2):
        opened = _file(tmp_path / "file", number, b"%d" % number)
        opened.finalize("replace")
        opened.release()
        assert (tmp_path / "file").read_bytes() == b"%d" % number


@pytest.mark.parametrize("before", [None, "file", "link"])
def test_a_file_is_not_there_if_its_folder_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before == "file":
        need_permissions(tmp_path)
    if before is not None and not can_exchange(tmp_path):
        pytest.skip("without an exchange of names, what replaces a file stays")
    file, other = tmp_path / "file", tmp_path / "other"
    other.write_bytes(b"old")
    if before == "file":
        file.write_bytes(b"old")
        file.chmod(0o640)
    elif before == "link":
        file.symlink_to(other)
    opened = _file(file, 1, b"new")

    def sync(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(partial, "sync_folder", sync)
        with pytest.raises(StorageError, match="flushing a folder failed"):
            opened.finalize("replace")
    opened.discard()
    assert sorted(os.listdir(tmp_path)) == (["other"] if before is None else ["file", "other"])
    assert before is None or (file.read_bytes() == b"old" and file.is_symlink() == (before == "link"))
    opened = _file(file, 2, b"new")
    opened.finalize("replace")
    opened.release()
    assert file.read_bytes() == b"new" and other.read_bytes() == b"old" and not file.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]
    assert before != "file" or file.stat().st_mode & 0o777 == 0o640


def test_what_was_changed_at_once_is_not_linked(tmp_path: Path) -> None:
    """A change within the same tick of the kernel's clock leaves the file's modification time unchanged."""
    opened = LocalStorage().begin_checkpoint(str(tmp_path / "final"), "a-1", 0)
    put(opened, "__0_0.distcp", b"data")
    path = f"{opened.path}/__0_0.distcp"
    written = os.stat(path).st_mtime_ns
    source = opened.link_source("__0_0.distcp")
    with open(path, "r+b") as file:
        file.write(b"D")
    os.utime(path, ns=(written, written))
    other = LocalStorage().begin_checkpoint(str(tmp_path / "other"), "b-1", 0)
    assert not other.link("__0_0.distcp", source._replace(place=path))
    opened.discard()
    other.discard()


def _commit(root: Path, step: int, created: float, *, keep: bool = False) -> None:
    """Save a checkpoint of a step, and set aside an older checkpoint of the step."""
    attempt = f"{os.urandom(6).hex()}-{step}"
    opened = LocalStorage().begin_checkpoint(step_folder(str(root), step), attempt, 0)
    put(opened, "asyncckpt.json", Manifest(attempt, step, created, 1, keep, 0, {}, {}).encode())
    opened.finalize("set aside")
    opened.release()


def test_retention_leaves_what_was_saved_again_while_it_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run has gone back to step 1, and steps 2, 3 and 4 remain from before.
    for step, created in ((2, 2.0), (3, 3.0), (4, 4.0), (1, 5.0)):
        _commit(tmp_path, step, created)
    recent = [1]

    def remove(path: str) -> None:
        if path == step_folder(str(tmp_path), 2):  # during this slow removal the run saves 3 (with keep), 4, 5
            for step in (3, 4, 5):
                _commit(tmp_path, step, 6.0 + step, keep=step == 3)
                recent[:] = [step]
        remove_old_checkpoint(path)

    monkeypatch.setattr(history, "remove_old_checkpoint", remove)
    prune(str(tmp_path), 2, lambda step: step in recent)
    assert {3, 4, 5} <= {*named_steps(str(tmp_path))}


def test_what_is_distrusted_after_a_save_has_linked_it_is_not_linked_by_the_next(tmp_path: Path) -> None:
    need_links(tmp_path)
    storage, data = LocalStorage(), os.urandom(100_000)
    one = storage.begin_checkpoint(f"{tmp_path}/1", "a-1", 0)
    put_checkpoint(one, "a-1", data)
    source = one.link_source(DATA)
    one.finalize("refuse")
    one.release()
    two = storage.begin_checkpoint(f"{tmp_path}/2", "a-2", 0)
    assert two.link(DATA, source)
    storage.distrust(f"{tmp_path}/1/{DATA}")  # as by a failed verification while the second save writes
    source = two.link_source(DATA)
    put_checkpoint_but_data(two, "a-2", len(data))
    two.finalize("refuse")
    two.release()
    three = storage.begin_checkpoint(f"{tmp_path}/3", "a-3", 0)
    assert source is None or not three.link(DATA, source)
    three.discard()


def test_a_folder_is_removed_from_which_other_ranks_remove_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "attempt", os.unlink
    folder.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", MANIFEST_NAME):
        (folder / name).touch()

    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        real(path, dir_fd=dir_fd)  # another rank removes the file just before
        real(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    remove_folder(str(folder))
    assert not folder.exists()
