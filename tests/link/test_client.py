"""The worker process: its start, its size, its death, and its trainer's death."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.checkpoints import complete_steps
from support.ranks import script
from support.segments import mapped_segments
from support.states import small_state
from support.workers import Faulty

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.engine.saves import SaveOperation
from asyncckpt.errors import CheckpointError, ClosedError, OutOfMemoryError, SaveTimeoutError, WorkerDiedError
from asyncckpt.extension import Engine, SocketConnection
from asyncckpt.link import client as client_module
from asyncckpt.link import process as worker_process
from asyncckpt.link.api import SessionApi
from asyncckpt.link.calls import call_of
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.process import WorkerOptions, WorkerProcess
from asyncckpt.link.takeover import is_running
from asyncckpt.link.trainer_saves import RunningSaves
from asyncckpt.protocol.trainer import TrainerSaves

MIB = 1 << 20


def test_it_is_small_and_knows_no_torch() -> None:
    worker = WorkerClient(WorkerOptions())
    try:
        _, segment = worker.allocate(64 * MIB, 30)
        with segment:
            process = psutil.Process(worker.pid)
            memory = process.memory_info()
            assert memory.rss - memory.shared < 60 * MIB
            assert not any("torch" in entry.path for entry in process.memory_maps())
            assert os.getsid(worker.pid) == worker.pid != os.getsid(0)
            assert process.nice() == 10
    finally:
        worker.close(30)


def test_one_that_cannot_start_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "command", lambda: [sys.executable, "-c", "raise SystemExit('no luck today')"])
    with pytest.raises(WorkerDiedError, match="ended with status 1 while it started; .*no luck today"):
        WorkerClient(WorkerOptions())
    monkeypatch.setattr(worker_process, "command", lambda: ["/nonexistent/python"])
    with pytest.raises(WorkerDiedError, match="did not start"):
        WorkerClient(WorkerOptions())


def test_one_that_is_killed_while_it_starts_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error comes at once, although a fork of the worker or the trainer may hold the socket open."""
    code = f"""
import json, os, signal, subprocess, sys
fork = subprocess.Popen(["sleep", "60"], pass_fds=[json.loads(sys.argv[1])["fd"]])
open({str(tmp_path / "fork")!r}, "w").write(str(fork.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    monkeypatch.setattr(worker_process, "command", lambda: [sys.executable, "-c", code])
    with pytest.raises(WorkerDiedError, match="was killed by SIGKILL while it started"):
        WorkerClient(WorkerOptions(start_timeout=20))
    os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)


def test_without_memory_for_its_last_words_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched, pytest.raises(WorkerDiedError, match="did not start.*allocate memory"):
        patched.setattr(os, "memfd_create", fail)
        WorkerClient(WorkerOptions())


def test_one_that_never_gets_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "command", lambda: [sys.executable, "-c", "import signal; signal.pause()"])
    with pytest.raises(WorkerDiedError, match=r"not get ready within 0\.2 s"):
        WorkerClient(WorkerOptions(start_timeout=0.2))


def test_more_memory_than_there_is_is_refused() -> None:
    worker = WorkerClient(WorkerOptions())
    try:
        with pytest.raises(OutOfMemoryError, match="fewer slots"):
            worker.allocate(1 << 50, 30)
        _, segment = worker.allocate(MIB, 30)
        segment.close()
    finally:
        worker.close(30)


@contextlib.contextmanager
def _limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize("limit", ["ulimit -n", "ulimit -v"])
def test_memory_that_its_trainer_has_no_room_for_is_given_back(limit: str) -> None:
    """The trainer cannot map the worker's new segment.

    The error names the trainer's limit, and the worker keeps running.
    """
    worker = WorkerClient(WorkerOptions())
    try:
        unused = os.open("/dev/null", os.O_RDONLY)
        os.close(unused)
        address_space = psutil.Process().memory_info().vms
        small = {
            "ulimit -n": (resource.RLIMIT_NOFILE, unused),
            "ulimit -v": (resource.RLIMIT_AS, address_space + 32 * MIB),
        }
        with _limited(*small[limit]), pytest.raises(OutOfMemoryError, match=limit):
            worker.allocate(64 * MIB, 30)
        number, segment = worker.allocate(MIB, 30)
        with segment:
            assert number == 2 and list(mapped_segments(worker.pid).values()) == [MIB]
    finally:
        worker.close(30)


_SAVE_ONCE = """
import os, sys, torch, asyncckpt
if sys.argv[3:]:
    os.rmdir(os.getcwd())
with asyncckpt.Checkpointer(sys.argv[1]) as checkpointer:
    save = checkpointer.save(1, {"w": torch.arange(1000.0)})
    for stream in eval(sys.argv[2]):
        os.write(stream, b"what a library prints")
    save.result(60)
"""


@pytest.mark.parametrize("closed", [(0, 1, 2), (1, 2)])
def test_a_trainer_without_standard_streams(root: Path, closed: tuple[int, ...]) -> None:
    """A daemon has no standard streams. Printed text is lost, and never written to a file of ours."""
    command = [sys.executable, "-c", _SAVE_ONCE, str(root), str(closed[-2:])]
    ended = subprocess.run(command, preexec_fn=lambda: deque(map(os.close, closed)), timeout=120)
    assert ended.returncode == 0
    into = {"w": torch.zeros(1000)}
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(into) == 1 and torch.equal(into["w"], torch.arange(1000.0))


def test_a_trainer_whose_current_folder_was_removed(root: Path, tmp_path: Path) -> None:
    code = """
try:
    asyncckpt.Checkpointer("here")
except asyncckpt.errors.StorageError as error:
    assert "was removed" in str(error), error
"""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-c", _SAVE_ONCE + code, str(root), "()", "remove"]
    ended = subprocess.run(command, cwd=gone, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert complete_steps(str(root)) == [1]


_IN_WORKER = """
import errno, sys, threading
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.worker import __main__
{}
sys.exit(__main__.main(sys.argv[1:]))
"""

_REFUSE_THREAD = """
start, begun = threading._start_new_thread, []
def refuse(*args):
    begun.append(1)
    if len(begun) == {}:
        raise RuntimeError("can't start new thread")
    return start(*args)
threading._start_new_thread = refuse
"""

_REFUSE_OUTCOME = """
send = SocketConnection.send
def refuse(connection, message):
    if message[1:2] == ("ended",):
        raise OSError(errno.ENOBUFS, "No buffer space available")
    send(connection, message)
SocketConnection.send = refuse
"""


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_one_that_may_not_start_its_threads_is_told_at_once(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    code = _IN_WORKER.format(_REFUSE_THREAD.format(nth))
    monkeypatch.setattr(worker_process, "command", lambda: [sys.executable, "-c", code])
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError, match="(?s)while it started; .*no thread can be started: .*RLIMIT_NPROC"):
        WorkerClient(WorkerOptions(start_timeout=60))
    assert time.monotonic() - begun < 30


def test_an_outcome_that_cannot_be_told_is_found_out_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _IN_WORKER.format(_REFUSE_OUTCOME)
    with Checkpointer(root, Config(commit_timeout=600)) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(worker_process, "command", lambda: [sys.executable, "-c", code])
            assert checkpointer.save(1, small_state()).result(60)
        checkpointer.save(2, small_state()).result(60)
        assert checkpointer.steps() == [1, 2]


def test_one_that_cannot_be_told_anything_is_another_soon(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to send, but reports no dead worker.

    The trainer replaces the worker without a wait for its exit.
    """

    def refuse(self: SocketConnection, buffer: object) -> None:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        begun = time.monotonic()
        with monkeypatch.context() as patched, pytest.raises(WorkerDiedError, match="cannot be told .*No buffer space"):
            patched.setattr(SocketConnection, "_send_bytes", refuse)
            checkpointer.save(2, small_state())
        checkpointer.save(3, small_state()).result(60)
        assert time.monotonic() - begun < 9
        assert checkpointer.steps() == [1, 3]


def test_a_worker_whose_answer_cannot_be_read_is_ended_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(client_module, "NOTICE_S", 60.0)  # the time for a worker to exit by itself
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        with monkeypatch.context() as patched:
            patched.setattr(SocketConnection, "receive", refuse)
            with contextlib.suppress(WorkerDiedError):  # the save may be committed by then
                checkpointer.save(2, small_state()).result(20)
        checkpointer.save(3, small_state()).result(60)
        assert checkpointer.steps()[-1] == 3


def test_a_save_whose_end_cannot_be_noted_ends_all_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer has no memory when the worker answers, and gets the result of the save from storage."""
    noted = SaveOperation.on_end
    refusals = iter([None])

    def refuse(self: SaveOperation, *outcome: Any, **heard: Any) -> None:
        for _ in refusals:
            raise MemoryError
        noted(self, *outcome, **heard)

    monkeypatch.setattr(SaveOperation, "on_end", refuse)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        checkpointer.save(2, small_state()).result(60)
        assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize(
    ("owner", "name", "late"),
    [
        (TrainerSaves, "handle", False),
        (TrainerSaves, "handle", True),
        (RunningSaves, "handle", False),
        (RunningSaves, "_carry_out", False),
        (SaveOperation, "_copy", False),
    ],
)
def test_a_trainer_without_memory_for_a_moment_waits_for_nothing_lost(
    root: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, late: bool
) -> None:
    """Each call of the saves' thread, or of the copy's thread, raises ``MemoryError`` in turn."""
    real, left = getattr(owner, name), [-1]

    def fails(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] != 0:
            return real(*arguments)
        if late:
            real(*arguments)
        raise MemoryError("as the test wants")

    monkeypatch.setattr(owner, name, fails)
    step, number = 0, 0
    with Checkpointer(root, Config(restart_pause=0, worker_restarts=100, commit_timeout=30)) as checkpointer:
        while left[0] <= 0:  # a positive rest: the last save made fewer calls
            number += 1
            left[0] = number
            step += 1
            begun = time.monotonic()
            with contextlib.suppress(CheckpointError, MemoryError):
                checkpointer.save(step, small_state()).result(60)
            left[0] = -1 if left[0] <= 0 else left[0]
            assert time.monotonic() - begun < 20
            if left[0] < 0:
                step += 1
                with contextlib.suppress(CheckpointError):
                    checkpointer.wait(60)  # raises an error that no handle has raised
                checkpointer.save(step, small_state()).result(60)
        assert number > 2 or name == "_copy"
        assert step in checkpointer.steps()


def test_a_trainer_that_stood_still_kills_no_worker(root: Path) -> None:
    """The worker answers in time, but the trainer reads the answer late."""
    on_written = SaveOperation.on_written

    def stand_still(self: SaveOperation, *written: Any) -> None:
        on_written(self, *written)
        patched.setattr(TrainerSaves, "_is_overdue", lambda *_: True)
        time.sleep(2 * client_module._LISTEN_S)

    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        worker = checkpointer._engine.worker
        assert worker is not None
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SaveOperation, "on_written", stand_still)
            checkpointer.save(2, small_state()).result(60)
        checkpointer.save(3, small_state()).result(60)
        assert checkpointer._engine.worker is worker and checkpointer.steps() == [1, 2, 3]


def test_a_worker_whose_last_words_cannot_be_read_is_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        worker = checkpointer._engine.worker
        assert worker is not None
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", refuse)
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait_for_end(30)
        with pytest.raises(WorkerDiedError, match="cannot be read: .*Input/output error"):
            worker.check_usable()
        checkpointer.save(2, small_state()).result(60)


def test_nobody_knows_how_it_ended_where_sigchld_is_ignored() -> None:
    """The kernel then keeps no exit status, and Python returns 0."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        worker = WorkerClient(WorkerOptions())
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait_for_end(30)
        with pytest.raises(WorkerDiedError, match="an unknown status because this process ignores SIGCHLD"):
            worker.check_usable()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_one_that_may_not_be_started_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched, pytest.raises(WorkerDiedError, match="did not start: .*RLIMIT_NPROC"):
        patched.setattr(subprocess, "Popen", refuse)
        WorkerClient(WorkerOptions())


def test_its_death_fails_the_save_at_once_and_the_next_save_works(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:kill")
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, small_state())
        faulty_worker("")
        begun = time.monotonic()
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            save.result(60)
        assert time.monotonic() - begun < 40
        assert caught.value.step == 1 and str(caught.value.path).endswith("step-00000001")
        assert checkpointer.steps() == []
        checkpointer.save(2, small_state()).result(60)
        assert checkpointer.steps() == [2]


def test_killed_after_finalizing_it_has_saved(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("finalized:kill")
    with Checkpointer(root) as checkpointer:
        checkpointer.save(2, state := small_state()).result(60)
        assert checkpointer.load(state) == 2


@pytest.mark.parametrize("point", ["begin", "create", "write", "sync", "finalize"])
def test_killed_anywhere_it_finalizes_all_or_nothing(root: Path, faulty_worker: Faulty, point: str) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state := small_state()).result(60)
    faulty_worker(f"{point}:kill")
    with Checkpointer(root) as checkpointer:
        with pytest.raises(WorkerDiedError):
            checkpointer.save(2, state).result(60)
        assert checkpointer.steps() == [1]
        assert checkpointer.load(small_state()) == 1


def test_killed_while_idle_it_is_replaced(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        worker = checkpointer._engine.worker
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker._listener.join(10)
        checkpointer.save(2, small_state()).result(60)
        assert checkpointer.steps() == [1, 2]


def test_killed_between_plan_and_copy_it_is_an_error_and_no_more(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        worker = checkpointer._engine.worker
        assert worker is not None
        stage: Any = SaveOperation.stage

        def dying(*arguments: Any) -> Any:
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait_for_end(10)
            return stage(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SaveOperation, "stage", dying)
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                checkpointer.save(2, small_state())
        checkpointer.save(3, small_state()).result(60)
        assert checkpointer.steps() == [1, 3]


def test_a_timeout_is_no_end(
    root: Path, faulty_worker: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("write:hold")
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, small_state())
        with pytest.raises(SaveTimeoutError, match="still under way"):
            save.result(0.05)
        with pytest.raises(SaveTimeoutError):
            checkpointer.wait(0.05)
        assert not save.done() and save.staged()
        (tmp_path / "gate").touch()
        assert save.result(60).endswith("/step-00000001")


def test_close_gives_up_on_a_stalled_disk(
    root: Path, faulty_worker: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("write:hold")
    checkpointer = Checkpointer(root)
    save = checkpointer.save(1, small_state())
    # Set the timeout only now, because it limits other requests to the worker too.
    checkpointer._engine._supervisor._config = Config(timeout=0.2)
    with pytest.raises(SaveTimeoutError, match="goes on"):
        checkpointer.close()
    (tmp_path / "gate").touch()
    assert os.path.exists(save.result(60))  # the worker finished alone
    worker = checkpointer._engine.worker
    assert worker is not None
    worker.close(30)


TRAINER = """
import os, signal, sys, torch
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.staging import buffer as home
checkpointer = Checkpointer(sys.argv[1], Config(slots=2, linger=0))
state = {"w": torch.full((3_000_000,), 1.0), "step": 0}
checkpointer.prepare(state)
for step in (1, 2):
    state["w"].fill_(step)
    state["step"] = step
    if sys.argv[2] == f"staging {step}":
        # Half of the copy of this step is made when death comes.
        copy = home.SlotStager.copy
        def half(self, tensors, *args, **options):
            tensors[0][1_000_000:] = 99.0
            copy(self, tensors, *args, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        home.SlotStager.copy = half
    if sys.argv[2] == f"untold {step}":
        from asyncckpt.engine.saves import SaveOperation
        hand_over = SaveOperation.hand_over
        SaveOperation.hand_over = lambda self: (hand_over(self), os.kill(os.getpid(), signal.SIGKILL))
    checkpointer.save(step, state)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        signal.pause()
print(checkpointer._engine.worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize(
    ("death", "steps"), [("after", [1, 2]), ("staging 2", [1]), ("untold 2", [1, 2]), ("untold 1", [1])]
)
def test_what_a_killed_trainer_had_staged_is_written(root: Path, death: str, steps: list[int]) -> None:
    assert script(TRAINER, str(root), death) == -signal.SIGKILL
    with Checkpointer(root) as checkpointer:
        state = {"w": torch.zeros(3_000_000), "step": 0}
        assert checkpointer.load(state) == steps[-1]  # waits for the dead trainer's worker
        assert checkpointer.steps() == steps
        for step in steps:
            checkpointer.load(state, step)
            assert (
                torch.equal(torch.as_tensor(state["w"]), torch.full((3_000_000,), float(step)))
                and state["step"] == step
            )
        assert not list(root.glob(".*"))


def test_a_fork_keeps_no_worker_alive(root: Path) -> None:
    """The processes of a data loader inherit the socket, and outlive a killed trainer."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(root), "fork"], stdout=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    try:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        trainer.wait(60)
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have exited already
            psutil.wait_procs([psutil.Process(pid)], timeout=60)
        assert not is_running(pid)
        assert complete_steps(str(root)) == [1, 2]
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.communicate()


def test_a_fork_cannot_use_it(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        pid = os.fork()
        if pid == 0:
            # A fork keeps no memory that the trainer may give back.
            held = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and fd.exists()]
            if mapped_segments() or any(name.startswith("/memfd:asyncckpt") for name in held):
                os._exit(2)
            try:
                checkpointer.save(2, small_state())
            except ClosedError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        checkpointer.save(3, small_state()).result(60)
        assert checkpointer.steps() == [1, 3]


def test_a_segment_given_back_while_its_save_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty_worker: Faulty
) -> None:
    """A segment may be given back when its images are written. The worker reads it later for the remaining files."""
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(tmp_path / "gate"))
    faulty_worker("create:hold:4")  # the manifest
    with Engine(alone=True) as engine:
        first = engine.save(tmp_path / "1", {"w": torch.zeros(10)})
        while not (tmp_path / "gate.reached").exists():
            time.sleep(0.005)
        second = engine.save(tmp_path / "2", {"w": torch.zeros(20)})  # replaces the segment of the other structure
        (tmp_path / "gate").touch()
        assert os.path.exists(first.result(60)) and os.path.exists(second.result(60))


def test_a_message_that_cannot_be_taken_ends_the_worker(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the trainer would wait for ever."""

    def fail(connection: object) -> None:
        raise EOFError("the message came without a descriptor")

    with Checkpointer(root) as checkpointer:
        with monkeypatch.context() as patched, pytest.raises(WorkerDiedError):
            patched.setattr(SocketConnection, "receive_descriptor", fail)
            checkpointer.save(1, {"w": torch.ones(10)})
        checkpointer.save(2, {"w": torch.ones(10)}).result(60)
        assert checkpointer.steps() == [2]


def test_it_may_have_as_many_descriptors_as_the_host_allows() -> None:
    """The first rank's worker has several connections to each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        worker = WorkerClient(WorkerOptions())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert psutil.Process(worker.pid).rlimit(psutil.RLIMIT_NOFILE)[0] == hard
    worker.close(30)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_to_all_processes_of_a_job_does_not_end_it(name: str) -> None:
    """For example, Slurm sends SIGUSR1 before a job ends.

    The signal is for the trainer, which then saves a last time.
    """
    worker = WorkerClient(WorkerOptions())
    os.kill(worker.pid, signal.Signals[name])
    _, segment = worker.allocate(MIB, 30)
    segment.close()
    worker.close(30)


def test_one_that_fails_says_its_last_words() -> None:
    """The worker writes the error for its trainer, not to its endpoint's log, because the trainer is alive."""
    worker = WorkerClient(WorkerOptions(endpoint=endpoint_name("job", 0), linger=60.0))
    worker.tell(SessionApi.give_back, 999, 0, ())  # a segment that the worker does not have
    worker.wait_for_end(30)
    with pytest.raises(WorkerDiedError, match="(?s)ended with status 1; its stderr ends with: .*KeyError: 999"):
        worker.check_usable()


def test_one_that_the_host_refuses_something_does_not_take_its_trainer_for_gone(tmp_path: Path) -> None:
    """The worker exits and reports why. If it took its trainer for dead, it would linger and tell the other ranks."""
    worker = WorkerClient(WorkerOptions(endpoint=endpoint_name("job", 0), linger=60.0))
    file = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)  # an empty file, which cannot be mapped
    with pytest.raises(WorkerDiedError, match="(?s)ended with status 1; its stderr ends with: .*Error"):
        worker._calls.call(30, call_of(0, SessionApi.adopt), file)
    os.close(file)


def test_a_message_that_is_none_ends_the_worker(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10)}).result(60)
        real = SocketConnection.receive

        def fail(connection: Any) -> Any:
            real(connection)
            raise AttributeError("no such class")

        worker = checkpointer._engine.worker
        with monkeypatch.context() as patched, contextlib.suppress(WorkerDiedError):  # or the save is committed by then
            patched.setattr(SocketConnection, "receive", fail)
            checkpointer.save(2, {"w": torch.ones(10)}).result(60)
        assert worker is not None and not worker.alive
        checkpointer.save(3, {"w": torch.ones(10)}).result(60)


def test_one_that_cannot_be_killed_at_once_keeps_nobody(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is in a storage call that cannot be interrupted, and keeps its socket open."""
    monkeypatch.setattr(client_module, "NOTICE_S", 0.1)
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, small_state())
        worker = checkpointer._engine.worker
        assert worker is not None
        with monkeypatch.context() as patch:
            patch.setattr(WorkerProcess, "kill", lambda _: None)
            worker.kill()
        with pytest.raises(WorkerDiedError):
            save.result(1)
        worker._process.end()
