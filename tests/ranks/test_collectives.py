"""What ranks ask each other outside a save, however long it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks import run

from asyncckpt.errors import CheckpointError
from asyncckpt.ranks.collectives import from_first, gather, gather_to_first, on_all

pytestmark = pytest.mark.usefixtures("forkserver")

_LENGTHS = (0, 1, 230, 248, 249, 5000)


def _ask() -> list[str]:
    rank, said = dist.get_rank(), list[str]()
    for length in _LENGTHS:
        of_each = [b"x" * (length + other) for other in range(3)]
        assert gather(of_each[rank]) == of_each
        assert gather_to_first(of_each[rank]) == (of_each if rank == 0 else [])
        assert from_first(lambda: of_each[rank]) == of_each[0]  # noqa: B023
        assert on_all(lambda: rank) == rank
        for which in (0, 2):
            words = "no" * length

            def fail(which: int = which, words: str = words) -> None:
                if rank == which:
                    raise ValueError(words)

            for ask in (on_all, from_first):
                try:
                    ask(fail)
                except CheckpointError as error:
                    assert words in str(error)
                    said.append(f"{ask.__name__} {which}")
    return said


def test_all_hear_what_each_says(tmp_path: Path) -> None:
    expected = ["on_all 0", "from_first 0", "on_all 2"] * len(_LENGTHS)
    assert run(3, _ask, folder=tmp_path) == [expected] * 3
