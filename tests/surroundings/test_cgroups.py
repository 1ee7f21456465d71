"""A container with too little memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
from support.cgroups import MIB, enter, memory_cgroup
from support.surroundings import Trainings, judge, refused


def test_too_little_memory_for_an_image(root: Path) -> None:
    """The states of the training have 384 MiB, beside torch. An image has 128 MiB, and 256 MiB have to stay free."""
    with memory_cgroup() as (folder, limit):
        (folder / limit).write_text(str(800 * MIB))
        refused(root, text="GiB are left", in_child=partial(enter, folder), mib=128, steps=[1])


def test_the_worker_is_killed_for_its_memory(root: Path, tmp_path: Path) -> None:
    """The save that is under way fails, and the next one starts another worker."""
    with memory_cgroup() as (folder, limit):
        trainings = Trainings.start(root, hold=str(tmp_path / "hold"), steps=[1, 2, 3], single=False)
        try:
            hold = trainings.held()
            (training,) = psutil.Process(trainings.process.pid).children()
            (worker,) = training.children()
            (folder / limit).write_text("0")
            enter(folder, worker.pid)
            hold.unlink()
            (report,) = trainings.end()
        finally:
            trainings.kill()
    assert report.saved == [1, 3] and report.loaded == [3], report
    assert len(report.errors) == 1 and "was killed by SIGKILL" in report.errors[0], report
    judge(root, [1, 3])
