"""In-process restarts by the wrapper of the nvrx wheel: the state survives, and no resource leaks."""

from __future__ import annotations

import os
import socket
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import complete_steps
from support.inprocess import MOST_THREADS, Plan, Seen, run

RESTARTS = int(os.environ.get("ASYNCCKPT_TEST_RESTARTS", 8))
ENDS = ("committed", "ClosedError", "CheckpointError", "RankFailedError", "WorkerDiedError")

pytestmark = pytest.mark.usefixtures("forkserver")


def _restarted(tmp_path: Path, iterations: int, world: int = 2, **options: Any) -> list[list[Seen]]:
    """Run a job that restarts. Return the records of each rank that was not killed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    plan = Plan(str(tmp_path / "root"), str(tmp_path), iterations, port, **options)
    found = run(plan, world)
    assert not [each for each in found if isinstance(each, str)], found
    return [each for each in found if each]  # type: ignore[misc]


def check(ranks: list[list[Seen]], steps: list[int]) -> None:
    """Check that each iteration loads the newest save of all ranks, and that all ranks see the same save results."""
    for seen in chain(*ranks):
        assert not seen.loaded or (seen.is_right and seen.is_newest), seen
        for _, outcome in seen.before:
            assert outcome.split(":")[0] in ENDS, outcome
    for same in zip(*ranks, strict=False):
        assert len({(each.loaded, each.source) for each in same}) == 1, same
        # All ranks agree on each save whose result is known.
        known = [{step: end for step, end in each.before if not end.startswith("ClosedError")} for each in same]
        for step in set.intersection(*map(set, known)):
            assert len({each[step] == "committed" for each in known}) == 1, (step, known)
    assert {step for seen in chain(*ranks) for step, end in seen.before if end == "committed"} <= set(steps)


def check_holds(ranks: list[list[Seen]]) -> None:
    """Check that a restart leaks nothing.

    A rank may hold one segment, its worker, the exiting worker before, and the threads of a checkpointer that was not
    closed.
    """
    most = {"threads": MOST_THREADS, "workers": 2, "segments": 1}
    for seen in chain(*ranks):
        assert all(seen.holds[name] <= count for name, count in most.items()), seen
    for rank in ranks:
        descriptors = [seen.holds["descriptors"] for seen in rank]
        assert max(descriptors) - min(descriptors) <= 4, descriptors


@pytest.mark.timeout(300 + 10 * RESTARTS)
def test_every_restart_goes_on_from_memory(tmp_path: Path) -> None:
    ranks = _restarted(tmp_path, RESTARTS, seed=RESTARTS)
    assert [len(each) for each in ranks] == [RESTARTS + 1] * 2
    check(ranks, complete_steps(str(tmp_path / "root")))
    check_holds(ranks)
    assert not [seen for seen in chain(*ranks) if seen.loaded and seen.source != "memory"]
    assert sum(not seen.loaded for seen in ranks[0]) <= 1 + RESTARTS / 4  # the first, and failures on purpose


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    """The spare loads from the memory that the killed rank leaves."""
    first, other = _restarted(tmp_path, 2, 3, kill_at=1, spare=True)
    assert [seen.world for seen in first] == [2] * 3 and [seen.rank for seen in other] == [1]
    check([first[2:], other], complete_steps(str(tmp_path / "root")))
    assert other[0].source == "memory"


def test_fewer_ranks_go_on(tmp_path: Path) -> None:
    (ranks,) = _restarted(tmp_path, 2, kill_at=1)
    assert [seen.world for seen in ranks] == [2, 2, 1]
    check([ranks], complete_steps(str(tmp_path / "root")))
    assert ranks[2].source == "memory"
