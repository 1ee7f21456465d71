"""``torch.save`` into a file, followed by an fsync."""

from __future__ import annotations

import os

import torch

from bench.contestants.contestant import Contestant, Pending
from bench.states import State


class TorchSave(Contestant):
    blocks = True

    def save(self, number: int, state: State) -> Pending:
        os.makedirs(self.path(number))
        write(f"{self.path(number)}/state.pt", state)
        return Pending()

    def load(self, number: int, state: State) -> State:
        return dict(torch.load(f"{self.path(number)}/state.pt", mmap=True))


def write(path: str, state: State) -> None:
    """Save a state, and wait until the file is on storage."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
