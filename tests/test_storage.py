"""Files and folders: in which order they become durable, what happens to what stands in the way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_state

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointExistsError, SaveTimeoutError, StorageError
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.shm.slots import SlotTable
from asyncckpt.worker import storage, writer
from asyncckpt.worker.arrival import Arrival
from asyncckpt.worker.commit import Attempt, settle
from asyncckpt.worker.manifest import checksum, spans
from asyncckpt.worker.messages import Existing, Layout, Order, Region
from asyncckpt.worker.storage import LocalStorage, OutputFile
from asyncckpt.worker.writer import PIECE_BYTES, write_image


class Recorder:
    """Sees what the process asks of the kernel, in order, with the state of the file at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str, int]] = []
        real_fsync, real_rename = os.fsync, os.rename

        def fsync(fd: int) -> None:
            real_fsync(fd)
            self.events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size))

        def rename(source: str, target: str) -> None:
            real_rename(source, target)
            self.events.append(("rename", target, 0))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)


def _attempt(tmp_path: Path, segment: Segment, store: LocalStorage, existing: Existing = "refuse") -> Attempt:
    """A hand-made image of two pages, with constants before it."""
    bounds = spans([0, 100], 2 * PAGE)
    words = memoryview(bounds).cast("B")
    segment.view[PAGE : PAGE + 4] = b"meta"
    segment.view[PAGE + 64 : PAGE + 68] = b"head"
    segment.view[PAGE + 128 : PAGE + 128 + len(words)] = words
    segment.view[2 * PAGE : 4 * PAGE] = os.urandom(2 * PAGE)
    layout = Layout(
        "__0_0.distcp",
        2 * PAGE,
        (2 * PAGE,),
        metadata=Region(PAGE, 4),
        index_head=Region(PAGE + 64, 4),
        spans=Region(PAGE + 128, len(words)),
    )
    order = Order(1, 1, 0, str(tmp_path / "root" / "final"), "attempt", 5, 0, 1, existing, None, False, 60.0)
    arrival = Arrival(order, SlotTable(segment.view), changed := threading.Condition(), lambda: True)
    with changed:
        arrival.stage({})
    return Attempt(store, arrival, layout, segment)


def _whole(nbytes: int, whole: int) -> int:
    """All of it is there."""
    return whole


def test_everything_is_durable_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "root")
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        store = LocalStorage()
        attempt = _attempt(tmp_path, segment, store)
        recorder = Recorder(monkeypatch)
        attempt.write(pool)
        attempt.commit([json.loads(attempt.seal())])
        store.close()
    partial = f"{root}/.final.attempt.partial"
    kinds = [(kind, path) for kind, path, _ in recorder.events]
    assert kinds == [
        ("fsync", str(tmp_path)),  # that there is a root
        ("fsync", f"{partial}/__0_0.distcp"),
        ("fsync", f"{partial}/__0_0.index.json"),
        ("fsync", f"{partial}/.metadata"),
        ("fsync", f"{partial}/asyncckpt.json"),
        ("fsync", partial),
        ("rename", f"{root}/final"),
        ("fsync", root),
    ]
    final = tmp_path / "root" / "final"
    for kind, path, size in recorder.events[1:5]:
        assert kind == "fsync" and size == (final / Path(path).name).stat().st_size > 0
    assert sorted(os.listdir(root)) == ["final"]


def test_the_slot_is_free_only_when_its_bytes_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        store = LocalStorage()
        attempt = _attempt(tmp_path, segment, store)
        recorder = Recorder(monkeypatch)
        attempt.write(pool)
        assert any(path.endswith(".distcp") for _, path, _ in recorder.events)
        image = bytes(segment.view[2 * PAGE : 4 * PAGE])
        segment.view[2 * PAGE : 4 * PAGE] = bytes(2 * PAGE)  # the trainer stages the next save
        attempt.commit([json.loads(attempt.seal())])
        store.close()
    assert (tmp_path / "root/final/__0_0.distcp").read_bytes() == image


@pytest.mark.parametrize(("code", "says"), [(errno.EIO, None), (errno.ESTALE, None), (errno.EROFS, False)])
def test_where_storage_fails_nobody_can_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: bool | None
) -> None:
    """The rename of whoever publishes may work a moment later; not where nothing may be changed."""

    def rename(*_: str) -> None:
        raise OSError(code, os.strerror(code))

    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        store = LocalStorage()
        attempt = _attempt(tmp_path, segment, store, "refuse")
        attempt.write(pool)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            if says is None:
                with pytest.raises(SaveTimeoutError, match="nobody can say"):
                    settle(attempt.order, 60.0)
            else:
                assert settle(attempt.order, 60.0) is says
        attempt.discard()
        store.close()


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("existing", ["refuse", "replace", "join"])
def test_whoever_settles_it_at_any_instant_knows_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing, exchanges: bool
) -> None:
    """It comes between any two steps of publishing, and what it says is so for good."""
    if not exchanges:
        monkeypatch.setattr(storage, "_exchange", lambda *_: False)
    real, calls, said = os.rename, 0, [False]

    def rename(one: str, other: str) -> None:
        nonlocal calls
        if not one.endswith(storage.PARTIAL_SUFFIX) or not other.endswith(storage.TRASH_SUFFIX):
            calls += 1
            if calls == settles_at:
                said[0] = settle(order, 60.0)
        real(one, other)

    monkeypatch.setattr(os, "rename", rename)
    settles_at, verdicts = 1, set()
    while True:
        root = tmp_path / str(settles_at)
        final = root / "root" / "final"
        if existing != "refuse":
            final.mkdir(parents=True)
            (final / ("asyncckpt.json" if existing == "replace" else "mine.txt")).touch()
        with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
            store = LocalStorage()
            attempt = _attempt(root, segment, store, existing)
            order, calls, committed = attempt.order, 0, True
            attempt.write(pool)
            report = json.loads(attempt.seal())
            try:
                attempt.commit([report])
                attempt.release()
            except StorageError:
                committed = False
                attempt.discard()
            store.close()
        is_there = (final / ".metadata").exists()
        assert is_there == committed and is_there == ("attempt" in _text(final / "asyncckpt.json"))
        assert existing == "refuse" or final.exists()
        assert existing != "join" or (final / "mine.txt").exists()
        assert os.listdir(root / "root") == (["final"] if final.exists() else [])
        if calls < settles_at:  # it comes after all
            assert committed and settle(order, 60.0) and is_there
            break
        assert said[0] == committed
        verdicts.add(committed)
        settles_at += 1
    assert False in verdicts or (existing == "replace" and exchanges)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("existing", ["refuse", "replace"])
def test_what_is_not_durable_in_the_end_loses_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(storage, "_exchange", lambda *_: False)
    final = tmp_path / "root" / "final"
    if existing == "replace":
        final.mkdir(parents=True)
        (final / "asyncckpt.json").write_text("old")
    real = storage.sync_folder

    def sync_folder(path: str) -> None:
        if path == str(final.parent) and "attempt" in _text(final / "asyncckpt.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(storage, "sync_folder", sync_folder)
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        store = LocalStorage()
        attempt = _attempt(tmp_path, segment, store, existing)
        attempt.write(pool)
        with pytest.raises(StorageError, match="Input/output error"):
            attempt.commit([json.loads(attempt.seal())])
        attempt.discard()
        store.close()
    assert _text(final / "asyncckpt.json") == ("old" if existing == "replace" else "")
    assert os.listdir(final.parent) == (["final"] if existing == "replace" else [])


@pytest.mark.parametrize("refused", ["never", "at open", "at write"])
def test_where_direct_io_is_refused_it_writes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_pwrite = os.open, os.pwrite
    written: set[int] = set()

    def open_(path: str, flags: int, *args: Any) -> int:
        if refused == "at open" and flags & os.O_DIRECT:
            os.close(real_open(path, flags & ~os.O_DIRECT, *args))  # some make the file, then say no
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_open(path, flags, *args)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        import fcntl

        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if refused == "at write" and direct:
            raise OSError(errno.EINVAL, "no direct I/O here")
        written.add(direct)
        return real_pwrite(fd, data[: 3 * PAGE], offset)  # never all at once

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    data = bytes(os.urandom(PIECE_BYTES + 5 * PAGE))
    with Segment.create("test", len(data)) as segment, ThreadPoolExecutor(2) as pool:
        segment.view[:] = data
        bounds = spans([0, 77, 5000], len(data))
        checksums, direct = write_image(LocalStorage(), pool, str(tmp_path / "file"), segment.view, bounds, _whole)
    assert (tmp_path / "file").read_bytes() == data
    assert list(checksums) == [checksum(data[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    if refused != "never":
        assert not direct and written == {0}


@pytest.mark.parametrize("bounces", [False, True])
def test_through_buffers_or_not_it_is_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounces: bool
) -> None:
    """Which it is depends on the host's huge pages."""
    written: list[int] = []
    real_write = OutputFile.write

    def write(self: OutputFile, data: memoryview, offset: int) -> None:
        written.append(len(data))
        real_write(self, data, offset)

    monkeypatch.setattr(OutputFile, "write", write)
    monkeypatch.setattr(writer, "only_private", lambda: bounces)
    data = os.urandom(2 * PIECE_BYTES + 5 * PAGE)
    with Segment.create("test", len(data)) as segment, ThreadPoolExecutor(2) as pool:
        segment.view[:] = data
        _, direct = write_image(LocalStorage(), pool, str(tmp_path / "file"), segment.view, [0, len(data)], _whole)
    assert (tmp_path / "file").read_bytes() == data
    assert max(written) == (writer._BUFFER_BYTES if bounces and direct else PIECE_BYTES)


def test_a_failed_piece_fails_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OutputFile.write

    def write(self: OutputFile, data: memoryview, offset: int) -> None:
        if offset:
            with storage.translated("writing", self.path):
                raise OSError(errno.EIO, "Input/output error")
        real(self, data, offset)

    monkeypatch.setattr(OutputFile, "write", write)
    with Segment.create("test", 3 * PIECE_BYTES) as segment, ThreadPoolExecutor(2) as pool:
        bounds = spans([], segment.nbytes)
        pytest.raises(
            StorageError, write_image, LocalStorage(), pool, str(tmp_path / "file"), segment.view, bounds, _whole
        )


def test_publishing_over_something(tmp_path: Path) -> None:
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
            store = LocalStorage()
            attempt = _attempt(tmp_path, segment, store, existing)
            attempt.write(pool)
            if works:
                attempt.commit([json.loads(attempt.seal())])
                assert (final / "asyncckpt.json").exists() and (final / ".metadata").read_bytes() != b"old"
                assert (final / "mine.txt").exists() == ("mine.txt" in standing)
            else:
                with pytest.raises(CheckpointExistsError):
                    attempt.commit([json.loads(attempt.seal())])
                attempt.discard()
                assert sorted(path.name for path in final.iterdir()) == sorted(standing)
            store.close()
            assert os.listdir(tmp_path / "root") == ["final"]


def test_a_folder_on_another_file_system_is_not_touched(tmp_path: Path) -> None:
    """As where the folder to join is one that something is mounted at: nothing can be moved there from beside it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as final:
        if os.stat(final).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("there is but one file system")
        for folder in (tmp_path, Path(final)):
            (folder / ".metadata").touch()
        with pytest.raises(StorageError, match="another file system"):
            LocalStorage().publish(str(tmp_path), final, existing="join")
        assert os.listdir(final) == os.listdir(tmp_path) == [".metadata"]


def test_replacing_without_an_exchange_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_exchange", lambda one, other: False)
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            store = LocalStorage()
            attempt = _attempt(tmp_path, segment, store, "replace")
            attempt.write(pool)
            attempt.commit([json.loads(attempt.seal())])
            store.close()
        assert os.listdir(tmp_path / "root") == ["final"]


def test_space_is_looked_at_first(tmp_path: Path) -> None:
    store = LocalStorage()
    with pytest.raises(StorageError, match="needs .* bytes and the file system has"):
        store.begin(str(tmp_path / "root/final"), "attempt", 1 << 60)
    store.close()


def test_an_attempt_under_way_is_told_from_a_leftover(tmp_path: Path) -> None:
    store = LocalStorage()
    folder = store.begin(str(tmp_path / "final"), "attempt", 0)
    assert storage.under_way(folder)
    store.close()
    assert not storage.under_way(folder) and not storage.under_way(folder + "-none")


@pytest.mark.parametrize("direct", [True, False])
def test_a_save_leaves_no_page_cache(root: Path, direct: bool) -> None:
    import mmap

    with Checkpointer(root, Config(direct_io=direct)) as checkpointer:
        path = checkpointer.save(1, {**small_state(), "large": torch.ones(4 << 20)}).result(60) / "__0_0.distcp"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        import ctypes

        pages = -(-len(mapped) // PAGE)
        residency = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        address = libc.mmap
        address.restype = ctypes.c_void_p
        where = address(None, ctypes.c_size_t(len(mapped)), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert libc.mincore(ctypes.c_void_p(where), ctypes.c_size_t(len(mapped)), residency) == 0
        libc.munmap(ctypes.c_void_p(where), ctypes.c_size_t(len(mapped)))
    assert sum(value & 1 for value in residency) < pages / 10


def test_a_folder_that_stays_locked_is_an_error_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_LOCK_TIMEOUT_S", 0.05)
    folder = str(tmp_path)
    with storage._opened(folder) as fd:
        assert storage._lock(fd, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="locked"), storage.reading(folder):
            pass
    with storage.reading(folder):
        pass
