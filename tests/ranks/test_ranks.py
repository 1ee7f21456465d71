"""Exchanges between ranks outside a save, at any length."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import QUICK, run

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.extension import ranks_of

pytestmark = pytest.mark.usefixtures("forkserver")

_LENGTHS = (0, 1, 230, 248, 249, 5000)


def _ask() -> list[str]:
    rank, said = dist.get_rank(), list[str]()
    ranks = ranks_of()
    for length in _LENGTHS:
        of_each = [b"x" * (length + other) for other in range(3)]
        assert ranks.gather(of_each[rank]) == of_each
        assert ranks.gather_to_first(of_each[rank]) == (of_each if rank == 0 else [])
        assert ranks.from_first(lambda: of_each[rank]) == of_each[0]  # noqa: B023
        assert ranks.on_all(lambda: rank) == rank
        for which in (0, 2):
            words = "no" * length

            def fail(which: int = which, words: str = words) -> None:
                if rank == which:
                    raise ValueError(words)

            for ask in (ranks.on_all, ranks.from_first):
                try:
                    ask(fail)
                except CheckpointError as error:
                    assert words in str(error)
                    said.append(f"{ask.__name__} {which}")
    return said


def test_all_hear_what_each_says(tmp_path: Path) -> None:
    expected = ["on_all 0", "from_first 0", "on_all 2"] * len(_LENGTHS)
    assert run(3, _ask, folder=tmp_path) == [expected] * 3


class _Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("as the test wants")


def _interrupted() -> list[str]:
    """Gather a value that fails to pickle. Then have a signal handler raise while the other rank is late."""
    ranks, said = ranks_of(), list[str]()
    for ask in (ranks.gather, ranks.gather_to_first):
        try:
            ask(_Unpicklable())
        except RuntimeError as error:
            said.append(str(error))
    if dist.get_rank() == 0:

        def handle(*_: object) -> None:
            raise RuntimeError("the job is preempted")

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    else:
        time.sleep(3)
    try:
        ranks.gather("here")
    except RuntimeError as error:
        said.append(str(error))
    except CheckpointError as error:
        said.append(type(error).__name__)
    return said


def test_an_error_of_this_rank_is_no_loss_of_another(tmp_path: Path) -> None:
    first, second = run(2, _interrupted, folder=tmp_path)
    assert first == ["as the test wants"] * 2 + ["the job is preempted"]
    assert second[:2] == ["as the test wants"] * 2


def _ask_of_another_default_device() -> list[str]:
    with torch.device("meta"):
        return _ask()


def test_another_default_device(tmp_path: Path) -> None:
    expected = ["on_all 0", "from_first 0", "on_all 2"] * len(_LENGTHS)
    assert run(3, _ask_of_another_default_device, folder=tmp_path) == [expected] * 3


def _save_and_load(root: Path) -> None:
    torch.set_default_device("meta")
    into: dict[str, Any] = {"w": torch.zeros(10, device="cpu"), "step": 0}
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(10.0, device="cpu"), "step": 1}).result(60)
        checkpointer.load(into)
    assert into["step"] == 1 and torch.equal(into["w"], torch.arange(10.0, device="cpu"))


def test_ranks_with_another_default_device(tmp_path: Path) -> None:
    run(2, _save_and_load, tmp_path / "root", folder=tmp_path)
