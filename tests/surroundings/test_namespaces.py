"""Namespaces, as of containers: of processes, users, networks and mounts."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from support.abilities import need_command, need_locks
from support.surroundings import Trainings, judge, open_attempts, trained, went_well

from asyncckpt.link.endpoint import FOLDER_VARIABLE

_PIDS = ("unshare", "--pid", "--fork", "--kill-child")
_CONTAINER = (*_PIDS, "--mount-proc")


@pytest.mark.parametrize("flags", [("--map-root-user", "--net", "--uts", "--ipc", "--cgroup"), ()])
def test_of_users_and_networks(root: Path, flags: tuple[str, ...]) -> None:
    """There is no network, not even the loopback device; or the user has no name."""
    command = ("unshare", "--user", *flags)
    need_command(*command, sys.executable, "-c", "")
    root.parent.chmod(0o777)
    trained(root, *command)


def _unused() -> int:
    """Return a process id such that it and the hundred after it are unused."""
    used = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    return next(pid for pid in range(20_000, 32_000, 100) if used.isdisjoint(range(pid, pid + 100)))


def test_of_processes_with_the_proc_of_another(root: Path) -> None:
    """Nothing stands in ``/proc`` under the ids of the training and its worker."""
    command = (*_PIDS, "sh", "-c", f'echo {_unused()} > /proc/sys/kernel/ns_last_pid && "$0" "$@"; exit $?')
    need_command(*command, "true")
    trainings = Trainings.start(root, *command, trials=[{}, {"steps": [3], "load": "both", "single": False}])
    _, second = trainings.end()
    assert second.loaded == [2, 3]
    went_well(trainings.plans[1], second, kept=[1, 2, 3])


def test_two_trainings_in_one_folder(root: Path, tmp_path: Path) -> None:
    """Each has process ids of its own, so that the other may seem dead. The first one goes on, and ends."""
    need_command(*_CONTAINER, "true")
    root.mkdir()
    need_locks(root)
    first, second = (
        Trainings.start(
            root,
            *_CONTAINER,
            environment={FOLDER_VARIABLE: str(tmp_path / f"runtime {steps}")},
            hold=str(tmp_path / f"hold {steps}"),
            steps=steps,
            load="",
            single=False,
        )
        for steps in ([1, 2], [3])
    )
    try:
        hold = first.held()  # it has saved, and has the lock of the folder
        second.held().unlink()
        (report,) = second.end()
        assert not report.saved and report.errors[0].startswith("JobTakenError"), report
        hold.unlink()
        (report,) = first.end()
        assert report.saved == [1, 2], report
    finally:
        first.kill()
        second.kill()
    judge(root, [1, 2])


def test_an_attempt_is_not_dead_while_it_is_locked(root: Path) -> None:
    """Its holder is in another namespace, and has written nothing for two days."""
    need_command(*_CONTAINER, "true")
    root.mkdir()
    need_locks(root)
    attempts = open_attempts(root, time.time() - 2 * 86_400)
    try:
        (report,) = Trainings.start(root, *_CONTAINER, steps=[1], load="", single=False).end()
        assert report.saved == [1] and all(Path(attempt.path).exists() for attempt in attempts)
    finally:
        for attempt in attempts:
            attempt.discard()
    judge(root, [1])
