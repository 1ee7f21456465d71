"""Fetch only the spans of an image that the previous copy lacks, or that are damaged there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any

import pytest
from support.image_holder import KEY, SPAN_BYTES, copy_bytes, lay_out, stage

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.format.write_request import CopiedRank, ImageKey
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.memcpy import memcpy
from asyncckpt.transfer import fetch
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.copies import Copies
from asyncckpt.transfer.fetch import RateLimit
from asyncckpt.transfer.holder import Holder, RemoteImage
from asyncckpt.transfer.server import TransferServer

NBYTES = 8 * SPAN_BYTES


class Pair:
    """A holder of images and its copies. ``read``: the bytes that the last copy has fetched in ``reads`` requests."""

    def __init__(self, source: SegmentStore, kept: SegmentStore, holder: Holder, monkeypatch: pytest.MonkeyPatch):
        self.kept, self._source, self._holder = kept, source, holder
        self._number = lay_out(source, NBYTES, slots=2)
        self._state = bytearray(self.slot(source, self._number, 0))
        self._copies = Copies(kept)
        self._copies.keep(0, [CopiedRank(0, copy_bytes(NBYTES))], [0])
        self.read = self.reads = 0
        read = RemoteImage.read

        def counted(image: RemoteImage[Any], offset: int, into: memoryview) -> None:
            self.read += len(into)
            self.reads += 1
            read(image, offset, into)

        monkeypatch.setattr(RemoteImage, "read", counted)

    def slot(self, store: SegmentStore, number: int, slot: int) -> memoryview:
        layout = store.hosted(number).layout
        begin = layout.slots[slot]  # type: ignore[union-attr]
        return store.hosted(number).segment.view[begin : begin + NBYTES]

    def save(self, save_id: int, *changed: int, pool: ThreadPoolExecutor | None = None) -> memoryview:
        """Change these spans of the image, stage it, and copy it. Return the copy."""
        for span in changed:
            self._state[span * SPAN_BYTES] = save_id
        own = self.slot(self._source, self._number, save_id % 2)
        own[:] = self._state
        key = ImageKey(f"attempt {save_id}", 0)
        stage(self._source, self._number, save_id % 2, save_id, key)
        self.read = self.reads = 0
        image = self._holder.open(key)
        try:
            incoming = self._copies.begin(image.described)
            with ThreadPoolExecutor(2) if pool is None else nullcontext(pool) as pool:
                incoming.fill(image, pool, RateLimit(None))
        finally:
            image.close()
        copy = self.slot(self.kept, 1, incoming.slot)
        assert copy == own
        return copy

    def close(self) -> None:
        self._copies.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with (
        closing(SegmentStore()) as source,
        closing(SegmentStore()) as kept,
        closing(TransferServer(source, (KEY,), "127.0.0.1")) as server,
        Holder(TransferAddress("127.0.0.1", server.port), KEY, "sockets") as holder,
        closing(Pair(source, kept, holder, monkeypatch)) as pair,
    ):
        yield pair


def test_what_has_not_changed_does_not_travel(pair: Pair) -> None:
    pair.save(1)
    assert pair.read > NBYTES  # with the constants
    pair.save(2)
    assert pair.read == 0
    pair.save(3, 0, 3, 4)
    assert pair.read == 3 * SPAN_BYTES
    pair.save(4, *range(8))
    assert pair.read == NBYTES


def test_a_few_equal_bytes_between_others_are_read_with_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One larger request is faster than several small requests. A chunk has two spans in this test."""
    monkeypatch.setattr(fetch, "_WORTH_BYTES", SPAN_BYTES + 1)
    pair.save(1)
    pair.save(2)
    pair.save(3, 0, 3)
    assert (pair.read, pair.reads) == (4 * SPAN_BYTES, 2)


def test_what_is_damaged_in_the_copy_before_comes_again(pair: Pair) -> None:
    copy = pair.save(1)
    copy[5 * SPAN_BYTES + 100] ^= 1
    pair.save(2)
    assert pair.read == SPAN_BYTES


def test_nothing_is_taken_from_a_copy_that_came_to_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.save(1)
    pair.save(2)
    read = RemoteImage.read

    def damaged(image: RemoteImage[Any], offset: int, into: memoryview) -> None:
        read(image, offset, into)
        into[7] ^= 1

    with monkeypatch.context() as patched, pytest.raises(DamagedCheckpointError, match="did not arrive") as raised:
        patched.setattr(RemoteImage, "read", damaged)
        pair.save(3, 6)
    assert raised.value.path is not None and raised.value.rank == 0
    pair.save(4, 1)
    assert pair.read == 2 * SPAN_BYTES  # span 6 too


def test_what_came_to_nothing_writes_nothing_later(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next copy uses the same threads. A slow thread of the failed copy must not write after the failure."""
    monkeypatch.setattr(fetch, "_CHUNK_BYTES", SPAN_BYTES)
    pair.save(1)
    pair.save(2)
    read, copy = RemoteImage.read, memcpy
    is_copying, may_copy, is_copied = threading.Event(), threading.Event(), threading.Event()

    def damaged(image: RemoteImage[Any], offset: int, into: memoryview) -> None:
        is_copying.wait(10)
        read(image, offset, into)
        into[7] ^= 1

    def slow(to: int, source: int, nbytes: int) -> None:
        monkeypatch.setattr(fetch, "memcpy", copy)
        is_copying.set()
        may_copy.wait(1.0)
        copy(to, source, nbytes)
        is_copied.set()

    with ThreadPoolExecutor(2) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(RemoteImage, "read", damaged)
            monkeypatch.setattr(fetch, "memcpy", slow)
            with pytest.raises(DamagedCheckpointError, match="did not arrive"):
                pair.save(3, 0, pool=pool)
        kept = pair.save(4, 1, pool=pool)
        before = bytes(kept)
        may_copy.set()
        assert is_copied.wait(10)
        assert kept == before
