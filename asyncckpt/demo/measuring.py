"""Measures what saves cost a training: blocks of steps with and without a save alternate in one process.

Each block with a save goes on until the save is durable, so that all that it costs falls into its block.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.demo.costs import DCP, OURS, Block, Pair
from asyncckpt.demo.training import Training
from asyncckpt.storage import step_folder

_STEPS = 2  # of a block, at least
_LONGER = 1.3  # a round may take so much longer than the longest so far

Saving = Callable[[], Callable[[], bool]]
"""Begins a save. What it returns says whether the save is durable."""


def measure(
    training: Training,
    checkpointer: Checkpointer,
    folder: str,
    most: int,
    deadline: float,
    progress: Callable[[int, int], None],
) -> dict[str, list[Pair]]:
    """Train on, with saves by both contestants in turns.

    Args:
        training: What is trained.
        checkpointer: Saves for us; it is prepared.
        folder: Where DCP is to save.
        most: Rounds, of which each gives a pair for each contestant.
        deadline: Of ``time.monotonic``: no round begins that would probably end later. There is one round in any case.
        progress: Told after each round how many are done, and how many there probably are.

    Returns:
        The pairs of each contestant.
    """
    clocks = _Clocks()
    contestants = _saves_of(training, checkpointer, folder)
    pairs: dict[str, list[Pair]] = {name: [] for name in contestants}
    before = _block(training, clocks)
    for save in contestants.values():  # the first save of each takes longer, and is not counted
        _block(training, clocks, save)
        before = _block(training, clocks)
    longest = 0.0
    for number in range(1, most + 1):
        begun = time.monotonic()
        for name, save in contestants.items():
            saving, after = _block(training, clocks, save), _block(training, clocks)
            pairs[name].append(Pair(before, saving, after))
            before = after
        _keep_newest(folder)  # between two blocks: it is part of none
        now = time.monotonic()
        longest = max(longest, now - begun)
        more = int(max(0.0, deadline - now) / (_LONGER * longest))
        progress(number, min(most, number + more))
        if not more:
            break
    return pairs


def _block(training: Training, clocks: _Clocks, save: Saving | None = None) -> Block:
    """Some steps, after a save if there is one to be made."""
    begun = clocks.read()
    is_durable = save() if save is not None else _nothing_to_wait_for
    call_s = time.perf_counter() - begun[0] if save is not None else 0.0
    steps = 0
    while steps < _STEPS or not is_durable():
        training.train()
        steps += 1
    wall_s, trainer_s, worker_s = (end - begin for begin, end in zip(begun, clocks.read(), strict=True))
    return Block(steps, wall_s, trainer_s, worker_s, call_s)


def _nothing_to_wait_for() -> bool:
    return True


def _saves_of(training: Training, checkpointer: Checkpointer, folder: str) -> dict[str, Saving]:
    """How each contestant saves."""

    def save() -> Callable[[], bool]:
        handle = checkpointer.save(training.step, training.state())
        return lambda: handle.done() and bool(handle.result())  # which raises what the save failed with

    def save_with_dcp() -> Callable[[], bool]:
        save_by_dcp(training.state(), checkpoint_id=step_folder(folder, training.step))
        return _nothing_to_wait_for

    warnings.filterwarnings("ignore", "torch.distributed is")  # DCP's, that there is one process only
    return {OURS: save, DCP: save_with_dcp}


def _keep_newest(folder: str) -> None:
    """Remove the older ones of DCP's checkpoints. Checkpointers do the same by themselves."""
    for old in sorted(Path(folder).iterdir())[:-1]:
        shutil.rmtree(old)


class _Clocks:
    """The clock, and what this process and its worker have computed."""

    def __init__(self) -> None:
        """The worker must run: it is the only child of this process."""
        (worker,) = psutil.Process().children()
        clock = ctypes.c_int()
        # psutil counts in hundredths of a second, and a save takes only a few of these. This clock is exact.
        if trouble := ctypes.CDLL(None).clock_getcpuclockid(worker.pid, ctypes.byref(clock)):
            raise OSError(trouble, os.strerror(trouble))
        self._worker = clock.value

    def read(self) -> tuple[float, float, float]:
        """The time, and the seconds that this process and its worker have computed."""
        return time.perf_counter(), time.process_time(), time.clock_gettime(self._worker)
