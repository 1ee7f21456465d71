"""Test that one worker serves one trainer after another. Each session begins where the previous one ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.checkpoints import complete_steps
from support.ranks import alone, say
from support.recovery import empty, has_left, is_of, source, train
from support.workers import Faulty, wait_for

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import JobTakenError, WorkerDiedError
from asyncckpt.link import process as worker_process
from asyncckpt.link import takeover
from asyncckpt.link.api import WorkerApi
from asyncckpt.link.calls import call_of
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.process import Surroundings, WorkerOptions
from asyncckpt.link.takeover import Takeover, is_running
from asyncckpt.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("forkserver")

LIMIT_S = 60.0
CONFIG = Config(linger=600.0)


def _worker(checkpointer: Checkpointer) -> psutil.Process:
    worker = checkpointer._engine.worker
    assert worker is not None
    return psutil.Process(worker.pid)


def _go_on(root: str, config: Config) -> None:
    """Load from memory, save the next step, and die."""
    with Checkpointer(root, config) as checkpointer:
        state = empty()
        step = checkpointer.load(state) if checkpointer.latest() is not None else 0
        if step:
            assert is_of(state, step) and source(checkpointer) == "memory"
        state["w"].fill_(step + 1)
        state["step"] = step + 1
        checkpointer.save(step + 1, state).result(LIMIT_S)
        say(_used(_worker(checkpointer)))
        os.kill(os.getpid(), signal.SIGKILL)


def _used(worker: psutil.Process) -> tuple[int, ...]:
    """Return the process ID of an idle worker, and its numbers of descriptors, threads and segments."""
    seen = []
    for _ in range(20):  # the previous session may still be ending, and an upload may be running
        time.sleep(0.05)
        seen.append((worker.pid, worker.num_fds(), worker.num_threads(), _shared(worker)))
    return tuple(map(min, zip(*seen, strict=True)))


def _shared(worker: psutil.Process) -> int:
    """Return the number of the worker's segments."""
    found = 0
    for each in Path(f"/proc/{worker.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # already closed
            found += os.readlink(each).startswith("/memfd:asyncckpt ")
    return found


@pytest.mark.parametrize("has_local", [False, True])
def test_many_sessions_leave_nothing_behind(root: Path, tmp_path: Path, has_local: bool) -> None:
    """The worker keeps the same number of threads, descriptors and segments."""
    config = Config(linger=600.0, local_root=str(tmp_path / "local")) if has_local else CONFIG
    seen: list[tuple[int, ...]] = []
    for _ in range(5):
        code, said = alone(_go_on, str(root), config)
        assert code == -signal.SIGKILL
        seen.append(said)
    assert len({pid for pid, *_ in seen}) == 1
    assert all(last <= second + 1 for last, second in zip(seen[-1], seen[1], strict=True)), seen
    with Checkpointer(root, config) as checkpointer:
        assert checkpointer.load(state := empty()) == 5 and is_of(state, 5)


@pytest.mark.parametrize("what", ["transport", "code"])
def test_a_worker_that_was_started_otherwise_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, what: str, faulty_worker: Faulty
) -> None:
    """The old worker leaves, but its image is still loaded."""
    old = train(root, 2, linger=600.0)
    if what == "transport":
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    else:
        faulty_worker("write:warn:999")
    with Checkpointer(root, CONFIG) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and source(checkpointer) == "memory"
        state["w"].fill_(3)
        state["step"] = 3
        checkpointer.save(3, state).result(LIMIT_S)
        assert old is not None and _worker(checkpointer).pid != old.pid
        assert has_left(old)
        assert checkpointer.load(state := empty(), memory=False) == 3 and is_of(state, 3)


def test_one_that_has_only_looked_does_not_end_the_worker_of_another(root: Path) -> None:
    """Another trainer has attached meanwhile, so no request of the first trainer ends the worker."""
    train(root, 2)
    name = endpoint_name(f"{os.path.realpath(root)}\n", 0)
    looked = [Takeover.find(name, 30) for _ in range(3)]
    with Checkpointer(root, CONFIG) as checkpointer:
        assert checkpointer.load(state := empty()) == 2
        checkpointer.save(3, state).result(LIMIT_S)
        worker = _worker(checkpointer)
        same, other, retiring = looked
        assert same is not None and other is not None and retiring is not None
        assert same.attach(WorkerOptions(endpoint=name, linger=600.0), 30) is None
        assert other.attach(WorkerOptions(endpoint=name, linger=1.0), 30) is None
        retiring.retire(30)
        assert alone(_save_beside, str(root))[0] == 0
        checkpointer.save(4, state).result(LIMIT_S)
        assert _worker(checkpointer).pid == worker.pid
    for each in (same, other, retiring):
        each.close()


def _save_beside(root: str) -> None:
    with Checkpointer(root, Config(linger=600.0, io_threads=3)) as checkpointer, pytest.raises(JobTakenError):
        checkpointer.save(4, empty())


def _attach_and_die(worker: psutil.Process, name: str) -> None:
    """Ask for a session and close at once, like a trainer that is killed while it attaches."""
    found = Takeover.find(name, 30)
    assert found is not None
    fingerprint = json.loads(worker.cmdline()[-1])["fingerprint"]
    its = {"linger": 600.0}, {"environment": {}, "modules": sys.path}
    found._connection.send(call_of(1, WorkerApi.attach, fingerprint, found._session, *its))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found._connection.send_descriptor(ours.fileno())
    found.close()


def test_one_that_is_killed_while_it_waits_keeps_nobody_out(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty_worker: Faulty
) -> None:
    """The worker still writes for the previous trainer."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    worker = train(root, 1, "staged", "write:hold")
    assert worker is not None
    for _ in range(2):
        _attach_and_die(worker, endpoint_name(f"{os.path.realpath(root)}\n", 0))
    faulty_worker("write:hold")  # the worker's command must be the same
    with Checkpointer(root, CONFIG) as checkpointer:
        assert checkpointer.load(state := empty()) == 1 and source(checkpointer) == "memory"
        opening = threading.Timer(0.5, gate.touch)
        opening.start()
        checkpointer.save(2, state).result(LIMIT_S)
        opening.join()
        assert _worker(checkpointer).pid == worker.pid
        assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_while_it_attaches_loses_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """The session may have begun. The next save opens another session."""
    worker = train(root, 2)
    with Checkpointer(root, CONFIG) as checkpointer:
        assert checkpointer.load(state := empty()) == 2
        real = takeover._wait

        def interrupted(*arguments: Any) -> bool:
            real(*arguments)
            signal.raise_signal(signal.SIGUSR1)
            return True

        def handler(*_: Any) -> None:
            raise kind("as the test wants")

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with monkeypatch.context() as patch, pytest.raises(kind, match="as the test wants"):
                patch.setattr(takeover, "_wait", interrupted)
                checkpointer.save(3, state)
        finally:
            signal.signal(signal.SIGUSR1, before)
        state["w"].fill_(3)
        state["step"] = 3
        checkpointer.save(3, state).result(LIMIT_S)
        assert worker is not None and _worker(checkpointer).pid == worker.pid
        assert checkpointer.steps() == [1, 2, 3]


def test_a_worker_that_is_killed_between_two_trainers_is_replaced(root: Path) -> None:
    """The worker's memory is gone, but the loaded state stays."""
    worker = train(root, 2)
    assert worker is not None
    with Checkpointer(root, CONFIG) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and source(checkpointer) == "memory"
        worker.kill()
        wait_for(lambda: not is_running(worker.pid))
        checkpointer.save(3, state).result(LIMIT_S)
        assert checkpointer.steps() == [1, 2, 3]


_HELD = str(Path(__file__).parents[1] / "support" / "held_worker.py")


def _save_for_upload(root: str, local: str, gate: str, step: int) -> None:
    """Save a step. At step 1, die during the upload. At step 2, close, and let the uploads continue meanwhile."""
    worker_process.command = lambda: [sys.executable, _HELD, gate, "9"]
    checkpointer = Checkpointer(root, Config(local_root=local))
    checkpointer.save(step, {"w": torch.full((10,), float(step))}, upload=True).result(LIMIT_S)
    if step == 1:
        wait_for(Path(f"{gate}.upload.reached").exists)
        os.kill(os.getpid(), signal.SIGKILL)
    say(_worker(checkpointer).pid)
    opening = threading.Timer(0.5, Path(f"{gate}.upload").touch)
    opening.start()
    checkpointer.close()


def test_uploads_of_the_trainer_before_keep_none_of_the_next_one(root: Path, tmp_path: Path) -> None:
    """An upload is running when the next trainer attaches, and also when this trainer closes."""
    gate, local = str(tmp_path / "gate"), str(tmp_path / "local")
    Path(f"{gate}.write").touch()
    Path(f"{gate}.take.reached").touch()
    assert alone(_save_for_upload, str(root), local, gate, 1)[0] == -signal.SIGKILL
    code, worker = alone(_save_for_upload, str(root), local, gate, 2)
    assert code == 0
    wait_for(lambda: not is_running(worker))
    assert complete_steps(str(root)) == [1, 2]


def test_a_worker_that_dies_just_after_the_attach_leaves_no_trap(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment numbers of the dead worker are invalid for the next worker."""
    train(root, 2)
    with Checkpointer(root, CONFIG) as checkpointer:
        assert checkpointer.load(state := empty()) == 2
        real = Supervisor._take_root

        def die(supervisor: Supervisor, client: WorkerClient, *args: Any) -> None:
            psutil.Process(client.pid).kill()
            real(supervisor, client, *args)

        with monkeypatch.context() as patch, pytest.raises(WorkerDiedError):
            patch.setattr(Supervisor, "_take_root", die)
            checkpointer.save(3, state)
        checkpointer.save(3, state).result(LIMIT_S)
        assert checkpointer.steps() == [1, 2, 3]


def test_a_worker_has_the_surroundings_of_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes over the credentials and module paths of the restarted trainer."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setattr(sys, "path", before := [*sys.path])
    Surroundings({"AWS_SESSION_TOKEN": "new"}, [*before, "/mine"]).take_over()
    assert "/mine" in sys.path
    assert os.environ["AWS_SESSION_TOKEN"] == "new" and "AWS_PROFILE" not in os.environ and "PATH" in os.environ


def test_a_trainer_with_other_options_has_them(root: Path) -> None:
    """The worker continues with the new options, and ends after the new, shorter linger time."""
    old = train(root, 2, linger=600.0)
    assert old is not None
    with pytest.raises(RuntimeError), Checkpointer(root, Config(linger=0.5, nice=11)) as checkpointer:
        assert checkpointer.load(state := empty()) == 2 and source(checkpointer) == "memory"
        checkpointer.save(3, state).result(LIMIT_S)
        assert _worker(checkpointer).pid == old.pid and old.nice() == 11
        raise RuntimeError("the training has failed")
    assert has_left(old)
