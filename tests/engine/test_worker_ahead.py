"""Test a worker that ``asyncckpt worker`` starts before its trainer."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.abilities import need_command
from support.recovery import empty, is_of, source, train

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.link import platform_workers, process
from asyncckpt.link.endpoint import FOLDER_VARIABLE, connect, endpoint_name, peer_pid
from asyncckpt.link.process import WorkerOptions
from asyncckpt.link.takeover import retire_idle_workers
from asyncckpt.threads import wait_until

pytestmark = pytest.mark.usefixtures("forkserver")

LIMIT_S = 60.0
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@contextlib.contextmanager
def _started(root: Path, *arguments: str, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Run the workers of ``root`` as a platform does, with the standard error piped. ``before``: a command prefix."""
    command = [*before, sys.executable, "-m", "asyncckpt", "worker", "--root", str(root), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def _wait_until_it_listens(root: Path, rank: int = 0, job: str = "", other_than: int = 0) -> int:
    """Return the process id of the worker of that rank, once it is another one than ``other_than``."""

    def listens() -> int | None:
        if (connection := connect(endpoint_name(f"{os.path.realpath(root)}\n{job}", rank))) is None:
            return None
        with connection:
            pid = peer_pid(connection)
        return None if pid == other_than else pid or -1

    found = wait_until(listens, LIMIT_S)
    assert found is not None
    return found


def _ends(process: subprocess.Popen[bytes], code: int = 0) -> None:
    """End the command by SIGTERM."""
    process.terminate()
    assert process.wait(LIMIT_S) == code


def _pid(checkpointer: Checkpointer) -> int:
    worker = checkpointer._engine.worker
    assert worker is not None
    return worker.pid


@pytest.mark.parametrize("before", [(), CONTAINER], ids=["beside", "container"])
def test_trainers_attach_to_it(root: Path, before: Sequence[str]) -> None:
    """The first trainer dies, and the next one loads from memory. After that one has closed, another worker starts."""
    need_command(*before, "true")
    with _started(root, before=before) as command:
        pid = _wait_until_it_listens(root)
        its = train(root, 2)
        assert its is not None and pid in (its.pid, -1)
        with Checkpointer(root, Config(nice=11)) as checkpointer:
            assert checkpointer.load(state := empty()) == 2 and is_of(state, 2) and source(checkpointer) == "memory"
            checkpointer.save(3, state).result(LIMIT_S)
            assert _pid(checkpointer) == its.pid and its.nice() == 11
        its.wait(LIMIT_S)
        _wait_until_it_listens(root, other_than=pid if pid > 0 else 0)
        with Checkpointer(root) as checkpointer:
            assert checkpointer.load(empty(), memory=False) == 3
            checkpointer.save(4, state).result(LIMIT_S)
            assert _pid(checkpointer) in {each.pid for each in psutil.Process(command.pid).children(recursive=True)}
        _ends(command) if not before else command.kill()


def test_one_command_has_the_workers_of_all_ranks(root: Path) -> None:
    """A worker that is killed is started again, and the others stay."""
    with _started(root, "--ranks", "0-1,4") as command:
        pids = {rank: _wait_until_it_listens(root, rank) for rank in (0, 1, 4)}
        assert {each.pid for each in psutil.Process(command.pid).children()} == {*pids.values()}
        os.kill(pids[1], signal.SIGKILL)
        again = _wait_until_it_listens(root, 1, other_than=pids[1])
        assert _wait_until_it_listens(root, 0) == pids[0] and _wait_until_it_listens(root, 4) == pids[4]
        command.terminate()
        said = command.communicate(timeout=LIMIT_S)[1].decode()
        assert command.returncode == 0 and "the worker of rank 1 was killed by SIGKILL" in said
        assert not any(psutil.pid_exists(pid) for pid in (*pids.values(), again))


def test_it_starts_for_a_rank_and_a_job_of_its_own(root: Path) -> None:
    """A trainer in the same folder without a job ID starts its own worker."""
    with _started(root, "--ranks", "1") as other, _started(root, "--job-id", "mine") as mine:
        rank_1, of_mine = _wait_until_it_listens(root, 1), _wait_until_it_listens(root, job="mine")
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, empty()).result(LIMIT_S)
            assert _pid(checkpointer) not in (rank_1, of_mine)
        with Checkpointer(root, Config(job_id="mine")) as checkpointer:
            checkpointer.save(2, empty()).result(LIMIT_S)
            assert _pid(checkpointer) == of_mine
        assert _wait_until_it_listens(root, 1) == rank_1
        _ends(mine)
        _ends(other)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_by_a_signal(root: Path, how: signal.Signals) -> None:
    with _started(root) as command:
        _wait_until_it_listens(root)
        command.send_signal(how)
        assert command.wait(LIMIT_S) == 0
    assert not root.exists()


def test_it_ends_after_what_a_dead_trainer_has_staged(root: Path) -> None:
    """A launcher sends signals to all processes of a job. The trainer goes on meanwhile, and dies later."""
    with _started(root) as command:
        pid = _wait_until_it_listens(root)
        with pytest.raises(RuntimeError), Checkpointer(root) as checkpointer:
            checkpointer.save(1, empty()).result(LIMIT_S)
            command.terminate()
            os.kill(pid, signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                command.wait(1.0)
            checkpointer.save(2, empty())
            raise RuntimeError("the training is told to end")
        assert command.wait(LIMIT_S) == 0
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(empty()) == 2 and source(checkpointer) == "storage"


def test_it_stays_where_another_job_needs_memory(root: Path) -> None:
    """The worker has no memory to give back."""
    with _started(root) as command:
        pid = _wait_until_it_listens(root)
        assert not retire_idle_workers(LIMIT_S)
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, empty()).result(LIMIT_S)
            assert _pid(checkpointer) == pid
        _ends(command)


@pytest.mark.parametrize("ranks", ["", "-1", "3-1", "0-7,5-2", "0,0-3", "all"])
def test_what_names_no_ranks_is_refused(root: Path, ranks: str) -> None:
    with _started(root, f"--ranks={ranks}") as command:
        said = command.communicate(timeout=LIMIT_S)[1].decode()
    assert command.returncode == 2 and "names no ranks" in said


def test_a_runtime_folder_that_cannot_be_used(root: Path, runtime: Path) -> None:
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    with _started(root, "--ranks", "0-1") as command:
        said = command.communicate(timeout=LIMIT_S)[1].decode()
    assert command.returncode == 2 and str(runtime) in said


def test_a_relative_runtime_folder_is_that_of_the_shell(
    root: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's working directory is "/"."""
    monkeypatch.chdir(runtime.parent)
    monkeypatch.setenv(FOLDER_VARIABLE, runtime.name)
    with _started(root) as command:
        _wait_until_it_listens(root)
        _ends(command)


def test_a_second_one_waits_for_the_end_of_the_first(root: Path) -> None:
    with _started(root) as first:
        pid = _wait_until_it_listens(root)
        with _started(root) as second:
            assert second.stderr is not None and str(pid) in second.stderr.readline().decode()
            assert "the next one starts in 1 s" in second.stderr.readline().decode()
            _ends(first)
            _wait_until_it_listens(root, other_than=pid)
            _ends(second)


def test_a_trainer_with_other_transports_starts_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old worker says why it ends. The next one waits until the trainer has closed."""
    with _started(root) as command:
        pid = _wait_until_it_listens(root)
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, empty()).result(LIMIT_S)
            own = _pid(checkpointer)
            assert own != pid
            checkpointer.save(2, empty()).result(LIMIT_S)
        _wait_until_it_listens(root, other_than=own)
        command.terminate()
        said = command.communicate(timeout=LIMIT_S)[1].decode()
        assert command.returncode == 0 and "other transports" in said, said


def test_a_trainer_that_comes_as_it_ends_starts_its_own(root: Path) -> None:
    """The trainer's save works at any delay between the two."""
    for delay in (0.0, 0.02, 0.1):
        with _started(root) as command:
            pid = _wait_until_it_listens(root)
            ending = threading.Timer(delay, os.kill, (pid, signal.SIGTERM))
            ending.start()
            with Checkpointer(root, Config(keep_last=2)) as checkpointer:
                checkpointer.save((checkpointer.latest() or 0) + 1, empty()).result(LIMIT_S)
            ending.join()
            _ends(command)


def test_one_that_lingers_for_a_dead_trainer_ends_by_a_signal(root: Path) -> None:
    with _started(root) as command:
        _wait_until_it_listens(root)
        assert train(root, 1) is not None
        _ends(command)


def test_workers_are_seen_to_end_where_the_parent_ignores_children(root: Path) -> None:
    """An ignored SIGCHLD is inherited."""
    command = (
        "python",
        "-c",
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])",
    )
    with _started(root, before=(sys.executable, *command[1:])) as started:
        pid = _wait_until_it_listens(root)
        os.kill(pid, signal.SIGKILL)
        _wait_until_it_listens(root, other_than=pid)
        _ends(started)


def test_a_start_that_fails_is_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers stay."""
    starts: list[int] = []

    def start(options: WorkerOptions) -> int:
        starts.append(options.rank)
        if starts.count(1) == 1 and options.rank == 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return os.posix_spawn("/bin/sleep", ["sleep", "600"], {})

    monkeypatch.setattr(platform_workers, "start_ahead", start)
    monkeypatch.setattr(platform_workers, "leave_folder", lambda: None)
    handlers = {each: signal.getsignal(each) for each in (*signal.valid_signals(),) if each < signal.SIGRTMIN}
    timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        assert platform_workers.run_workers("job", [0, 1]) == 0
    finally:
        timer.join()
        for each, before in handlers.items():
            if before is not None and each not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(each, before)
    assert starts == [0, 1, 1]


def test_a_trainer_of_updated_files_finds_a_worker_that_started_after_the_update(root: Path, tmp_path: Path) -> None:
    """Each worker says which files it runs."""
    path = Path(process.__file__).with_name("api.py")
    times = path.stat()
    with _started(root) as command:
        pid = _wait_until_it_listens(root)
        try:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
            process._code.cache_clear()
            os.kill(pid, signal.SIGKILL)
            again = _wait_until_it_listens(root, other_than=pid)
            with Checkpointer(root) as checkpointer:
                checkpointer.save(1, empty()).result(LIMIT_S)
                assert _pid(checkpointer) == again
        finally:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            process._code.cache_clear()
        _ends(command)
