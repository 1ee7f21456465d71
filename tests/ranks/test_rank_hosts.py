"""Jobs that restart on other hosts, in another order, with more ranks or fewer: they find the images."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from support.checkpoints import complete_steps, step_folder
from support.hosts import damage_images, enter_host
from support.ranks import Job, alone, faulty, gated, run, say
from support.states import equal, replicas
from support.workers import wait_for

from asyncckpt import Checkpointer, Save
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, CheckpointExistsError
from asyncckpt.extension import Engine
from asyncckpt.link.running_workers import running_workers
from asyncckpt.loading.memory_source import MemorySource
from asyncckpt.protocol import commit

pytestmark = pytest.mark.usefixtures("forkserver")


def _die(folder: str, places: list[int], steps: int) -> None:
    """Save some steps on the given hosts, and die."""
    enter_host(folder, places[dist.get_rank()])
    checkpointer = Checkpointer(f"{folder}/root")
    for step in range(1, steps + 1):
        save = checkpointer.save(step, replicas(step))
        if step < steps:
            save.result(30)
        else:
            save.wait_staged(30)
    say(checkpointer._engine.worker.pid if checkpointer._engine.worker else 0)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load(folder: str, places: list[int]) -> tuple[int, str, bool, dict[str, int]]:
    enter_host(folder, places[dist.get_rank()])
    with Checkpointer(f"{folder}/root", Config(timeout=5)) as checkpointer:
        into = replicas(99)
        assert checkpointer.latest() == 2
        step = checkpointer.load(into)
        loaded = checkpointer.loaded
        assert loaded is not None and sum(loaded.nbytes_from.values()) == (
            loaded.nbytes if loaded.source == "memory" else 0
        )
        return step, loaded.source, equal(into, replicas(step)), {**loaded.nbytes_from}


@pytest.mark.parametrize(
    "then",
    [[0, 1], [1, 0], [1, 0, 2], [1, 0, 1, 0, 2], [0, 2, 1]],
    ids=["as before", "swapped", "a spare host", "more", "among"],
)
def test_memory_of_other_hosts_is_found(hosts: Path, then: list[int]) -> None:
    Job(2, _die, str(hosts), [0, 1], 2, folder=hosts).wait()
    found = run(len(then), _load, str(hosts), then, folder=hosts)
    assert [each[:3] for each in found] == [(2, "memory", True)] * len(then)
    for host, (*_, nbytes_from) in zip(then, found, strict=True):
        # The replicas are spread over both hosts, so each rank reads from the other host's memory.
        assert ("memory" in nbytes_from) == (host < 2) and nbytes_from["peer"] > 0


def test_what_is_on_no_host_any_more_comes_from_storage(hosts: Path) -> None:
    job = Job(2, _die, str(hosts), [0, 1], 2, folder=hosts)
    workers = [job.hear(rank) for rank in range(2)]
    job.wait()
    while complete_steps(str(hosts / "root")) != [1, 2]:
        pass
    psutil.Process(workers[1]).kill()
    found = run(2, _load, str(hosts), [0, 2], folder=hosts)
    assert [each[:3] for each in found] == [(2, "memory", True)] * 2
    assert found[0][3].keys() == {"memory", "storage"} and found[1][3].keys() == {"peer", "storage"}


def _die_unwritten(folder: str, places: list[int]) -> None:
    """Replicate two steps, write nothing, and die."""
    os.environ["ASYNCCKPT_TEST_GATE"] = f"{folder}/gate"
    faulty("create:hold")
    enter_host(folder, places[dist.get_rank()])
    checkpointer = Checkpointer(f"{folder}/root", Config(replicas=1, timeout=30))
    for step in (1, 2):
        checkpointer.save(step, replicas(step)).wait_replicated(30)
    say(checkpointer._engine.worker.pid if checkpointer._engine.worker else 0)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load_unwritten(folder: str, places: list[int]) -> tuple[int, str, bool]:
    enter_host(folder, places[dist.get_rank()])
    with Checkpointer(f"{folder}/root", Config(timeout=5)) as checkpointer:
        into = replicas(99)
        step = checkpointer.load(into)
        assert checkpointer.loaded is not None
        Path(folder, "gate").touch()
        return step, checkpointer.loaded.source, equal(into, replicas(step))


@pytest.mark.parametrize("then", [[0, 1], [1, 0, 2]], ids=["as before", "among others"])
@pytest.mark.parametrize(
    ("damaged", "expected"), [("copies", 2), ("own images", 2), ("copies and own images", 1)], ids=str
)
def test_what_is_damaged_is_loaded_from_elsewhere(
    hosts: Path, monkeypatch: pytest.MonkeyPatch, then: list[int], damaged: str, expected: int
) -> None:
    """A damaged image is loaded from another copy.

    Without a good copy the job loads an older step, as storage is empty.
    """
    Job(2, _die_unwritten, str(hosts), [0, 1], folder=hosts).wait()
    for host in (0, 1):
        damage_images(hosts, host, 2, damaged, monkeypatch)
    found = run(len(then), _load_unwritten, str(hosts), then, folder=hosts)
    assert found == [(expected, "memory", True)] * len(then)


def _stop_and_load(folder: str, places: list[int], worker: int) -> tuple[int, str, bool]:
    """Load, and stop the ``worker`` when all ranks know its images."""
    opened = MemorySource.opened

    def stop(source: MemorySource) -> AbstractContextManager[MemorySource]:
        os.kill(worker, signal.SIGSTOP)
        return opened(source)

    MemorySource.opened = stop  # type: ignore[assignment, method-assign]
    return _load_unwritten(folder, places)


def test_a_worker_that_is_stopped_in_the_middle_of_a_load(hosts: Path) -> None:
    """Another worker holds the same images. The three ranks run on both workers' hosts and on a third host."""
    job = Job(2, _die_unwritten, str(hosts), [0, 1], folder=hosts)
    workers = [job.hear(rank) for rank in range(2)]
    job.wait()
    begun = time.monotonic()
    try:
        found = run(3, _stop_and_load, str(hosts), [1, 2, 0], workers[1], folder=hosts)
        assert time.monotonic() - begun < 60
    finally:
        os.kill(workers[1], signal.SIGCONT)
    assert found == [(2, "memory", True)] * 3


def test_a_worker_that_is_stopped_is_not_waited_for(hosts: Path) -> None:
    job = Job(2, _die, str(hosts), [0, 1], 2, folder=hosts)
    workers = [job.hear(rank) for rank in range(2)]
    job.wait()
    while complete_steps(str(hosts / "root")) != [1, 2]:
        pass
    os.kill(workers[1], signal.SIGSTOP)
    try:
        found = run(2, _load, str(hosts), [0, 1], folder=hosts)
    finally:
        os.kill(workers[1], signal.SIGCONT)
    assert [each[0:3:2] for each in found] == [(2, True)] * 2


def _die_with_one_stopped(folder: str, places: list[int]) -> None:
    """Replicate the first step, and write nothing. Stage the second step on both ranks while one worker is stopped."""
    os.environ["ASYNCCKPT_TEST_GATE"] = f"{folder}/gate"
    faulty("create:hold")
    enter_host(folder, places[dist.get_rank()])
    checkpointer = Checkpointer(f"{folder}/root", Config(replicas=1, timeout=30, slots=2))
    checkpointer.save(1, replicas(1)).wait_replicated(30)
    worker = checkpointer._engine.worker
    assert worker is not None
    if dist.get_rank():
        os.kill(worker.pid, signal.SIGSTOP)
    dist.barrier()
    checkpointer.save(2, replicas(2)).wait_staged(30)
    say(worker.pid)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _is_saving(pid: int, path: str) -> bool:
    return any(each.pid == pid and each.status and path in each.status.saving for each in running_workers())


def _go_on_while_they_write(folder: str, places: list[int], workers: list[int], within: bool) -> bool:
    """Let the dead trainers' workers continue before the next save, or ``within`` it.

    Return whether their step is set aside.
    """
    enter_host(folder, places[dist.get_rank()])
    path, save = step_folder(f"{folder}/root", 2), Engine.save

    def let_them_write() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            Path(folder, "gate").touch()
            os.kill(workers[1], signal.SIGCONT)
            wait_for(lambda: not _is_saving(workers[0], path))
        dist.barrier()

    def save_when_they_have_written(*args: Any, **options: Any) -> Save:
        let_them_write()
        return save(*args, **options)

    with Checkpointer(f"{folder}/root", Config(timeout=30)) as checkpointer:
        assert checkpointer.load(replicas(99)) == 1
        if within:
            Engine.save = save_when_they_have_written  # type: ignore[method-assign]
        else:
            let_them_write()
        checkpointer.save(2, replicas(3)).result(30)
        Engine.save = save  # type: ignore[method-assign]
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(2, replicas(4)).result(30)
        into = replicas(99)
        assert checkpointer.load(into) == 2 and equal(into, replicas(3))
    return Path(f"{path}.abandoned-1").exists()


@pytest.mark.parametrize("within", [False, True], ids=["before the next save", "within it"])
def test_what_was_staged_later_is_committed_later(hosts: Path, within: bool) -> None:
    """The old workers commit a step that the new job then saves again. The new save replaces it."""
    job = Job(2, _die_with_one_stopped, str(hosts), [0, 1], folder=hosts)
    workers = [job.hear(rank) for rank in range(2)]
    job.wait()
    try:
        found = run(2, _go_on_while_they_write, str(hosts), [2, 0], workers, within, folder=hosts)
    finally:
        os.kill(workers[1], signal.SIGCONT)
    assert found == [True, True]


def _save_and_lose_the_first(root: str) -> str:
    if dist.get_rank() == 1:
        faulty("write:hold")  # slow storage
    checkpointer = Checkpointer(root)
    save = checkpointer.save(1, replicas(1))
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.path.basename(save.result(60))


def _look(root: str) -> None:
    with Checkpointer(root, Config(timeout=1.0)) as checkpointer, contextlib.suppress(CheckpointError):
        checkpointer.latest()


def test_a_rank_that_lives_is_waited_for_whoever_looks(tmp_path: Path) -> None:
    """A process that asks a dead trainer's worker for images may be the restarted job, or only an evaluation."""
    root, gate = str(tmp_path / "root"), tmp_path / "gate"
    job = Job(2, gated, _save_and_lose_the_first, str(gate), root, folder=tmp_path)
    wait_for(lambda: Path(f"{gate}.reached").exists() and not job.processes[0].is_alive())
    alone(_look, root)
    time.sleep(commit.silence(1) + 2)  # longer than a lost host's worker is waited for
    gate.touch()
    assert job.wait()[1].result == "step-00000001" and complete_steps(root) == [1]
