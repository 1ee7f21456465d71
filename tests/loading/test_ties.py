"""Loads into tensors that share memory give whole values, whether or not the stored tensors were tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt import Checkpointer
from asyncckpt.loading import read_requests
from asyncckpt.shm.memcpy import Destinations

ELEMENTS = 6 << 20


@pytest.mark.parametrize("parts", ["whole", "in part"])
def test_what_was_not_tied_when_it_was_saved_is_loaded_whole(root: Path, parts: str) -> None:
    stored = {"a": torch.full((ELEMENTS,), 1.0), "b": torch.full((ELEMENTS,), 2.0), "c": torch.zeros(5)}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, stored).result(60)
        memory = torch.zeros(ELEMENTS + 1000)
        into = {"a": memory[:ELEMENTS], "b": memory[:ELEMENTS] if parts == "whole" else memory[1000:]}
        for _ in range(12):
            memory.zero_()
            checkpointer.load(into)
            both = memory[1000:ELEMENTS]
            assert both.min() == both.max() != 0


def test_what_is_tied_in_both_places_is_read_by_many_threads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = torch.randn(ELEMENTS)
    found = []
    real = read_requests.ReadRequests._destinations

    def watched(*args: Any) -> Destinations:
        found.append(destinations := real(*args))
        return destinations

    monkeypatch.setattr(read_requests.ReadRequests, "_destinations", watched)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"embedding": embedding, "head": embedding}).result(60)
        into = torch.zeros(ELEMENTS)
        checkpointer.load({"embedding": into, "head": into})
    assert torch.equal(into, embedding)
    assert [destinations.tied for destinations in found] == [False]
