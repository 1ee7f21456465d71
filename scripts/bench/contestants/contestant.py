"""The interface of a contestant: a library or function that saves checkpoints."""

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
"""Maximum time of a save in seconds."""


def _always() -> bool:
    return True


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Pending:
    """A save in flight."""

    wait: Callable[[], object] = _nothing
    """Waits until the checkpoint is written, as far as the save gets without the trainer."""
    finish: Callable[[], object] = _nothing
    """The trainer's remaining work after ``wait``. Counts as blocked time. Most contestants have none."""
    poll: Callable[[], bool] = _always
    """Called between steps in place of ``wait`` and ``finish``. Returns whether the save has ended, and finishes it."""


class Contestant(ABC):
    """A library or function that saves checkpoints.

    The trainer's thread makes all calls, in this order: ``prepare`` once, then ``save`` with numbers 1, 2, 3, ...,
    one save at a time. Each ``Pending`` is waited for before the next ``save``. The trainer changes a state that was
    given to ``save`` only inside ``changing``. ``load`` follows when a save has ended. ``close`` is last.
    """

    fsyncs = True
    """Whether the contestant syncs its files. If not, the suite syncs them and counts the time."""
    shares_each = False
    """Whether each tensor takes a shared memory mapping of its own. A process has a limited number of mappings."""
    blocks = False
    """Whether ``save`` returns only when the checkpoint is written. Then no training overlaps with the save."""

    def __init__(self, root: str) -> None:
        """``root``: an existing folder for this contestant alone."""
        self.root = root

    def path(self, number: int) -> str:
        """Return the folder of checkpoint ``number``."""
        return f"{self.root}/{number}"

    def prepare(self, state: State) -> None:
        """Do the work that is possible before the first save. Does nothing by default."""
        return

    @abstractmethod
    def save(self, number: int, state: State) -> Pending:
        """Begin to save ``state`` into ``path(number)``."""

    def changing(self) -> AbstractContextManager[object]:
        """Return a context for changes of the state. Entering it waits for copies that outlast ``save``."""
        return nullcontext()

    @abstractmethod
    def load(self, number: int, state: State) -> State:
        """Return the state in ``path(number)``. ``state`` has the same structure and may be filled in place."""

    def remove(self, number: int) -> None:
        """Delete checkpoint ``number``."""
        shutil.rmtree(self.path(number), ignore_errors=True)

    def close(self) -> None:
        """End all processes and threads of the contestant. Does nothing by default."""
        return


def be_a_job() -> None:
    """Create a process group of one rank, because some contestants save only in a distributed job."""
    if not dist.is_initialized():
        store = tempfile.mkdtemp()
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backends, init_method=f"file://{store}/store", rank=0, world_size=1)
        atexit.register(shutil.rmtree, store, ignore_errors=True)
        atexit.register(dist.destroy_process_group)
