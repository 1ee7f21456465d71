"""Ranks for a training with a peer package, forked from a process that has imported the package."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist


def _main(rank: int, world: int, meeting: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        function(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def on_ranks(world: int, function: Callable[..., Any], *args: Any, folder: Path, codes: set[int] | None = None) -> None:
    """Run the function on the ranks of a job, one process each. Each exit code has to be in ``codes``; None: 0."""
    fork = get_context("fork")
    meeting = str(folder / f"meeting-{os.urandom(4).hex()}")
    ranks = [fork.Process(target=_main, args=(rank, world, meeting, function, args)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        if rank.exitcode is None:
            rank.kill()
    found = [rank.exitcode for rank in ranks]
    assert set(found) <= (codes or {0}), found
