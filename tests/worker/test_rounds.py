"""Rounds over a real store, in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from asyncckpt.errors import RankFailedError, SaveTimeoutError, StorageError, WorkerDiedError, decode, encode
from asyncckpt.worker.messages import Rendezvous
from asyncckpt.worker.rounds import INLINE_BYTES, KEPT_ROUNDS, Rounds, round_name
from asyncckpt.worker.store_connection import host_store

WORLD = 3


@pytest.fixture
def store() -> Iterator[Callable[[], Any]]:
    held = [host_store(0)]
    yield lambda: held[0]
    held.clear()


@pytest.fixture
def ranks(store: Callable[[], Any]) -> Iterator[list[Rounds]]:
    rendezvous = Rendezvous("127.0.0.1", store().port, "token", b"secret", 0, WORLD)
    made = [Rounds(replace(rendezvous, rank=rank), 10) for rank in range(WORLD)]
    yield made
    for each in made:
        each.close()


def ask(rounds: Rounds, what: Callable[..., Any]) -> Any:
    """What ``what`` returns of the store."""
    return rounds.connection.call(what, 10, 10)


def test_all_report_and_all_learn_the_outcome(ranks: list[Rounds]) -> None:
    with ThreadPoolExecutor(WORLD) as pool:
        outcomes = [pool.submit(ranks[rank].outcome, "round-1", 10) for rank in (1, 2)]
        for rank, value in ((2, b"of 2"), (0, b"of 0"), (1, b"")):
            reporting = Rounds(ranks[rank].rendezvous, 10)  # the others' own connections wait
            reporting.report("round-1", value)
            reporting.close()
        assert ranks[0].collect("round-1", 10) == [b"of 0", b"", b"of 2"]
        assert not any(outcome.done() for outcome in outcomes)
        ranks[0].conclude("round-1", b"well", {1: b"one", 2: b"two"})
        assert [outcome.result(10) for outcome in outcomes] == [b"well", b"well"]
    assert ranks[1].outcome("round-1", 1, own=True) == b"one"


def test_values_larger_than_the_store_takes_at_once(ranks: list[Rounds]) -> None:
    values = [bytes([rank]) * (21 << 20) for rank in range(WORLD)]
    for rank in range(WORLD):
        ranks[rank].report("round-1", values[rank])
    assert ranks[0].collect("round-1", 10) == values
    ranks[0].conclude("round-1", b"", {2: values[1]})
    assert ranks[2].outcome("round-1", 10, own=True) == values[1]


def test_the_first_failure_is_everybodys(ranks: list[Rounds]) -> None:
    ranks[0].report("round-1", b"fine")
    failure = StorageError("no space", path="/somewhere", rank=2, step=7)
    ranks[2].fail("round-1", failure)
    ranks[1].fail("round-1", RankFailedError("too late", rank=1))
    with pytest.raises(StorageError, match="no space") as caught:
        ranks[0].collect("round-1", 10)
    assert (caught.value.path, caught.value.rank, caught.value.step) == ("/somewhere", 2, 7)
    ranks[0].conclude_failed("round-1", caught.value)
    for rank in (1, 2):
        outcome = ranks[rank].outcome("round-1", 10)
        assert isinstance(outcome, StorageError) and outcome.args == failure.args


def test_who_is_missing_is_named(ranks: list[Rounds]) -> None:
    ranks[1].report("round-1", b"")
    with pytest.raises(SaveTimeoutError, match="ranks 0, 2 did not get here within 0.1 s") as caught:
        ranks[0].collect("round-1", 0.1)
    assert caught.value.rank == 0
    with pytest.raises(SaveTimeoutError, match="no conclusion") as caught:
        ranks[1].outcome("round-1", 0.1)
    assert caught.value.rank == 0


def test_who_has_left_is_not_waited_for(ranks: list[Rounds]) -> None:
    ranks[0].report("round-1", b"")
    ranks[1].report("round-1", b"")
    ranks[1].gone(RankFailedError("its trainer has died", rank=1))  # after it had reported: no matter
    ranks[2].gone(RankFailedError("its trainer has died", rank=2))
    begun = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        ranks[0].collect("round-1", 60)
    assert caught.value.rank == 2 and time.monotonic() - begun < 30


def test_a_store_that_is_gone(ranks: list[Rounds]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lost = Rounds(replace(ranks[1].rendezvous, port=port), 0.5)
    with pytest.raises(WorkerDiedError, match="cannot be reached") as caught:
        lost.report("round-1", b"")
    assert caught.value.rank == 0
    lost.close()


def test_a_store_that_does_not_answer() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        asked = Rounds(Rendezvous("127.0.0.1", deaf.getsockname()[1], "token", b"secret", 1, 2), 0.5)
        begun = time.monotonic()
        with pytest.raises((WorkerDiedError, SaveTimeoutError)) as caught:
            asked.outcome("round-1", 0.5)
        assert caught.value.rank == 0 and time.monotonic() - begun < 10
        asked.close()


def test_a_stranger_can_break_a_round_and_no_more(ranks: list[Rounds]) -> None:
    """The stranger sees all keys and may write any, but does not have the secret."""
    stranger = Rounds(replace(ranks[1].rendezvous, secret=b"guessed"), 10)
    for rank in ranks:
        rank.report("round-1", b"mine")
    ask(stranger, lambda store: store.delete_key("asyncckpt/token/round-1/reports"))
    for _ in range(WORLD):
        stranger.report("round-1", b"forged")
    with pytest.raises(RankFailedError, match="comes from none of them"):
        ranks[0].collect("round-1", 10)
    for garbage in (b"garbage", b"{}\n", b'{"rank": 0, "bytes": -80, "seal": ""}\n'):
        ask(stranger, lambda store, garbage=garbage: store.set("asyncckpt/token/round-1/reports", garbage))
        with pytest.raises(RankFailedError, match="comes from none of them"):
            ranks[0].collect("round-1", 10)
    ask(ranks[0], lambda store: store.delete_key("asyncckpt/token/round-2/outcome"))
    stranger.conclude("round-2", b"forged")
    with pytest.raises(RankFailedError, match="comes from none of them"):
        ranks[2].outcome("round-2", 10)
    # Nor does what was said elsewhere count here.
    ranks[0].conclude("round-3", b"for three")
    said = ask(stranger, lambda store: store.get("asyncckpt/token/round-3/outcome"))
    ask(stranger, lambda store: store.set("asyncckpt/token/round-4/outcome", said))
    with pytest.raises(RankFailedError, match="comes from none of them"):
        ranks[2].outcome("round-4", 10)
    stranger.close()


def test_a_taken_port_is_an_error(store: Callable[[], Any]) -> None:
    with pytest.raises(OSError, match="no store on port"):
        host_store(store().port)


def test_the_store_does_not_grow(store: Callable[[], Any], ranks: list[Rounds]) -> None:
    sizes = []
    for number in range(1, 3 * KEPT_ROUNDS):
        name = round_name("save", number)
        if number % 3 == 0:
            ranks[1].fail(name, RankFailedError("for a change", rank=1))
        for rank in ranks:
            rank.report(name, b"x" * (INLINE_BYTES + 1 if number % 2 else 10))
        try:
            ranks[0].collect(name, 10)
            ranks[0].conclude(name, b"")
        except RankFailedError as error:
            ranks[0].conclude_failed(name, error)
        ranks[0].clear("save", number)
        sizes.append(store().num_keys())
    assert max(sizes[-9:]) <= max(sizes[KEPT_ROUNDS : KEPT_ROUNDS + 9])


def test_errors_cross_as_they_are() -> None:
    error = SaveTimeoutError("it took long", path="/a", rank=3, step=4)
    again = decode(encode(error))
    assert type(again) is SaveTimeoutError and again.args == error.args and again.rank == 3


def test_threads_end_with_their_connection(ranks: list[Rounds]) -> None:
    ranks[1].report("round-1", b"")
    assert "asyncckpt-store" in [thread.name for thread in threading.enumerate()]


def test_two_may_share_a_connection_and_differ_in_patience(ranks: list[Rounds]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    patient = Rounds(replace(ranks[1].rendezvous, port=port), 20, 5.0)
    quick = Rounds(patient.rendezvous, 20, 0.0, patient.connection)
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError):
        quick.is_flag_set("anything")
    assert time.monotonic() - begun < 4  # the first use imports torch
    with pytest.raises(WorkerDiedError):
        patient.is_flag_set("anything")
    assert time.monotonic() - begun > 4
    patient.close()


def test_what_is_asked_together_is_done_in_order(ranks: list[Rounds]) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda number: ranks[1].report(f"round-{number}", b""), range(40)))
    assert len(done) == 40
    assert [thread.name for thread in threading.enumerate()].count("asyncckpt-store") == 1
