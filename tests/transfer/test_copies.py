"""Copies of other hosts' images: the slot that a new copy overwrites, and the copies that stay."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.image_holder import IMAGE, copy_bytes, hold

from asyncckpt.errors import CheckpointError
from asyncckpt.format.write_request import CopiedRank, HeldImage
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.slots import Readers, lease
from asyncckpt.transfer.copies import Copies

NBYTES = 1 << 20


@pytest.fixture
def source() -> Iterator[SegmentStore]:
    store = SegmentStore()
    hold(store, NBYTES)
    yield store
    store.close()


@pytest.fixture
def store() -> Iterator[SegmentStore]:
    store = SegmentStore()
    yield store
    store.close()


def _copy(source: SegmentStore, copies: Copies, save_id: int) -> int:
    """Copy the image as the image of save ``save_id``. Return the slot."""
    found = source.held(IMAGE)
    assert found is not None
    held: HeldImage = replace(found, request=replace(found.request, save_id=save_id, attempt=f"attempt {save_id}"))
    incoming = copies.begin(held)
    memory = source.hosted(1).segment.view
    for region in held.layout.constants():
        incoming.memory[region.offset : region.offset + region.nbytes] = memory[region.offset :][: region.nbytes]
    begin, its = incoming.layout.slots[incoming.slot], held.layout.slots[0]
    incoming.memory[begin : begin + NBYTES] = memory[its : its + NBYTES]
    incoming.finish(b"", array("Q", held.checksums))
    return incoming.slot


def _kept(store: SegmentStore) -> set[str]:
    return {each.request.attempt for each in store.summaries(with_own=True)}


def test_the_last_that_all_have_stays(source: SegmentStore, store: SegmentStore) -> None:
    copies = Copies(store)
    copies.keep(0, [CopiedRank(0, copy_bytes(NBYTES))], [0])
    slots = [_copy(source, copies, 1), _copy(source, copies, 2)]
    assert sorted(slots) == [0, 1]
    copies.on_replicated(1)
    assert _copy(source, copies, 3) == slots[1] and _copy(source, copies, 4) == slots[1]  # repeatedly
    copies.on_replicated(4)
    assert _copy(source, copies, 5) == slots[0]
    copies.close()
    assert _kept(store) == {"attempt 4", "attempt 5"}


def test_what_is_read_stays(source: SegmentStore, store: SegmentStore) -> None:
    copies = Copies(store)
    copies.keep(0, [CopiedRank(0, copy_bytes(NBYTES))], [0])
    slots = [_copy(source, copies, 1), _copy(source, copies, 2)]
    copies.on_replicated(2)
    fd = lease(store.hosted(1).segment.fileno(), slots[0], Readers.OF_IMAGE)
    assert fd is not None
    with pytest.raises(CheckpointError, match="being read"):
        _copy(source, copies, 3)
    copies.close()
    fd.close()
    assert _kept(store) == {"attempt 1", "attempt 2"}


def test_of_what_was_taken_over_the_newest_stays(source: SegmentStore, store: SegmentStore) -> None:
    first = Copies(store)
    first.keep(0, [CopiedRank(0, copy_bytes(NBYTES))], [0])
    older, newer = _copy(source, first, 8), _copy(source, first, 9)
    first.close()
    held = store.held_images()
    assert held and all(each.is_copy for each in held)
    second = Copies(store)
    second.inherit(1, held)
    second.keep(0, [CopiedRank(0, copy_bytes(NBYTES))], [0])
    assert _copy(source, second, 1) == older and _copy(source, second, 2) == older
    second.on_replicated(2)
    assert _copy(source, second, 3) == newer
    second.close()


def test_other_structures_are_forgotten_and_others_refused(source: SegmentStore, store: SegmentStore) -> None:
    copies = Copies(store)
    with pytest.raises(CheckpointError, match="no memory was taken"):
        _copy(source, copies, 1)
    copies.keep(0, [CopiedRank(0, copy_bytes(NBYTES))], [0])
    _copy(source, copies, 1)
    copies.keep(7, [CopiedRank(0, copy_bytes(NBYTES))], [7])
    with pytest.raises(CheckpointError, match="no memory was taken"):
        _copy(source, copies, 2)
    copies.close()
    assert _kept(store) == set()
