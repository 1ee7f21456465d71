"""What a benchmark asks of something that saves."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.states import State

LIMIT_S = 300.0
"""Seconds after which a save is given up."""


def _always() -> bool:
    return True


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Pending:
    """A save under way."""

    wait: Callable[[], object] = _nothing
    """Waits until it is written, or as far as it gets without the trainer."""
    finish: Callable[[], object] = _nothing
    """What the trainer has left to do then, which is blocked time too; most have nothing."""
    poll: Callable[[], bool] = _always
    """What a trainer calls between its steps instead of both: whether it has ended; does what is left then."""


class Contestant(ABC):
    """Something that saves. The order of calls, all by the trainer's thread:

    ``prepare`` once; then, one after the other, ``save``s with numbers 1, 2, 3, ... Before a state changes that was
    given to ``save``, ``changing`` is entered, and left when it has changed. What one ``Pending`` says is waited for
    before the next ``save``. ``load`` when a save has ended. ``close`` in the end.
    """

    fsyncs = True
    """Whether it syncs its files itself; the suite does it for those that do not, and counts it."""
    shares_each = False
    """Whether it holds a piece of shared memory for each tensor, of which a process can have so many."""
    blocks = False
    """Whether its ``save`` returns when all is written: then there is nothing to overlap with."""

    def __init__(self, root: str) -> None:
        """``root``: a folder of its own, which is there."""
        self.root = root

    def path(self, number: int) -> str:
        """Where that checkpoint is, a folder."""
        return f"{self.root}/{number}"

    def prepare(self, state: State) -> None:
        """Whatever it can do before its first save. By default nothing."""
        return

    @abstractmethod
    def save(self, number: int, state: State) -> Pending:
        """Begin to save ``state`` into ``path(number)``."""

    def changing(self) -> AbstractContextManager[object]:
        """For those that copy after ``save`` has returned: entered when that is done."""
        return nullcontext()

    @abstractmethod
    def load(self, number: int, state: State) -> State:
        """What ``path(number)`` has; ``state``, of the same structure, may be used for it."""

    def remove(self, number: int) -> None:
        """Checkpoint and all."""
        shutil.rmtree(self.path(number), ignore_errors=True)

    def close(self) -> None:
        """End all that it has started. By default nothing."""
        return


def be_a_job() -> None:
    """Some only save in a job of ranks: this is one of one rank."""
    if not dist.is_initialized():
        store = tempfile.mkdtemp()
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backends, init_method=f"file://{store}/store", rank=0, world_size=1)
        atexit.register(shutil.rmtree, store, ignore_errors=True)
        atexit.register(dist.destroy_process_group)
