"""Test which slot of a staging buffer is claimed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from asyncckpt.staging.buffer import StagingBuffer


def test_the_last_step_that_other_hosts_have_stays_while_storage_fails() -> None:
    """The last replicated step stays, because a lost host would take its part of a newer step along."""
    buffer: Any = object.__new__(StagingBuffer)
    buffer._owned = SimpleNamespace(claim_first=lambda slots: next(iter(slots), None))
    buffer._memory = SimpleNamespace(taken=2, is_too_much=False, is_coming=False)
    buffer.client = SimpleNamespace(saves=SimpleNamespace(is_free=lambda save: True))

    def save(number: int, *, durable: bool, replicated: bool) -> Any:
        return SimpleNamespace(number=number, is_durable=durable, is_replicated=replicated)

    for older, newer, expected in (
        (save(1, durable=False, replicated=True), save(2, durable=False, replicated=False), 1),
        (save(1, durable=False, replicated=True), save(2, durable=True, replicated=False), 0),
        (save(1, durable=False, replicated=True), save(2, durable=False, replicated=True), 0),
        (save(1, durable=True, replicated=True), save(2, durable=False, replicated=False), 0),
        (save(1, durable=False, replicated=False), save(2, durable=False, replicated=False), 0),
    ):
        buffer.saves, buffer._by_age = [older, newer], [0, 1]
        assert buffer.claim_slot() == expected
    buffer.saves, buffer._by_age = [save(1, durable=False, replicated=True)], [0]
    assert buffer.claim_slot() == 0  # there is no other slot


def test_what_is_published_stays_while_the_memory_of_another_is_coming() -> None:
    """Readers find a version while the next one is staged."""
    buffer: Any = object.__new__(StagingBuffer)
    buffer._owned = SimpleNamespace(
        claim_first=lambda slots: next(iter(slots), None), publications=lambda: {"a version": 0}
    )
    buffer._memory = SimpleNamespace(taken=1, is_too_much=False, is_coming=True)
    buffer.saves, buffer._by_age = [None, None], [0, 1]
    assert buffer.claim_slot() is None
    buffer._memory.is_coming = False  # the memory was refused
    assert buffer.claim_slot() == 0
    buffer._memory.taken = 2
    buffer._by_age = [1, 0]
    assert buffer.claim_slot() == 1
