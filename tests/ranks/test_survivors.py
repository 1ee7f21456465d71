"""Workers whose trainers are gone say that they are there, and those that say nothing are given up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from asyncckpt.errors import RankFailedError
from asyncckpt.extension import Rendezvous, Store
from asyncckpt.ranks import survivors
from asyncckpt.ranks.survivors import Survivors

SILENCE_S = 1.0


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr(survivors, "_SILENCE_S", SILENCE_S)
    monkeypatch.setattr(survivors, "_SAY_S", 0.05)
    store = Store(b"secret")
    yield Rendezvous("127.0.0.1", store.port, "token", b"secret", 0, 3)
    store.close()


def _lost(first: Survivors, rank: int, within: float) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if isinstance(first.lost(rank), RankFailedError):
            return True
        time.sleep(0.02)
    return False


def test_the_silent_are_lost_once_the_job_is_started_again(rendezvous: Rendezvous) -> None:
    first, other = (Survivors(replace(rendezvous, rank=rank), lambda: True) for rank in range(2))
    try:
        assert not _lost(first, 2, 2 * SILENCE_S)  # its trainer may live
        first.restarted()
        assert _lost(first, 2, 10)
        assert not _lost(first, 1, 2 * SILENCE_S) and first.lost(0) is None
        other.close()
        assert _lost(first, 1, 10)
    finally:
        first.close()
        other.close()


def test_a_silence_from_before_the_restart_counts(rendezvous: Rendezvous) -> None:
    """The job takes longer to start again than a host that is lost is listened to."""
    first, other = (Survivors(replace(rendezvous, rank=rank), lambda: True) for rank in range(2))
    try:
        other.close()
        assert not _lost(first, 1, 2 * SILENCE_S) and not first.gone
        first.restarted()
        assert isinstance(first.lost(1), RankFailedError) and first.gone == {1}
        time.sleep(2 * SILENCE_S)  # the first was stopped, and has heard nobody meanwhile
        assert first.lost(1) is None
    finally:
        first.close()
        other.close()


def test_who_was_heard_before_the_restart_has_time_to_say_more(rendezvous: Rendezvous) -> None:
    first, other = (Survivors(replace(rendezvous, rank=rank), lambda: True) for rank in range(2))
    try:
        other.close()
        time.sleep(SILENCE_S)
        first.restarted()
        assert first.lost(1) is None
        assert _lost(first, 1, 10)
    finally:
        first.close()
