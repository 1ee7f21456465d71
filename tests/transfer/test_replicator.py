"""Which steps are said to be replicated, and what is kept until that is known: two workers in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from support.image_holder import KEY, copy_bytes, lay_out, stage
from support.transport_contract import wait_for

from asyncckpt.errors import CheckpointError, RankFailedError, StorageError
from asyncckpt.extension import Rendezvous, Store
from asyncckpt.format.write_request import CopiedRank, HeldImage, ImageKey
from asyncckpt.link.messages import Replicated
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.transfer.copies import Incoming
from asyncckpt.transfer.replicator import Replicator
from asyncckpt.transfer.requests import TransferAddress
from asyncckpt.transfer.server import TransferServer

NBYTES = 4 << 20


@dataclass
class Worker:
    """The worker of ``rank``, as far as copies need one."""

    rank: int
    rendezvous: Rendezvous
    store: SegmentStore = field(default_factory=SegmentStore)
    told: dict[int, CheckpointError | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = lay_out(self.store, NBYTES, slots=3)
        self.server = TransferServer(self.store, (KEY,), "127.0.0.1")
        self.replicator = Replicator(self.store, self.rendezvous, 10.0, "sockets", None, self._tell)
        self.replicator.announce(TransferAddress("127.0.0.1", self.server.port))
        self.replicator.keep(0, [CopiedRank(1 - self.rank, copy_bytes(NBYTES))], [0])

    def _tell(self, replicated: Replicated) -> None:
        self.told[replicated.save_id] = replicated.failure

    def stage(self, save_id: int) -> None:
        """Its trainer has staged a save, in the slot after that of the one before."""
        key = ImageKey(f"attempt {save_id}", self.rank)
        self.replicator.expect(stage(self.store, self.number, save_id % 3, save_id, key))

    def copies(self) -> set[int]:
        """The saves that it has copies of."""
        found = set()
        for save_id in range(1, 10):
            if (held := self.store.held(ImageKey(f"attempt {save_id}", 1 - self.rank))) is not None and held.is_copy:
                found.add(save_id)
        return found

    def close(self) -> None:
        self.replicator.close()
        self.server.close()
        self.store.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    store = Store(KEY)
    found = [Worker(rank, Rendezvous("127.0.0.1", store.port, "token", KEY, rank, 2)) for rank in range(2)]
    yield found
    for each in found:
        each.close()
    store.close()


def _are_told(workers: list[Worker], save_id: int) -> Callable[[], bool]:
    return lambda: all(save_id in each.told for each in workers)


def _holds(condition: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_step_is_replicated_when_all_have_copies(workers: list[Worker]) -> None:
    for each in workers:
        each.stage(1)
    wait_for(_are_told(workers, 1))
    assert [each.told for each in workers] == [{1: None}] * 2
    assert [each.copies() for each in workers] == [{1}] * 2


def test_a_copy_stays_until_it_is_known_what_it_is_good_for(workers: list[Worker]) -> None:
    first, second = workers
    for each in workers:
        each.stage(1)
    wait_for(_are_told(workers, 1))
    second.stage(2)
    wait_for(lambda: first.copies() == {1, 2})
    second.stage(3)  # the first one's image of step 2 is still to come
    assert not _holds(lambda: first.copies() != {1, 2}, within=1.0) and first.told.keys() == {1}
    first.stage(2)
    wait_for(_are_told(workers, 2))
    assert [each.told[2] for each in workers] == [None, None]
    wait_for(lambda: first.copies() == {2, 3})
    first.stage(3)
    wait_for(_are_told(workers, 3))
    assert [each.told[3] for each in workers] == [None, None]


def test_a_copy_stays_though_a_later_save_has_failed(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = workers
    for each in workers:
        each.stage(1)
    wait_for(_are_told(workers, 1))
    may_begin, begin = threading.Event(), second.replicator.copies.begin

    def begin_late(held: HeldImage) -> Incoming:
        assert may_begin.wait(10)
        return begin(held)

    monkeypatch.setattr(second.replicator.copies, "begin", begin_late)  # its network is slow
    for each in workers:
        each.stage(2)
    wait_for(lambda: first.copies() == {1, 2})
    for each in workers:  # step 3 fails before it is staged
        held = each.store.held(ImageKey("attempt 2", each.rank))
        assert held is not None
        each.replicator.on_failed(replace(held.request, save_id=3), RankFailedError("its state could not be saved"))
    second.stage(4)
    _holds(lambda: first.copies() != {1, 2}, within=1.0)
    may_begin.set()
    wait_for(_are_told(workers, 2))
    assert [each.told[2] for each in workers] == [None, None]  # so a host may be lost: all have copies of it
    assert 2 in first.copies() and 2 in second.copies()


def test_what_failed_before_it_was_staged_holds_up_no_later_save(workers: list[Worker]) -> None:
    first, second = workers
    for each in workers:
        each.stage(1)
    wait_for(_are_told(workers, 1))
    second.stage(2)
    wait_for(lambda: first.copies() == {1, 2})
    # The disk of the first rank is full: it cannot write what its trainer is still staging.
    held = first.store.held(ImageKey("attempt 1", 0))
    assert held is not None
    first.replicator.on_failed(replace(held.request, save_id=2), StorageError("no space left"))
    wait_for(_are_told(workers, 2))
    for number in (2, 4):
        first.stage(number)
    second.stage(4)
    wait_for(_are_told(workers, 4))
    assert [each.told[2] is None for each in workers] == [False, False]
    assert [each.told[4] for each in workers] == [None, None]
