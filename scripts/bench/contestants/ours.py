"""asyncckpt with one checkpointer for the whole run, as in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import asyncckpt
from asyncckpt.storage import step_folder
from bench.contestants.contestant import Contestant, Pending
from bench.states import State

LIMIT_S = 600.0


class Ours(Contestant):
    """asyncckpt's defaults: ``save`` returns when the tensors are copied."""

    def __init__(self, root: str, overlap: bool = False) -> None:
        super().__init__(root)
        self._overlap = overlap
        self._checkpointer = asyncckpt.Checkpointer(root, asyncckpt.Config(overlap=overlap))
        self._newest: asyncckpt.Save | None = None

    @classmethod
    def overlapping(cls, root: str) -> Ours:
        """Use ``Config(overlap=True)``: the copy runs beside the next step, and the optimizer waits for it."""
        return cls(root, overlap=True)

    def path(self, number: int) -> str:
        return step_folder(self._checkpointer.root, number)

    def prepare(self, state: State) -> None:
        self._checkpointer.prepare(state)

    def save(self, number: int, state: State) -> Pending:
        save = self._newest = self._checkpointer.save(number, state)

        def poll() -> bool:
            if save.done():
                save.result()
            return save.done()

        return Pending(wait=save.result, poll=poll)

    def changing(self) -> AbstractContextManager[object]:
        """Wait for staging, as ``Checkpointer.guard`` makes an optimizer do. The trainer changes other tensors, too."""
        return self._staged() if self._overlap else nullcontext()

    @contextmanager
    def _staged(self) -> Iterator[None]:
        if self._newest is not None:
            self._newest.synchronize_staging(LIMIT_S)
        yield

    def load(self, number: int, state: State) -> State:
        self._checkpointer.load(state, number, memory=False)
        return state

    def close(self) -> None:
        self._checkpointer.close()
