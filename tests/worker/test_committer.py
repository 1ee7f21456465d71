"""The committer: what it says of a save, and when; and how it takes a store that is slow."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from support.attempts import checkpoint_attempt
from support.checkpoints import PAGE

from asyncckpt.errors import RankFailedError, SaveTimeoutError, StorageError
from asyncckpt.extension import Rendezvous, Rounds, Store
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.messages import Committed, Failed, Host
from asyncckpt.protocol import commit
from asyncckpt.ranks.store_connection import Patience, StoreClient
from asyncckpt.shm.segment import Segment
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.partial import PartialFolder
from asyncckpt.worker import committer as committer_module
from asyncckpt.worker.committer import Committer


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_whose_end_is_told_is_no_longer_being_written(tmp_path: Path, fails: bool) -> None:
    """Who has just been told may look at once, by ``asyncckpt workers``."""
    told: SimpleQueue[tuple[type, tuple[WriteRequest, ...]]] = SimpleQueue()
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment)
        with closing(Committer(lambda _, outcome: told.put((type(outcome), committer.unended())))) as committer:
            committer.expect(attempt.request)
            assert committer.unended() == (attempt.request,)
            attempt.write(pool)
            if fails:
                committer.failed(attempt.request, StorageError("as the test wants"), attempt)
            else:
                committer.written(attempt, attempt.seal())
        assert told.get(timeout=60) == (Failed if fails else Committed, ())


def test_a_store_that_answers_late_is_not_taken_for_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks, and the store takes a moment for another one."""
    store, told = Store(b"secret"), SimpleQueue[object]()
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
    assert committer_module._PROBE_S >= 5
    monkeypatch.setattr(committer_module, "_PROBE_S", 60.0)
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment)
        attempt.request = replace(attempt.request, rank=1, world_size=2)
        with closing(store), closing(Committer(lambda _, outcome: told.put(outcome))) as committer:
            committer.join(replace(first, rank=1), 30)
            committer.expect(attempt.request)
            attempt.write(pool)
            committer.written(attempt, attempt.seal())
            assert waits.wait(60)
            rounds = Rounds(first, 30)
            rounds.conclude("save-1", b"")
            rounds.close()
        assert isinstance(told.get(timeout=60), Committed)


def test_who_leaves_unheard_warns_of_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer would say it to its user, and nothing is lost."""
    store, closed = Store(b"secret"), threading.Event()
    real_is_proved = Store._is_proved
    monkeypatch.setattr(Store, "_is_proved", lambda self, peer: closed.wait(30) and real_is_proved(self, peer))
    caplog.set_level(logging.INFO)
    with closing(store):
        with closing(Committer(lambda *_: None)) as committer:
            committer.join(Rendezvous("127.0.0.1", store.port, "token", b"secret", 1, 2), 30)
        closed.set()
    (said,) = (each for each in caplog.records if "leaving" in each.getMessage())
    assert said.levelno == logging.INFO


def test_a_slow_store_hears_that_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first rank waits for this one until the time for a commit is up."""
    assert committer_module._TELL_S >= 5
    monkeypatch.setattr(committer_module, "_TELL_S", 60.0)
    store, may_answer = Store(b"secret"), threading.Event()
    real_is_proved = Store._is_proved
    monkeypatch.setattr(Store, "_is_proved", lambda self, peer: may_answer.wait(30) and real_is_proved(self, peer))
    first = Rendezvous("127.0.0.1", store.port, "token", b"secret", 0, 2)
    with closing(store):
        with closing(Committer(lambda *_: None)) as committer:
            committer.join(replace(first, rank=1), 30)
            threading.Timer(2.0, may_answer.set).start()
            committer.gone("its trainer has died")
        rounds = Rounds(first, 30)
        rounds.report("save-1", b"")
        with pytest.raises(RankFailedError, match="its trainer has died"):
            rounds.collect("save-1", 30)
        rounds.close()


def test_where_the_store_is_gone_a_worker_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with something to say, for which there was plenty of time."""
    monkeypatch.setattr(committer_module, "_TELL_S", 100.0)
    store = Store(b"secret")
    store.close()
    request = WriteRequest(1, 1, 0, str(tmp_path / "final"), "a-1", 1, 1, 2, "refuse", None, False, 300.0)
    with closing(Committer(lambda *_: None)) as committer:
        committer.join(Rendezvous("127.0.0.1", store.port, "token", b"secret", 1, 2), 30)
        committer.expect(request)
        committer.failed(request, StorageError("as the test wants"))
        committer.gone("its trainer has died")
        begun = time.monotonic()
    assert time.monotonic() - begun < 50


def test_who_cannot_learn_the_end_leaves_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has seen all files, and is about to finalize them."""
    told = [SimpleQueue[object](), SimpleQueue[object]()]
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
    with ThreadPoolExecutor(2) as pool, Segment.create("0", 4 * PAGE) as first, Segment.create("1", 4 * PAGE) as second:
        committers = [Committer(lambda request, outcome: told[request.rank].put(outcome)) for _ in told]
        with closing(committers[0]), closing(committers[1]):
            port = committers[0].host(Host(0, "127.0.0.1", b"secret")).port
            for rank, segment in enumerate((first, second)):
                attempt = checkpoint_attempt(tmp_path, segment)
                timeout = 1.0 if rank else 60.0
                attempt.request = replace(attempt.request, rank=rank, world_size=2, timeout=timeout)
                committers[rank].join(Rendezvous("127.0.0.1", port, "token", b"secret", rank, 2), 30)
                committers[rank].expect(attempt.request)
                attempt.write(pool)
                committers[rank].written(attempt, attempt.seal())
            assert is_complete.wait(60)
            failed = told[1].get(timeout=60)
            assert isinstance(failed, Failed) and isinstance(failed.error, SaveTimeoutError)
            may_go_on.set()
            assert isinstance(told[0].get(timeout=60), Committed)
    assert list((tmp_path / "root" / "final").glob("__1_*"))


def test_a_save_ends_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank is gone, and nobody can ask storage: so is the save for this rank, and what follows goes on."""
    store, told, start = Store(b"secret"), SimpleQueue[Any](), threading.Thread.start
    store.close()

    def refuses(thread: threading.Thread) -> None:
        if thread.name == "asyncckpt-resolve":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    monkeypatch.setattr(committer_module, "_PATIENCE_S", 0.0)
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment)
        attempt.request = replace(attempt.request, rank=1, world_size=2)
        with closing(Committer(lambda _, outcome: told.put(outcome))) as committer:
            committer.expect(attempt.request)
            attempt.write(pool)
            committer.written(attempt, attempt.seal())
            committer.join(Rendezvous("127.0.0.1", store.port, "token", b"secret", 1, 2), 30)
            failed = told.get(timeout=20)
            assert isinstance(failed, Failed) and "can't start new thread" in str(failed.error)
            committer.expect(replace(attempt.request, save_id=2))
            failed = told.get(timeout=20)
            assert isinstance(failed, Failed) and "cannot be reached" in str(failed.error)


def test_the_lost_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three hosts are lost with a save open: the first rank's worker fails that, and leaves at once."""
    monkeypatch.setattr(committer_module, "_LEAVE_S", 60.0)
    monkeypatch.setattr(commit, "SILENCE_S", 1.0)
    told = SimpleQueue[object]()
    with closing(Committer(lambda _, outcome: told.put(outcome))) as committer:
        port = committer.host(Host(0, "127.0.0.1", b"secret")).port
        committer.join(Rendezvous("127.0.0.1", port, "token", b"secret", 0, 3), 30)
        committer.expect(WriteRequest(1, 1, 0, str(tmp_path / "x"), "a-1", 1, 0, 3, "refuse", None, False, 300.0))
        committer.hurry()
        committer.restarted()
        outcome = told.get(timeout=30)
        assert isinstance(outcome, Failed) and "are gone" in str(outcome.error)
        begun = time.monotonic()
    assert time.monotonic() - begun < 20


def test_who_waits_for_an_outcome_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers are gone and the job is started again: a rank whose worker still waits is not given up."""
    monkeypatch.setattr(commit, "SILENCE_S", 1.0)
    told = SimpleQueue[object]()
    request = WriteRequest(1, 1, 0, str(tmp_path / "x"), "a-1", 1, 0, 2, "refuse", None, False, 300.0)
    first, other = (Committer(lambda _, outcome: told.put(outcome)) for _ in range(2))
    with closing(first), closing(other):
        port = first.host(Host(0, "127.0.0.1", b"secret")).port
        for rank, committer in enumerate((first, other)):
            committer.join(Rendezvous("127.0.0.1", port, "token", b"secret", rank, 2), 30)
            committer.expect(replace(request, rank=rank))
            committer.hurry()
        first.restarted()
        with pytest.raises(Empty):
            told.get(timeout=4)
        other.failed(replace(request, rank=1), StorageError("as the test wants"))
        for _ in range(2):
            outcome = told.get(timeout=30)
            assert isinstance(outcome, Failed) and "as the test wants" in str(outcome.error)


def test_messages_of_strangers_fail_a_save(tmp_path: Path) -> None:
    """Who can change what is sent in the network can make a save fail, and no more."""
    told = SimpleQueue[object]()
    with closing(Committer(lambda _, outcome: told.put(outcome))) as committer:
        port = committer.host(Host(0, "127.0.0.1", b"secret")).port
        rendezvous = Rendezvous("127.0.0.1", port, "token", b"secret", 0, 2)
        committer.join(rendezvous, 30)
        committer.expect(WriteRequest(1, 1, 0, str(tmp_path / "x"), "a-1", 1, 0, 2, "refuse", None, False, 300.0))
        rounds = Rounds(replace(rendezvous, rank=1), 30)
        rounds.connection.call(lambda store: store.put("asyncckpt/token/save-1/reports", 1, b"forged"), 30, Patience(0))
        outcome = told.get(timeout=30)
        assert isinstance(outcome, Failed) and "comes from none of them" in str(outcome.error)
        rounds.leave()
        rounds.close()
