"""Reads of a data file: which bytes, in which sizes, and into which memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import PAGE, checksum

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.extension import Engine, StorageSource, load, storage_for
from asyncckpt.format.index import Index, Item, spans
from asyncckpt.loading.data_file import RUN_BYTES, StoredFile, read_pool
from asyncckpt.loading.device_buffers import DeviceBuffers
from asyncckpt.loading.direct_load import draft
from asyncckpt.loading.read_requests import ReadRequests
from asyncckpt.storage import local_file

LARGE = 5 << 20  # elements


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reading") / "checkpoint"
    small = {f"small {number}": torch.full((2500,), float(number)) for number in range(2000)}
    with Engine() as engine:
        engine.save(path, {"large": torch.arange(float(LARGE)), **small}).result(60)
    return path


@pytest.fixture
def nbytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of each read of a data file."""
    counts: list[int] = []
    real = os.preadv

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        counts.append(real(fd, views, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return counts


def test_a_partial_load_reads_what_it_needs(checkpoint: Path, nbytes_read: list[int]) -> None:
    names = [f"small {number}" for number in range(100, 140)]
    load(state := {name: torch.zeros(2500) for name in names}, str(checkpoint))
    assert all((state[name] == float(name.split()[1])).all() for name in names)
    stored = 40 * (2500 * 4 + 256)  # each tensor with its header
    assert 40 * 10_000 <= sum(nbytes_read) <= stored + 2 * PAGE * len(nbytes_read)


def test_all_is_read_once_and_a_piece_at_a_time(checkpoint: Path, nbytes_read: list[int]) -> None:
    state = {"large": torch.zeros(LARGE), **{f"small {number}": torch.zeros(2500) for number in range(2000)}}
    load(state, str(checkpoint))
    assert torch.equal(state["large"], torch.arange(float(LARGE)))
    assert all((state[f"small {number}"] == number).all() for number in range(2000))
    size = (checkpoint / "__0_0.distcp").stat().st_size
    assert sum(nbytes_read) <= size + 2 * PAGE * len(nbytes_read)
    # 512 bytes is the smallest alignment that a device may require for direct reads.
    if state["large"].data_ptr() % 512:
        assert max(nbytes_read) <= RUN_BYTES + 2 * PAGE


@pytest.fixture
def aligned() -> torch.Tensor:
    """Return a tensor that begins at a page."""
    return torch.frombuffer(mmap.mmap(-1, LARGE * 4), dtype=torch.float32)


@pytest.mark.parametrize("how", ["as the device says", "allowed", "refused"])
def test_aligned_memory_is_read_in_place(
    how: str, checkpoint: Path, aligned: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    read_in_place: list[bool] = []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if how == "refused" and len(views) > 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        read_in_place.append(len(views) > 1)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    if how != "as the device says":
        monkeypatch.setattr(local_file, "direct_alignments", lambda fd: (512, 4096))
    load({"large": aligned}, str(checkpoint))
    assert torch.equal(aligned, torch.arange(float(LARGE)))
    assert how != "refused" or not any(read_in_place)


def test_tensors_that_are_tied_only_where_they_are_loaded(
    tmp_path: Path, aligned: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads write to the same memory, so the checksum must be computed from other memory."""
    monkeypatch.setattr(local_file, "direct_alignments", lambda fd: (512, 4096))
    with Engine() as engine:
        engine.save(tmp_path / "untied", {"a": torch.zeros(LARGE), "b": torch.ones(LARGE)}).result(60)
    for _ in range(5):
        load({"a": aligned, "b": aligned}, str(tmp_path / "untied"))


def test_direct_reads_that_are_refused_only_when_they_are_made(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    load(state := {"large": torch.zeros(LARGE)}, str(checkpoint))
    assert torch.equal(state["large"], torch.arange(float(LARGE)))


def test_an_index_that_means_harm(tmp_path: Path) -> None:
    """The index gives a tensor more bytes than its dtype and shape have, with correct checksums."""
    with Engine() as engine:
        engine.save(tmp_path / "c", {"w": torch.ones(16)}).result(60)
    folder = str(tmp_path / "c")
    index = Index.parse((tmp_path / "c" / "__0_0.index.json").read_bytes(), folder)
    index.items[:] = [item._replace(payload_bytes=item.payload_bytes + 512) for item in index.items]
    memory = torch.zeros(4096)
    held = ExitStack()
    with held, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Index, "parse", lambda *_: index)
        assert draft({"w": memory[:16]}, StorageSource(folder), folder, held) is None


def test_damage_in_what_was_read_in_place(
    checkpoint: Path, aligned: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_file, "direct_alignments", lambda fd: (512, 4096))
    with open(checkpoint / "__0_0.distcp", "r+b") as file:
        for at in (5000, 10 << 20, LARGE * 4):
            file.seek(at)
            whole = file.read(1)
            file.seek(at)
            file.write(bytes([whole[0] ^ 1]))
            file.flush()
            with pytest.raises(DamagedCheckpointError, match="'large'"):
                load({"large": aligned}, str(checkpoint))
            file.seek(at)
            file.write(whole)
            file.flush()


def _rows(folder: Path, rows: int = 400) -> tuple[StoredFile, list[Item], torch.Tensor]:
    """Return a file of short tensors, its items, and their values."""
    stored = torch.arange(rows * 1000, dtype=torch.int32).view(rows, 1000)
    data = bytes(PAGE) + stored.numpy().tobytes()
    data += bytes(-len(data) % PAGE)
    (folder / "data").write_bytes(data)
    items = [
        Item(str(row), "tensor", "int32", [1000], [0], PAGE + row * 4000, 4000, PAGE + row * 4000, 4000)
        for row in range(rows)
    ]
    bounds = spans((item.at for item in items), len(data))
    sums = [checksum(data[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)]
    path = str(folder / "data")
    file = StoredFile(storage_for(path).open(path), Index("data", len(data), items, sums))
    return file, items, stored


def test_requests_in_any_order_and_the_same_bytes_twice(tmp_path: Path) -> None:
    rows = 400
    file, items, stored = _rows(tmp_path, rows)
    requests = ReadRequests()
    into = [(row, torch.zeros(1000, dtype=torch.int32)) for row in [*reversed(range(rows)), *range(0, rows, 3), 7, 7]]
    empty = torch.zeros(0, dtype=torch.int32)
    for row, tensor in into:
        requests.whole(tensor, items[row])
    requests.whole(empty, items[5]._replace(shape=[0], payload_bytes=0))
    with closing(file), read_pool(file.path) as pool:
        assert not list(requests.read(file, pool, DeviceBuffers(), verify=True))
    assert all(torch.equal(tensor, stored[row]) for row, tensor in into)


def test_batches_are_read_ahead_and_the_last_one_of_tied_rows_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, items, stored = _rows(tmp_path)
    monkeypatch.setattr("asyncckpt.loading.read_requests._BATCH_BYTES", 40_000)
    begun: list[int] = []
    ahead: list[int] = []
    real = StoredFile._read_run

    def slow_at_first(self: StoredFile, first: int, *args: Any) -> Any:
        begun.append(first)
        time.sleep(0.2 if len(begun) == 1 else 0)
        return real(self, first, *args)

    monkeypatch.setattr(StoredFile, "_read_run", slow_at_first)
    for tied in (False, True):
        begun.clear()
        ahead.clear()
        requests = ReadRequests()
        # Batched, because they are not contiguous.
        into = [torch.zeros(1000, 2, dtype=torch.int32)[:, 0] for _ in items]
        both = torch.zeros(1000, dtype=torch.int32)
        for row, tensor in enumerate(into):
            requests.whole(both if tied and row in (5, 45) else tensor, items[row])
        with read_pool(file.path) as pool:
            assert not list(requests.read(file, pool, DeviceBuffers(), lambda _: ahead.append(len(begun)), verify=True))
        assert (ahead[0] == 1) is tied and len(begun) > 10
        alone = [row for row in range(len(into)) if not tied or row not in (5, 45)]
        assert all(torch.equal(into[row], stored[row]) for row in alone)
        assert not tied or torch.equal(both, stored[45])
    file.close()


def test_an_interrupted_read_waits_for_what_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may reuse the memory after the interrupt."""
    data = bytes(4 * RUN_BYTES)
    (tmp_path / "data").write_bytes(data)
    bounds = list(range(0, len(data) + 1, RUN_BYTES))
    sums = [checksum(data[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)]
    items = [Item("0", "tensor", "uint8", [len(data)], [0], 0, len(data), 0, len(data))]
    path, reading, gate = str(tmp_path / "data"), [0], threading.Event()
    real = StoredFile._read_run

    def held(*args: Any) -> Any:
        reading[0] += 1
        gate.wait(60)
        try:
            return real(*args)
        finally:
            reading[0] -= 1

    def interrupted(*_: Any) -> None:
        threading.Timer(0.5, gate.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(StoredFile, "_read_run", held)
    file = StoredFile(storage_for(path).open(path), Index("data", len(data), items, sums))
    with closing(file), ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt), file.read([(0, len(data))], pool) as runs:
                list(runs)
        assert reading == [0]
