"""The search for images asks all workers on a host."""

from __future__ import annotations

import threading

import pytest

from asyncckpt.errors import SaveTimeoutError
from asyncckpt.link.takeover import ReaderClient
from asyncckpt.loading import memory_source as memory_search
from asyncckpt.ranks.ranks import OneRank


def test_workers_are_asked_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped worker answers only by its timeout, so all workers are asked at the same time."""
    all_asked = threading.Barrier(12)

    def connect(endpoint: str) -> None:
        all_asked.wait(10)
        raise SaveTimeoutError(endpoint)

    monkeypatch.setattr(memory_search, "endpoint_names", lambda job: [f"{job}-{number}" for number in range(12)])
    monkeypatch.setattr(ReaderClient, "connect", connect)
    assert memory_search.find_images("job", None, None, OneRank()).places == ()
    assert not all_asked.broken
