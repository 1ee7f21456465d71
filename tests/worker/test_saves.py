"""The saves of a worker: messages to the trainer, and a store that is slow, lost or attacked."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from support.attempts import checkpoint_image, request_for
from support.checkpoints import PAGE

from asyncckpt.errors import RankFailedError, SaveTimeoutError, StorageError
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.api import Committed, Failed, Rendezvous, Staged
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.protocol import commit
from asyncckpt.ranks import rounds as rounds_module
from asyncckpt.ranks.rounds import Rounds
from asyncckpt.ranks.store import Store
from asyncckpt.ranks.store_connection import Patience, StoreClient
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import State
from asyncckpt.storage import resolve, storage_for
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.partial import PartialFolder
from asyncckpt.worker import saves as saves_module
from asyncckpt.worker.saves import SavesOfTrainer


class Told:
    """The saves of one worker without a trainer, and their ends."""

    def __init__(self) -> None:
        self.ends: SimpleQueue[Any] = SimpleQueue()
        self.memory = SegmentStore()
        self.saves = SavesOfTrainer(storage_for, self.memory, lambda *_: None, self._end, 2)

    def _end(self, request: WriteRequest, outcome: Committed | Failed) -> None:
        self.ends.put((outcome, self.saves.unended()))

    def host(self, ranks: int) -> Rendezvous:
        """Host the store. Return the first rank's rendezvous."""
        port = self.saves.host((0, 0), "127.0.0.1", b"secret").port
        return Rendezvous("127.0.0.1", port, "token", b"secret", 0, ranks)

    def begin(self, request: WriteRequest) -> WriteRequest:
        """Begin a save of a hand-made image."""
        segment = Segment.create("test", 4 * PAGE)
        layout = checkpoint_image(segment)
        number = self.memory.adopt(segment)
        hosted = self.memory.hosted(number)
        hosted.layout = layout
        hosted.slots.take(0, request.save_id)
        request = replace(request, segment=number, member=request.rank)
        self.saves.begin(request)
        return request

    def stage(self, request: WriteRequest) -> None:
        self.memory.hosted(request.segment).slots.set(0, State.STAGED)
        self.saves.staged(Staged(request.save_id, {}))

    def fail(self, request: WriteRequest, text: str = "as the test wants") -> None:
        self.saves.cancel(request.save_id, StorageError(text))

    def outcome(self, timeout: float = 60.0) -> Committed | Failed:
        found: Committed | Failed = self.ends.get(timeout=timeout)[0]
        return found

    def error(self, timeout: float = 60.0) -> str:
        outcome = self.outcome(timeout)
        assert isinstance(outcome, Failed)
        return f"{type(outcome.error).__name__}: {outcome.error}"

    def close(self) -> None:
        self.saves.finish()
        assert self.saves.wait_written()
        self.saves.close("its trainer has died")
        self.memory.close()


@pytest.fixture
def told() -> Iterator[Callable[[], Told]]:
    made: list[Told] = []

    def make() -> Told:
        made.append(Told())
        return made[-1]

    yield make
    closing_at_once = [threading.Thread(target=each.close) for each in made]
    for thread in closing_at_once:
        thread.start()
    for thread in closing_at_once:
        thread.join(60)


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_whose_end_is_told_is_no_longer_being_written(tmp_path: Path, told: Any, fails: bool) -> None:
    """The user may run ``asyncckpt workers`` as soon as the trainer has the result."""
    worker = told()
    request = worker.begin(request_for(tmp_path))
    assert worker.saves.unended() == (request,)
    worker.fail(request) if fails else worker.stage(request)
    outcome, unended = worker.ends.get(timeout=60)
    assert isinstance(outcome, Failed if fails else Committed) and unended == ()


def test_a_store_that_answers_late_is_not_taken_for_gone(
    tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks, and the store takes two seconds to accept another connection."""
    store = Store(b"secret")
    first = Rendezvous("127.0.0.1", store.port, "token", b"secret", 0, 2)
    waits, broken, may_answer = threading.Event(), threading.Event(), threading.Event()
    real_wait, real_is_proved = StoreClient.wait, Store._is_proved

    def wait(self: StoreClient, key: str, count: int, timeout: float) -> object:
        if key.endswith("outcome") and not waits.is_set():
            waits.set()
            broken.set()
            threading.Timer(2.0, may_answer.set).start()
            raise ConnectionResetError
        return real_wait(self, key, count, timeout)

    def is_proved(self: Store, peer: Any) -> bool:
        return (not broken.is_set() or may_answer.wait(30)) and real_is_proved(self, peer)

    monkeypatch.setattr(StoreClient, "wait", wait)
    monkeypatch.setattr(Store, "_is_proved", is_proved)
    monkeypatch.setattr(rounds_module, "ANSWER_S", 60.0)
    worker = told()
    worker.saves.join(replace(first, rank=1), 30)
    with closing(store):
        worker.stage(worker.begin(replace(request_for(tmp_path), rank=1, world_size=2)))
        assert waits.wait(60)
        with closing(Rounds(first, 30)) as rounds:
            rounds.conclude("save-1", b"")
        assert isinstance(worker.outcome(), Committed)


def test_who_leaves_unheard_warns_of_nothing(
    told: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that cannot announce its exit does not warn, because the user would see it, and nothing is lost."""
    store, closed = Store(b"secret"), threading.Event()
    real_is_proved = Store._is_proved
    monkeypatch.setattr(Store, "_is_proved", lambda self, peer: closed.wait(30) and real_is_proved(self, peer))
    caplog.set_level(logging.INFO)
    with closing(store):
        with closing(Told()) as worker:
            worker.saves.join(Rendezvous("127.0.0.1", store.port, "token", b"secret", 1, 2), 30)
        closed.set()
    (said,) = (each for each in caplog.records if "leaving" in each.getMessage())
    assert said.levelno == logging.INFO


def test_a_slow_store_hears_that_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first rank waits for this rank until the commit timeout."""
    monkeypatch.setattr(saves_module, "ANSWER_S", 60.0)
    store, may_answer = Store(b"secret"), threading.Event()
    real_is_proved = Store._is_proved
    monkeypatch.setattr(Store, "_is_proved", lambda self, peer: may_answer.wait(30) and real_is_proved(self, peer))
    first = Rendezvous("127.0.0.1", store.port, "token", b"secret", 0, 2)
    with closing(store):
        with closing(Told()) as worker:
            worker.saves.join(replace(first, rank=1), 30)
            threading.Timer(2.0, may_answer.set).start()
        with closing(Rounds(first, 30)) as rounds:
            rounds.report("save-1", b"")
            with pytest.raises(RankFailedError, match="its trainer has died"):
                rounds.collect("save-1", 30)


def test_where_the_store_is_gone_a_worker_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker leaves at once even if it has a message to send and plenty of time."""
    monkeypatch.setattr(saves_module, "ANSWER_S", 100.0)
    store = Store(b"secret")
    store.close()
    with closing(Told()) as worker:
        worker.saves.join(Rendezvous("127.0.0.1", store.port, "token", b"secret", 1, 2), 30)
        worker.fail(worker.begin(replace(request_for(tmp_path), rank=1, world_size=2)))
        begun = time.monotonic()
    assert time.monotonic() - begun < 50


def test_who_cannot_learn_the_end_leaves_its_files(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files stay, because the first rank has seen all files, and is about to finalize them."""
    is_complete, may_go_on = threading.Event(), threading.Event()
    finalize: Any = PartialFolder.finalize

    def late(*arguments: Any) -> None:
        is_complete.set()
        assert may_go_on.wait(60)
        finalize(*arguments)

    def fails(*_: object) -> None:
        raise StorageError("as the test wants")

    monkeypatch.setattr(PartialFolder, "finalize", late)
    monkeypatch.setattr(LocalStorage, "revoke", fails)  # on the host of the other rank
    workers = [told(), told()]
    rendezvous = workers[0].host(2)
    for rank, worker in enumerate(workers):
        worker.saves.join(replace(rendezvous, rank=rank), 30)
        timeout = 1.0 if rank else 60.0
        worker.stage(worker.begin(replace(request_for(tmp_path), rank=rank, world_size=2, timeout=timeout)))
    assert is_complete.wait(60)
    assert "SaveTimeoutError" in workers[1].error()
    may_go_on.set()
    assert isinstance(workers[0].outcome(), Committed)
    assert list((tmp_path / "root" / "final").glob("__1_*"))


def test_a_save_ends_where_no_thread_can_be_started(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank is gone, and no thread can ask storage. The save fails on this rank, and later saves continue."""
    store, start = Store(b"secret"), threading.Thread.start
    store.close()

    def refuses(thread: threading.Thread) -> None:
        if thread.name == "asyncckpt-resolve":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    monkeypatch.setattr(saves_module, "PATIENCE_S", 0.0)
    worker = told()
    request = worker.begin(replace(request_for(tmp_path), rank=1, world_size=2))
    worker.stage(request)
    until = time.monotonic() + 30
    while worker.memory.hosted(request.segment).slots.state(0) is not State.FREE and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.5)  # by then the worker has reported
    worker.saves.join(Rendezvous("127.0.0.1", store.port, "token", b"secret", 1, 2), 30)
    assert "can't start new thread" in worker.error(20)
    worker.begin(replace(request, save_id=2, attempt="another"))
    assert "cannot be reached" in worker.error(20)


def test_the_lost_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three hosts are lost during a save. The first rank's worker fails the save, and leaves at once."""
    monkeypatch.setattr(saves_module, "NOTICE_S", 60.0)
    monkeypatch.setattr(commit, "silence", lambda _: 1.0)
    with closing(Told()) as worker:
        worker.saves.join(worker.host(3), 30)
        worker.stage(worker.begin(replace(request_for(tmp_path), world_size=3)))
        worker.saves.hurry()
        worker.saves.restarted()
        assert "have exited" in worker.error(30)
        begun = time.monotonic()
    assert time.monotonic() - begun < 20


def test_who_waits_for_an_outcome_is_heard(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All trainers are gone, and the job is restarted. A rank with a worker that still waits is not declared lost."""
    monkeypatch.setattr(commit, "silence", lambda _: 1.0)
    workers = [told(), told()]
    rendezvous = workers[0].host(2)
    requests = []
    for rank, worker in enumerate(workers):
        worker.saves.join(replace(rendezvous, rank=rank), 30)
        requests.append(worker.begin(replace(request_for(tmp_path), rank=rank, world_size=2)))
        worker.saves.hurry()
    workers[0].saves.restarted()
    with pytest.raises(Empty):
        workers[0].outcome(4)
    workers[1].fail(requests[1])
    assert all("as the test wants" in worker.error(30) for worker in workers)


def test_messages_of_strangers_fail_a_save(tmp_path: Path, told: Any) -> None:
    """An attacker in the network can make a save fail, and no more."""
    worker = told()
    rendezvous = worker.host(2)
    worker.saves.join(rendezvous, 30)
    worker.begin(replace(request_for(tmp_path), world_size=2))
    with closing(Rounds(replace(rendezvous, rank=1), 30)) as rounds:
        rounds.connection.call(lambda store: store.put("asyncckpt/token/save-1/reports", 1, b"forged"), 30, Patience(0))
        assert "was sent by no rank of it" in worker.error(30)
        rounds.leave()


def test_a_key_that_is_no_save_changes_nothing(tmp_path: Path, told: Any) -> None:
    """The worker keeps running."""
    worker = told()
    rendezvous = worker.host(2)
    worker.saves.join(rendezvous, 30)
    request = worker.begin(replace(request_for(tmp_path), world_size=2))
    with closing(Rounds(replace(rendezvous, rank=1), 30)) as rounds:
        for name in ("save-", "save-x", f"save-{'9' * 5000}", "save", "other-1"):
            key = f"asyncckpt/token/{name}/failure"
            rounds.connection.call(partial(StoreClient.put, key=key, field=0, value=b"anything"), 30, Patience(0))
        worker.fail(request)
        assert "as the test wants" in worker.error(30)
        rounds.leave()


def test_a_first_worker_that_is_started_again_is_waited_for(tmp_path: Path, told: Any) -> None:
    """This rank's save begins before the first rank has another worker."""
    store = Store(b"secret")
    store.close()
    first = Rendezvous("127.0.0.1", store.port, "token", b"secret", 0, 2)
    worker = told()
    worker.saves.join(replace(first, rank=1), 30)
    worker.stage(worker.begin(replace(request_for(tmp_path), rank=1, world_size=2)))
    with pytest.raises(Empty):
        worker.outcome(4)
    with closing(Store(b"secret", (store.port, store.port))), closing(Rounds(first, 30)) as rounds:
        rounds.conclude("save-1", b"")
        assert isinstance(worker.outcome(30), Committed)


@pytest.mark.parametrize("comes", [True, False], ids=["the reason comes late", "it never comes"])
def test_who_writes_what_another_rank_has_removed_says_why(
    tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """The first rank has failed the save, and its answer is still on the way."""
    create: Any = PartialFolder.create

    def removed(self: PartialFolder, *arguments: Any, **options: Any) -> Any:
        shutil.rmtree(self.path)
        threading.Timer(0.5, tell_why).start()
        return create(self, *arguments, **options)

    def tell_why() -> None:
        if comes:
            rounds.conclude_failed("save-1", StorageError("as the test wants"))

    monkeypatch.setattr(PartialFolder, "create", removed)
    with closing(Store(b"secret")) as store:
        first = Rendezvous("127.0.0.1", store.port, "token", b"secret", 0, 2)
        with closing(Rounds(first, 30)) as rounds:
            worker = told()
            worker.saves.join(replace(first, rank=1), 30)
            worker.stage(worker.begin(replace(request_for(tmp_path), rank=1, world_size=2)))
            why = "StorageError: as the test wants" if comes else "RankFailedError: the files of this save were removed"
            assert worker.error().startswith(why)


@pytest.fixture
def lost_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carry out the rename of a commit, and lose the answer."""
    finalize: Any = PartialFolder.finalize

    def lost(*arguments: Any) -> None:
        finalize(*arguments)
        raise StorageError("as the test wants")

    monkeypatch.setattr(PartialFolder, "finalize", lost)


@pytest.mark.usefixtures("lost_answer")
def test_a_commit_that_storage_did_is_done_whatever_it_answers(tmp_path: Path, told: Any) -> None:
    worker = told()
    worker.stage(worker.begin(request_for(tmp_path)))
    assert isinstance(worker.outcome(), Committed)
    assert (tmp_path / "root" / "final" / ".metadata").exists()


@pytest.mark.usefixtures("lost_answer")
def test_the_other_ranks_ask_storage_if_the_first_cannot(
    tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's storage fails after the commit."""

    def fails(request: WriteRequest, *arguments: Any) -> bool:
        if request.rank == 0:
            raise SaveTimeoutError("outcome of the save is not known (as the test wants)")
        return resolve(request, *arguments)

    monkeypatch.setattr(saves_module, "resolve", fails)
    workers = [told(), told()]
    rendezvous = workers[0].host(2)
    for rank, worker in enumerate(workers):
        worker.saves.join(replace(rendezvous, rank=rank), 30)
        worker.stage(worker.begin(replace(request_for(tmp_path), rank=rank, world_size=2)))
    assert "outcome of the save is not known" in workers[0].error()
    assert isinstance(workers[1].outcome(), Committed)
