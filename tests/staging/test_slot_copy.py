"""Test copies of host tensors into a slot: they are exact, and the worker hears when it may begin to write."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from support.checkpoints import PAGE
from support.images import Slot, refill, tensors_of_all_kinds

from asyncckpt.planning import forms
from asyncckpt.staging import host_copy
from asyncckpt.staging.host_copy import CopyThreads
from asyncckpt.staging.slot_copy import SlotStager


@pytest.mark.parametrize("threads_used", [1, 2])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_is_told_is_there(monkeypatch: pytest.MonkeyPatch, is_compiled: bool, threads_used: int) -> None:
    """Every reported byte is in the slot. The last report covers all bytes."""
    monkeypatch.setattr(host_copy, "_THREADS", threads_used)
    if not is_compiled:
        monkeypatch.setattr(forms, "_exchange", lambda: None)
    tensors = [*tensors_of_all_kinds(), *(torch.randn(500, 700) for _ in range(40))]
    slot = Slot(tensors)
    stager = SlotStager(slot.layout, slot.segment, PAGE)
    told: list[int] = []
    try:
        with closing(CopyThreads(2, "test-copy")) as threads:
            for _ in range(3):
                expected, begun = slot.expected(tensors), len(told)

                def arrived(nbytes: int, expected: bytes = expected) -> None:
                    assert bytes(slot.segment.view[PAGE : PAGE + nbytes]) == expected[:nbytes]
                    told.append(nbytes)

                stager.copy(tensors, {}, threads, arrived, lambda _: None)
                assert slot.image_bytes() == expected and told[-1] == slot.layout.nbytes
                assert threads_used > 1 or len(set(told[begun:])) > 3
                refill(tensors)
    finally:
        stager.close()
        slot.segment.close()
