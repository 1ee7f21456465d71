"""The store: authentication of clients, and attacks by strangers."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from asyncckpt.errors import CheckpointError, WorkerDiedError
from asyncckpt.link.api import Rendezvous
from asyncckpt.ranks.rounds import Rounds
from asyncckpt.ranks.store import NONCE_BYTES, Store
from asyncckpt.ranks.store_connection import Patience


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(b"secret")
    yield store
    store.close()


@pytest.fixture
def rounds(store: Store) -> Iterator[Rounds]:
    rounds = Rounds(Rendezvous("127.0.0.1", store.port, "token", b"secret", 0, 1), 10)
    yield rounds
    rounds.close()


def _stranger(store: Store) -> socket.socket:
    return socket.create_connection(("127.0.0.1", store.port), timeout=10)


def _is_dropped(connection: socket.socket) -> bool:
    """Return whether the store sends nothing but the nonce."""
    said = b""
    try:
        while piece := connection.recv(1 << 16):
            said += piece
    except ConnectionResetError:
        pass
    return len(said) <= NONCE_BYTES


def test_who_does_not_know_the_secret_is_not_let_in(store: Store, rounds: Rounds) -> None:
    guessing = Rounds(replace(rounds.rendezvous, secret=b"guessed"), 2, Patience(0.0))
    with pytest.raises(WorkerDiedError):
        guessing.report("round-1", b"forged")
    guessing.close()
    assert len(store) == 0
    rounds.report("round-1", b"mine")
    assert rounds.collect("round-1", 10) == [b"mine"]


def test_nor_is_a_rank_where_a_stranger_listens(rounds: Rounds) -> None:
    with Stranger() as stranger:
        lost = Rounds(replace(rounds.rendezvous, port=stranger.port), 2, Patience(0.0))
        with pytest.raises(CheckpointError):
            lost.report("round-1", b"")
        lost.close()


class Stranger(Store):
    """A store with another secret, which accepts every client."""

    def __init__(self) -> None:
        super().__init__(b"another")

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_strangers_by_the_hundreds_hold_nobody_up(
    store: Store, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store drops strangers that send garbage at once, and limits the number of silent strangers."""
    monkeypatch.setattr("asyncckpt.ranks.store.NOTICE_S", 60.0)
    strangers = [_stranger(store) for _ in range(300)]
    for number, stranger in enumerate(strangers):
        if number % 2:
            stranger.sendall(os.urandom(4096))
    begun = time.monotonic()
    for number in range(20):
        rounds.report(f"round-{number}", b"mine")
        assert rounds.collect(f"round-{number}", 10) == [b"mine"]
    assert time.monotonic() - begun < 30
    for number, stranger in enumerate(strangers):
        if number % 2 or number < 20:  # too many strangers were waiting
            assert _is_dropped(stranger)
        stranger.close()


def test_those_who_say_nothing_are_dropped_in_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.ranks.store.NOTICE_S", 0.2)
    with _stranger(store) as stranger:
        assert _is_dropped(stranger)


def test_it_listens_where_it_is_told_to() -> None:
    alone = Store(b"secret", address="127.0.0.1")
    assert alone.address == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", alone.port), timeout=5)
    alone.close()
    # An address that others use for this host need not be one of its own.
    everywhere = Store(b"secret", address="192.0.2.1")
    assert everywhere.address == ""
    with socket.create_connection(("127.0.0.2", everywhere.port), timeout=5) as connection:
        assert connection.recv(1)
    everywhere.close()


def test_where_no_descriptor_is_left_those_who_are_connected_go_on(
    store: Store, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process has fewer descriptors than ranks, the store waits for a descriptor, and answers meanwhile."""
    rounds.report("round-0", b"")
    refused = []

    def accept(_: socket.socket) -> object:
        refused.append(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", accept)
        late = _stranger(store)
        for number in range(1, 50):
            rounds.report(f"round-{number}", b"")
        assert 1 <= len(refused) < 10
    with late:
        assert late.recv(1)
