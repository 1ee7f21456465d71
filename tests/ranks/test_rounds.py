"""Rounds over a real store, in this process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.workers import stop

from asyncckpt.errors import RankFailedError, SaveTimeoutError, StorageError, WorkerDiedError, decode, encode
from asyncckpt.link.api import Rendezvous
from asyncckpt.ranks.rounds import KEPT_ROUNDS, Rounds, key_of, round_name
from asyncckpt.ranks.store import Store
from asyncckpt.ranks.store_connection import Patience

WORLD = 3


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(b"secret")
    yield store
    store.close()


@pytest.fixture
def ranks(store: Store) -> Iterator[list[Rounds]]:
    rendezvous = Rendezvous("127.0.0.1", store.port, "token", b"secret", 0, WORLD)
    made = [Rounds(replace(rendezvous, rank=rank), 10) for rank in range(WORLD)]
    yield made
    for each in made:
        each.close(10)


def ask(rounds: Rounds, what: Callable[..., Any]) -> Any:
    """Return the result of ``what`` for the store."""
    return rounds.connection.call(what, 10, Patience(10))


def test_all_report_and_all_learn_the_outcome(ranks: list[Rounds]) -> None:
    with ThreadPoolExecutor(WORLD) as pool:
        outcomes = [pool.submit(ranks[rank].outcome, "round-1", 10) for rank in (1, 2)]
        for rank, value in ((2, b"of 2"), (0, b"of 0"), (1, b"")):
            reporting = Rounds(ranks[rank].rendezvous, 10)  # the connections in ``ranks`` are waiting
            reporting.report("round-1", value)
            reporting.close()
        assert ranks[0].collect("round-1", 10) == [b"of 0", b"", b"of 2"]
        assert not any(outcome.done() for outcome in outcomes)
        ranks[0].conclude("round-1", b"well")
        assert [outcome.result(10) for outcome in outcomes] == [b"well", b"well"]


@pytest.mark.parametrize("outcomes", [{1: b"one", 2: b"two"}, {1: b"same", 2: b"same"}, {1: b"", 2: b""}])
def test_each_learns_its_own_outcome(ranks: list[Rounds], outcomes: dict[int, bytes]) -> None:
    ranks[0].conclude_each("round-1", outcomes)
    assert {rank: ranks[rank].outcome("round-1", 10) for rank in outcomes} == outcomes


def test_an_answer_that_is_lost_with_its_store_names_the_first_rank(ranks: list[Rounds]) -> None:
    """The rank asks for its answer after another worker has replaced the store."""
    ranks[0].conclude_each("round-1", {1: b"one", 2: b"two"})
    lost = key_of(ranks[0].rendezvous, "round-1", "for", "1")
    ranks[0].connection.call(lambda store: store.remove(lost), 10, Patience(0))
    with pytest.raises(WorkerDiedError) as caught:
        ranks[1].outcome("round-1", 10)
    assert caught.value.rank == 0 and ranks[2].outcome("round-1", 10) == b"two"


def test_values_larger_than_the_store_takes_at_once(ranks: list[Rounds]) -> None:
    values = [bytes([rank]) * (21 << 20) for rank in range(WORLD)]
    for rank in range(WORLD):
        ranks[rank].report("round-1", values[rank])
    assert ranks[0].collect("round-1", 10) == values
    ranks[0].conclude_each("round-1", {1: values[2], 2: values[1]})
    assert ranks[2].outcome("round-1", 10) == values[1]


def test_the_first_failure_is_everybodys(ranks: list[Rounds]) -> None:
    ranks[0].report("round-1", b"fine")
    failure = StorageError("no space", path="/somewhere", rank=2, step=7)
    ranks[2].fail_soon("round-1", failure, 10).result(10)
    ranks[1].fail_soon("round-1", RankFailedError("too late", rank=1), 10).result(10)
    with pytest.raises(StorageError, match="no space") as caught:
        ranks[0].collect("round-1", 10)
    assert (caught.value.path, caught.value.rank, caught.value.step) == ("/somewhere", 2, 7)
    ranks[0].conclude_failed("round-1", caught.value)
    for rank in (1, 2):
        outcome = ranks[rank].outcome("round-1", 10)
        assert isinstance(outcome, StorageError) and outcome.args == failure.args


def test_who_is_missing_is_named(ranks: list[Rounds]) -> None:
    ranks[1].report("round-1", b"")
    with pytest.raises(SaveTimeoutError, match="ranks 0, 2 did not make the call within 0.1 s") as caught:
        ranks[0].collect("round-1", 0.1)
    assert caught.value.rank == 0
    with pytest.raises(SaveTimeoutError, match="sent no outcome") as caught:
        ranks[1].outcome("round-1", 0.1)
    assert caught.value.rank == 0


def test_who_has_left_is_not_waited_for(ranks: list[Rounds]) -> None:
    ranks[0].report("round-1", b"")
    ranks[1].report("round-1", b"")
    ranks[1].gone_soon(RankFailedError("its trainer has died", rank=1), 30).result(
        30
    )  # no matter, because rank 1 has reported
    ranks[2].gone_soon(RankFailedError("its trainer has died", rank=2), 30).result(30)
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
        assert caught.value.rank == 0 and time.monotonic() - begun < 40
        asked.close()


def test_what_is_changed_on_the_way_is_refused(ranks: list[Rounds]) -> None:
    """An attacker in the network can read and change messages, but does not know the secret."""
    keys = "asyncckpt/token/round"
    for garbage in (b"", b"forged", b"0" * 40):
        for rank in ranks:
            rank.report("round-1", b"mine")
        ask(ranks[1], lambda store, garbage=garbage: store.put(f"{keys}-1/reports", 1, garbage))
        with pytest.raises(RankFailedError, match="was sent by no rank of it"):
            ranks[0].collect("round-1", 10)
    ask(ranks[1], lambda store: store.put(f"{keys}-2/outcome", 0, b"forged"))
    with pytest.raises(RankFailedError, match="was sent by no rank of it"):
        ranks[2].outcome("round-2", 10)
    # A message of another round does not count either.
    ranks[0].conclude("round-3", b"for three")
    said = ask(ranks[1], lambda store: store.get(f"{keys}-3/outcome"))[0]
    ask(ranks[1], lambda store: store.put(f"{keys}-4/outcome", 0, said))
    with pytest.raises(RankFailedError, match="was sent by no rank of it"):
        ranks[2].outcome("round-4", 10)


def test_a_taken_port_is_an_error(store: Store) -> None:
    with pytest.raises(OSError, match="in use"):
        Store(b"other", (store.port, store.port))


def test_the_store_does_not_grow(store: Store, ranks: list[Rounds]) -> None:
    sizes = []
    for number in range(1, 3 * KEPT_ROUNDS):
        name = round_name("save", number)
        if number % 3 == 0:
            ranks[1].fail_soon(name, RankFailedError("for a change", rank=1), 10).result(10)
        for rank in ranks:
            rank.report(name, b"x" * (100_000 if number % 2 else 10))
        try:
            ranks[0].collect(name, 10)
            ranks[0].conclude(name, b"")
        except RankFailedError as error:
            ranks[0].conclude_failed(name, error)
        ranks[0].clear("save", number)
        sizes.append(len(store))
    assert max(sizes[-9:]) <= max(sizes[KEPT_ROUNDS : KEPT_ROUNDS + 9])


def test_errors_cross_as_they_are() -> None:
    error = SaveTimeoutError("it took long", path="/a", rank=3, step=4)
    again = decode(encode(error))
    assert type(again) is SaveTimeoutError and again.args == error.args and again.rank == 3


def test_two_may_share_a_connection_and_differ_in_patience(
    ranks: list[Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    patient = Rounds(replace(ranks[1].rendezvous, port=port), 20, Patience(1.0))
    quick = patient.impatient(5.0)
    tried = []
    connect = socket.create_connection

    def counted(*arguments: Any, **options: Any) -> socket.socket:
        tried.append(1)
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", counted)
    with pytest.raises(WorkerDiedError):
        quick.is_flag_set("anything")
    assert len(tried) == 1
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError):
        patient.is_flag_set("anything")
    assert time.monotonic() - begun > 0.8
    tried.clear()
    with pytest.raises(WorkerDiedError):  # no second full wait for the same missing store
        patient.is_flag_set("anything")
    assert len(tried) <= 2
    patient.close()


def test_what_is_asked_together_is_done_in_order(ranks: list[Rounds]) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda number: ranks[1].report(f"round-{number}", b""), range(40)))
    assert len(done) == 40
    soon = [ranks[1].report_soon(f"round-{number}", b"", 10) for number in range(40)]
    soon[-1].result(10)
    assert all(each.done() for each in soon)


def test_what_is_said_soon_reaches_the_store_that_comes_back(store: Store, ranks: list[Rounds]) -> None:
    ranks[1].report("round-1", b"")
    store.close()
    failing = ranks[1].fail_soon("round-2", RankFailedError("as the test wants", rank=1), 20)
    with pytest.raises(WorkerDiedError):
        ranks[1].impatient(5.0).ping()
    assert not failing.done()
    again = Store(b"secret", (store.port, store.port))
    failing.result(20)
    with pytest.raises(RankFailedError, match="as the test wants"):
        ranks[0].collect("round-2", 10)
    again.close()


def test_a_store_that_is_stopped_is_noticed_and_goes_on() -> None:
    """A stopped store accepts connections, and never answers.

    A caller with a limit gives up, and the others get their answer later.
    """
    code = (
        "import os, signal, sys; from asyncckpt.ranks.store import Store; store = Store(b'secret')\n"
        "print(store.port, flush=True); sys.stdin.read()"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    rounds = Rounds(Rendezvous("127.0.0.1", int(host.stdout.readline()), "token", b"secret", 1, 2), 90)
    try:
        rounds.report("round-1", b"")
        stop(host.pid)
        rounds._silence = 0.5
        soon = rounds.report_soon("round-2", b"", 90)
        for ask_it in (rounds.ping, lambda: rounds.outcome("round-1", 90), lambda: rounds.report("round-1", b"")):
            begun = time.monotonic()
            with pytest.raises(SaveTimeoutError, match="does not answer") as caught:
                ask_it()
            assert caught.value.rank == 0 and time.monotonic() - begun < 30
        assert not soon.done()
        host.send_signal(signal.SIGCONT)
        soon.result(60)
    finally:
        rounds.close()
        host.kill()
        host.communicate()


def test_what_is_said_soon_is_said_in_order(ranks: list[Rounds]) -> None:
    """A closing rank is gone only after its report."""
    reported = ranks[1].report_soon("round-1", b"", 30)
    ranks[1].gone_soon(RankFailedError("it has closed", rank=1), 30).result(30)
    assert reported.done() and reported.exception() is None


def test_an_outcome_that_comes_soon_is_not_the_last_word(ranks: list[Rounds]) -> None:
    ranks[0].conclude("round-1", b"yes")
    for name in ("round-1", "round-2"):
        ranks[0].conclude_soon(name, b"no", 30).result(30)
    assert [ranks[1].outcome(name, 30) for name in ("round-1", "round-2")] == [b"yes", b"no"]


def test_one_that_is_closed_waits_for_nothing(store: Store) -> None:
    """The connection is closed between two calls of a thread."""
    rounds = Rounds(Rendezvous("127.0.0.1", store.port, "token", b"secret", 1, 2), 10)
    rounds.report("round-1", b"")
    rounds.close()
    with pytest.raises(WorkerDiedError, match="the connection was closed"):
        rounds.outcome("round-1", 60)
