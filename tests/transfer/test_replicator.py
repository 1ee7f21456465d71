"""Two workers in one process copy each other's images, and agree on the saves that are replicated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.image_holder import KEY, copy_bytes, lay_out
from support.transport_contract import wait_for

from asyncckpt.errors import CheckpointError, RankFailedError, StorageError, WorkerDiedError
from asyncckpt.extension import Rendezvous, storage_for
from asyncckpt.format.write_request import CopiedRank, HeldImage, ImageKey, WriteRequest
from asyncckpt.link.api import Staged, TrainerApi
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.ranks.rounds import Rounds
from asyncckpt.shm.slots import State
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.copies import Incoming
from asyncckpt.transfer.replicator import Replicator
from asyncckpt.transfer.server import TransferServer
from asyncckpt.worker.saves import SavesOfTrainer

NBYTES = 4 << 20


@dataclass
class Worker:
    """The worker of ``rank``, without a trainer."""

    rank: int
    root: Path
    store: SegmentStore = field(default_factory=SegmentStore)
    told: dict[int, CheckpointError | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = lay_out(self.store, NBYTES, slots=3)
        self.server = TransferServer(self.store, (KEY,), "127.0.0.1")
        self.saves = SavesOfTrainer(storage_for, self.store, self._tell, lambda *_: None, 2)

    def join(self, port: int) -> None:
        """Join the other rank at the store of the first rank."""
        self.port = port
        rendezvous = Rendezvous("127.0.0.1", port, "token", KEY, self.rank, 2)
        self.saves.join(rendezvous, 10.0)
        self.replicator = Replicator(self.store, rendezvous, 10.0, "sockets", None, self._tell, self.saves.post)
        self.saves.replicator = self.replicator
        self.replicator.announce(TransferAddress("127.0.0.1", self.server.port))
        self.replicator.keep(0, [CopiedRank(1 - self.rank, copy_bytes(NBYTES))], [0])

    def _tell(self, method: Callable[..., None], *given: Any) -> None:
        if method is TrainerApi.replicated:
            save_id, failure = given
            self.told[save_id] = failure

    def _begin(self, save_id: int) -> WriteRequest:
        slot, path, name = save_id % 3, str(self.root / f"step-{save_id:08d}"), f"attempt {save_id}"
        self.store.hosted(self.number).slots.take(slot, save_id)
        request = WriteRequest(
            save_id,
            self.number,
            slot,
            path,
            name,
            save_id,
            self.rank,
            2,
            "refuse",
            None,
            False,
            20.0,
            is_copied=True,
            member=self.rank,
        )
        self.store.slot_taken(request)
        self.saves.begin(request)
        return request

    def stage(self, save_id: int) -> None:
        """Stage a save as the trainer does, in the next slot."""
        request = self._begin(save_id)
        self.store.hosted(self.number).slots.set(request.slot, State.STAGED)
        self.saves.staged(Staged(save_id, {}))

    def fail(self, save_id: int, error: CheckpointError) -> None:
        """Begin a save that fails before it is staged."""
        self._begin(save_id)
        self.saves.cancel(save_id, error)

    def replace(self, port: int) -> None:
        """Replace this worker, as after its death, by a new worker."""
        with mock.patch.object(Rounds, "gone_soon"):  # a dead worker cannot say goodbye
            self.close()
        self.store, self.told = SegmentStore(), {}
        self.__post_init__()
        self.join(port)

    def copies(self) -> set[int]:
        """Return the saves that this worker has copies of."""
        found = set()
        for save_id in range(1, 10):
            if (held := self.store.held(ImageKey(f"attempt {save_id}", 1 - self.rank))) is not None and held.is_copy:
                found.add(save_id)
        return found

    def close(self) -> None:
        self.saves.hurry()
        self.saves.stop_copying()
        self.saves.finish()
        assert self.saves.wait_written()
        self.saves.close("its trainer has died")
        self.server.close()
        self.store.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    found = [Worker(rank, tmp_path) for rank in range(2)]
    port = found[0].saves.host((0, 0), "127.0.0.1", KEY).port
    for each in found:
        each.join(port)
    yield found
    closing = [threading.Thread(target=each.close) for each in found]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(60)
    assert not any(thread.is_alive() for thread in closing)


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
    second.stage(3)  # the first rank's image of step 2 is still missing
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

    monkeypatch.setattr(second.replicator.copies, "begin", begin_late)  # the second rank's network is slow
    for each in workers:
        each.stage(2)
    wait_for(lambda: first.copies() == {1, 2})
    for each in workers:  # step 3 fails before it is staged
        each.fail(3, RankFailedError("its state could not be saved"))
    second.stage(4)
    _holds(lambda: first.copies() != {1, 2}, within=1.0)
    may_begin.set()
    wait_for(_are_told(workers, 2))
    assert [each.told[2] for each in workers] == [None, None]  # all hosts have copies, so one may be lost
    assert 2 in first.copies() and 2 in second.copies()


def test_what_failed_before_it_was_staged_holds_up_no_later_save(workers: list[Worker]) -> None:
    first, second = workers
    for each in workers:
        each.stage(1)
    wait_for(_are_told(workers, 1))
    second.stage(2)
    wait_for(lambda: first.copies() == {1, 2})
    # The first rank's disk is full, so its worker cannot write the save that is still being staged.
    first.fail(2, StorageError("no space left"))
    wait_for(_are_told(workers, 2))
    for each in workers:
        each.stage(4)
    wait_for(_are_told(workers, 4))
    assert [each.told[2] is None for each in workers] == [False, False]
    assert [each.told[4] for each in workers] == [None, None]


def test_what_a_dead_worker_had_copied_does_not_count(workers: list[Worker]) -> None:
    """The second worker dies after its report, while the first rank still copies. Its copies are lost."""
    first, second = workers
    may_begin, begin = threading.Event(), first.replicator.copies.begin

    def begin_late(held: HeldImage) -> Incoming:
        assert may_begin.wait(30)
        return begin(held)

    with mock.patch.object(first.replicator.copies, "begin", begin_late):
        for each in workers:
            each.stage(1)
        wait_for(lambda: second.copies() == {1})
        second.replace(first.port)
        second.stage(2)
        wait_for(lambda: 1 in first.told)
        assert isinstance(first.told[1], WorkerDiedError) and first.told[1].rank == 1
        may_begin.set()
    first.stage(2)
    wait_for(_are_told(workers, 2))
    assert [each.told[2] for each in workers] == [None, None]
