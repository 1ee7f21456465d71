"""The worker at an endpoint: its answers, and whether its trainer is alive."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.attempts import checkpoint_attempt
from support.checkpoints import PAGE

from asyncckpt.errors import JobTakenError, SaveTimeoutError
from asyncckpt.format.write_request import ImageKey
from asyncckpt.link import endpoint as endpoint_module
from asyncckpt.link import takeover
from asyncckpt.link.api import Inventory, TrainerAlive, WorkerStatus
from asyncckpt.link.calls import Answer
from asyncckpt.link.endpoint import Endpoint, connect, endpoint_name
from asyncckpt.link.process import WorkerOptions
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.link.takeover import ReaderClient, Takeover, retire_idle_workers
from asyncckpt.shm.segment import Segment
from asyncckpt.transfer.serving import Serving
from asyncckpt.worker.endpoint_service import EndpointService, Trainer


@contextlib.contextmanager
def answering(trainer: int, answer: Callable[[SocketConnection], None]) -> Iterator[str]:
    """Yield the name of an endpoint with this trainer and this answer."""
    endpoint = Endpoint(name := endpoint_name("job", 0), trainer)
    endpoint.listen(answer)
    try:
        yield name
    finally:
        endpoint.close()


def _show_nothing(connection: SocketConnection) -> None:
    """Answer the calls ``inspect`` and ``segments`` of ``Takeover.find``."""
    for result in (Inventory(os.getpid(), 1, (), (), ()), None):
        number, *_ = connection.receive()
        connection.send(Answer(number, result).sent())


def test_one_that_is_too_busy_to_notice_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is dead, so the new trainer waits until the busy worker notices."""
    monkeypatch.setattr(takeover, "NOTICE_S", 0.0)
    with subprocess.Popen(["true"]) as trainer:
        pass
    answers = iter([TrainerAlive(os.getpid(), trainer.pid)] * 3)

    def answer(connection: SocketConnection) -> None:
        for _ in range(2):  # inspect, segments
            number, *_ = connection.receive()
            connection.send(Answer(number, next(answers, None) or Inventory(os.getpid(), 1, (), (), ())).sent())

    with answering(trainer.pid, answer) as name:
        found = Takeover.find(name, 30)
        assert found is not None and next(answers, None) is None
        found.close()


@pytest.mark.parametrize("has_trainer", [False, True])
def test_nor_does_it_keep_memory_that_another_needs(monkeypatch: pytest.MonkeyPatch, has_trainer: bool) -> None:
    """A worker is asked until it notices its trainer's death. A worker with a live trainer is asked only once."""
    monkeypatch.setattr(takeover, "NOTICE_S", 60.0)
    with subprocess.Popen(["true"]) as dead:
        pass
    trainer = os.getpid() if has_trainer else dead.pid
    answers = iter([TrainerAlive(os.getpid(), trainer)] * 3)
    asked: list[str] = []

    def answer(connection: SocketConnection) -> None:
        while True:
            number, method, *_ = connection.receive()
            asked.append(method)
            if method != "inspect":
                return
            connection.send(Answer(number, next(answers, None) or Inventory(os.getpid(), 1, (), (), ())).sent())

    with answering(trainer, answer):
        assert retire_idle_workers(30) is not has_trainer
    assert asked == ["inspect"] * (1 if has_trainer else 4) + ["retire"] * (not has_trainer)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["it takes its time", "it is stopped"])
def test_checksums_are_waited_for_as_long_as_it_answers(is_stopped: bool) -> None:
    """The checksums of an image may take minutes."""
    may_end = threading.Event()

    def answer(connection: SocketConnection) -> None:
        if is_stopped:
            may_end.wait(30)
            return
        number, method, *_ = connection.receive()
        if method == "status":
            connection.send(Answer(number, WorkerStatus(os.getpid(), False, (), None, False)).sent())
        else:
            may_end.wait(1)
            connection.send(Answer(number, None).sent())

    with answering(os.getpid(), answer) as name:
        client = ReaderClient.connect(name)
        assert client is not None
        client.timeout = 0.3
        begun = time.monotonic()
        with pytest.raises(SaveTimeoutError) if is_stopped else contextlib.nullcontext():
            assert client.image(ImageKey("attempt", 0)) is None
        assert time.monotonic() - begun < 10
        may_end.set()
        client.close()


def test_nobody_is_killed_by_a_process_id_of_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a worker in another container the kernel returns process id 0.

    A signal to 0 would kill the own process group.
    """
    killed: list[int] = []
    may_end = threading.Event()

    def answer(connection: SocketConnection) -> None:
        _show_nothing(connection)
        may_end.wait(60)

    monkeypatch.setattr(takeover, "NOTICE_S", 0.1)
    with answering(os.getpid(), answer) as name:
        found = Takeover.find(name, 30)
        assert found is not None
        with found, monkeypatch.context() as patch:
            patch.setattr(takeover, "peer_pid", lambda _: 0)
            patch.setattr(os, "kill", lambda pid, _: killed.append(pid))
            with pytest.raises(SaveTimeoutError, match="cannot be killed"):
                found.retire(0.1)
        may_end.set()
    assert not killed


@pytest.mark.parametrize("is_closed_in_order", [False, True])
def test_what_other_ranks_save_too_is_waited_for_where_all_have_closed(
    tmp_path: Path, is_closed_in_order: bool
) -> None:
    """If the trainer has not closed in order, another rank may be lost, and the save is not waited for."""
    with Segment.create("test", 4 * PAGE) as segment:
        request = replace(checkpoint_attempt(tmp_path, segment).request, world_size=2)
    store = SegmentStore()
    service = EndpointService(name := endpoint_name("job", 0), "", 60, store, Serving(store))
    ours, theirs = map(SocketConnection, socket.socketpair())
    service.begin_session(Trainer(ours, os.getpid(), WorkerOptions()), lambda: (request,), lambda: None)
    service.trainer_gone(closed=is_closed_in_order)
    with ours, theirs, contextlib.closing(store), contextlib.closing(service):
        service.open(os.getpid())
        found = Takeover.find(name, 30)
        assert found is not None
        with found:
            assert found._not_held == ({request.path} if is_closed_in_order else set())


@pytest.mark.parametrize(
    "message", [None, 7, {}, (1, "attach"), (1, "attach", (1,), {}), (0, "retire", (1,), {}), b"\x80"], ids=repr
)
def test_a_message_of_another_version_ends_its_connection_alone(message: object) -> None:
    """An error on a thread of the worker would end the worker."""
    errors: list[object] = []
    store, real = SegmentStore(), threading.excepthook
    service = EndpointService(name := endpoint_name("job", 0), "", 60, store, Serving(store))
    threading.excepthook = errors.append
    try:
        with contextlib.closing(store), contextlib.closing(service):
            service.open(0)
            connection = connect(name)
            assert connection is not None
            with connection:
                if isinstance(message, bytes):
                    connection.send_bytes(message)
                else:
                    connection.send(message)
                assert connection.poll(10)
                with pytest.raises((EOFError, OSError)):
                    connection.receive()
            reader = ReaderClient.connect(name)
            assert reader is not None and reader.images().images == ()
            reader.close()
    finally:
        threading.excepthook = real
    assert not errors


def test_one_that_could_start_no_thread_can_be_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the container has reached its limit of processes for a moment."""
    start, refused = threading.Thread.start, threading.Event()

    def refuses(thread: threading.Thread) -> None:
        if thread.name == "asyncckpt-answer" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def answer(connection: SocketConnection) -> None:
        _show_nothing(connection)
        connection.receive()

    with answering(os.getpid(), answer) as name:
        monkeypatch.setattr(threading.Thread, "start", refuses)
        found = Takeover.find(name, 10)
        assert found is not None and refused.is_set()
        found.close()


def test_one_that_is_stopped_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stopped worker's queue of connections is full, and the worker may hold the newest image."""
    monkeypatch.setattr(endpoint_module, "_BACKLOG", 1)
    monkeypatch.setattr(endpoint_module, "ANSWER_S", 0.2)
    endpoint = Endpoint(name := endpoint_name("job", 0), os.getpid())
    try:
        while (connection := connect(name)) is not None:
            connection.close()
        with pytest.raises(SaveTimeoutError, match="it may be stopped"):
            Takeover.find(name, 1)
    finally:
        endpoint.close()


def test_a_worker_of_another_version_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has a class that does not exist in this version. The worker is asked to exit, and stays."""
    monkeypatch.setattr(takeover, "NOTICE_S", 0.1)
    asked = threading.Event()

    def answer(connection: SocketConnection) -> None:
        connection.receive()
        connection.send_bytes(b"casyncckpt.link.api\nGone\n.")
        connection.receive()
        asked.set()

    with answering(os.getpid(), answer) as name, pytest.raises(JobTakenError, match="of another version"):
        Takeover.find(name, 10)
    assert asked.is_set()
