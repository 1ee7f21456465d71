"""Transport by sealed sockets, and attacks by clients without the key and by a man in the middle."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import PAGE
from support.image_holder import IMAGE, KEY, hold, image_bytes
from support.transport_contract import NBYTES, TransportContract

from asyncckpt.link.calls import Answer
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.holder import Holder
from asyncckpt.transfer.server import TransferServer
from asyncckpt.transfer.sockets import connect


class TestSockets(TransportContract):
    kind = "sockets"


@pytest.fixture
def address() -> Iterator[TransferAddress]:
    """The address of a server in this process that holds an image."""
    store = SegmentStore()
    hold(store, NBYTES)
    server = TransferServer(store, (KEY,), "127.0.0.1")
    yield TransferAddress("127.0.0.1", server.port)
    server.close()
    store.close()


def _read_all(address: TransferAddress) -> bool:
    with Holder(address, KEY, "sockets") as peer:
        image = peer.open(IMAGE)
        into = memoryview(bytearray(NBYTES))
        image.read(image.described.layout.slots[0], into)
        image.close()
        return into == image_bytes(NBYTES)


def test_an_answer_may_take_time(address: TransferAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums of a large image may take longer than ``answer_s``."""
    lease = SegmentStore.lease

    def lease_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(3)
        return lease(*args, **options)

    monkeypatch.setattr(SegmentStore, "lease", lease_slowly)
    with Holder(address, KEY, "sockets", answer_s=2.0) as peer:
        peer.open(IMAGE, with_checksums=True).close()


def test_a_thousand_strangers_get_nothing_and_stall_nothing(address: TransferAddress) -> None:
    chance = random.Random(3)
    strangers, said = [], 0
    for number in range(1000):
        stranger = socket.create_connection((address.host, address.port), timeout=10)
        if number % 3:
            stranger.setblocking(False)
            try:
                stranger.send(chance.randbytes(chance.choice([1, 64, 96, 5000])))
            except OSError:
                pass
        strangers.append(stranger)
        if number % 250 == 100:
            assert _read_all(address)
    assert _read_all(address)
    for stranger in strangers:
        stranger.settimeout(20)
        try:
            while piece := stranger.recv(1 << 16):
                said += len(piece)
        except OSError:
            pass
        stranger.close()
    assert said <= 1000 * 32  # at most a nonce each


def test_who_guesses_the_key_is_not_let_in(address: TransferAddress) -> None:
    with pytest.raises(OSError):
        Holder(address, b"guessed", "sockets", answer_s=5.0)
    assert _read_all(address)


class _Between:
    """A man in the middle between a reader and the holder.

    ``flip_at``: the offset of the byte from the holder that is changed. ``repeat``: send pieces of the reader twice.
    """

    def __init__(self, address: TransferAddress) -> None:
        self._to = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = TransferAddress("127.0.0.1", self._listener.getsockname()[1])
        self.flip_at = -1
        self.repeat = False
        self.heard: list[bytes] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self._sockets: list[socket.socket] = []

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((self._to.host, self._to.port))
            self._sockets += [near, far]
            for source, target, changes in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pass_on, args=[source, target, changes])
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, changes: bool) -> None:
        passed = 0
        try:
            while piece := bytearray(source.recv(1 << 16)):
                if changes and passed <= self.flip_at < passed + len(piece):
                    piece[self.flip_at - passed] ^= 1
                passed += len(piece)
                if not changes:
                    self.heard.append(bytes(piece))
                target.sendall(piece)
                if not changes and self.repeat and len(self.heard) > 3:
                    target.sendall(piece)
        except OSError:
            pass
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


@pytest.fixture
def between(address: TransferAddress) -> Iterator[_Between]:
    between = _Between(address)
    yield between
    between.close()


@pytest.mark.parametrize("at", [0, 40, 70, 100, 500, 1 << 20, NBYTES // 2, NBYTES])
def test_who_changes_one_bit_on_the_way_is_found_out(between: _Between, address: TransferAddress, at: int) -> None:
    assert _read_all(between.address)
    between.flip_at = at
    with pytest.raises(OSError):
        assert not _read_all(between.address)
    assert _read_all(address)


def test_what_was_said_before_is_not_listened_to_again(between: _Between, address: TransferAddress) -> None:
    between.repeat = True
    with pytest.raises(OSError):
        for _ in range(2):  # if pieces arrive joined, perhaps only the last piece of a connection is repeated
            _read_all(between.address)
    # A replay on another connection fails, too.
    replayed = socket.create_connection((address.host, address.port), timeout=10)
    replayed.sendall(b"".join(between.heard))
    said = b""
    try:
        while piece := replayed.recv(1 << 16):
            said += piece
    except ConnectionResetError:
        pass
    replayed.close()
    assert len(said) <= 32
    assert _read_all(address)


def test_what_is_cut_is_not_waited_for(between: _Between, address: TransferAddress) -> None:
    """A connection that ends in the middle of a message fails the read."""
    peer = Holder(between.address, KEY, "sockets")
    image = peer.open(IMAGE)
    failed = threading.Event()

    def read() -> None:
        with pytest.raises(OSError):
            while True:
                image.read(image.described.layout.slots[0], memoryview(bytearray(NBYTES)))
        failed.set()

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.05)
    between.close()
    assert failed.wait(30)
    thread.join()
    peer.close()
    assert _read_all(address)


def test_bytes_are_not_read_without_a_lease(address: TransferAddress) -> None:
    with Holder(address, KEY, "sockets") as peer:
        image = peer.open(IMAGE)
        reading = image._reading
        with pytest.raises(OSError):
            image.read(1 << 40, memoryview(bytearray(PAGE)))  # beyond the end
        image.close()
        peer.ping()
        other = peer.open(IMAGE)
        other._reading._lease = "guessed"  # type: ignore[attr-defined]
        with pytest.raises(OSError):
            other.read(0, memoryview(bytearray(PAGE)))
        with pytest.raises(OSError):
            reading.read(0, memoryview(bytearray(PAGE)))


class _Forgery:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_an_answer_of_another_version_ends_the_connection(
    address: TransferAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirrors of a publication may run another version than its workers."""
    with Holder(address, KEY, "sockets") as peer:
        peer.ping()
        monkeypatch.setattr(Answer, "sent", lambda _: None)
        for _ in range(2):
            with pytest.raises(OSError):
                peer.ping()


def test_a_call_of_another_version_ends_its_connection_alone(address: TransferAddress) -> None:
    connection = connect(address, KEY)
    connection.send((1, "no_such_method", (), {}))
    with pytest.raises(OSError):
        connection.receive()
    connection.close()
    assert _read_all(address)


def test_who_knows_the_key_runs_nothing(address: TransferAddress, tmp_path: Path) -> None:
    """A locator contains the key, and other hosts get it. So the key must not give its owner a way to run code."""
    connection = connect(address, KEY)
    connection.send(_Forgery(tmp_path / "made"))
    with pytest.raises(OSError):
        connection.receive()
    assert not list(tmp_path.iterdir())
    connection.close()
