"""A trainer that runs real steps of a small model, and changes the tensors of the state in each step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from bench.states import State, tensors_of

WIDTH = 512
BATCH = 128
CYCLE = 100
"""Marks are numbers below this one, because bf16 holds them exactly."""


class Trainer:
    """A trainer with a small model and a large state.

    A change of all bytes would be another benchmark. Each step sets the first and the last element of each tensor to
    the step number modulo ``CYCLE``. So a torn copy shows, between tensors or within one. Each tensor changes, because
    an unchanged one may be written only once.
    """

    def __init__(self, state: State, device: str, changing_values: int = 0) -> None:
        self.state = state
        self.step_number = 0
        self._device = torch.device(device)
        self._changing_values = changing_values
        self._marks = marks_of(state)
        torch._foreach_zero_(self._marks)
        self._mark = 0
        self._model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        ).to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        self._batch = torch.randn(BATCH, WIDTH, device=self._device)

    def step(self, changing: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Run one training step. ``changing()`` is entered while parameters and state change."""
        loss = torch.nn.functional.mse_loss(self._model(self._batch), self._batch)
        torch.autograd.backward(loss)
        with changing():
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.change()

    def change(self) -> None:
        """Change the state as a step does."""
        self.step_number += 1
        mark = self.step_number % CYCLE
        torch._foreach_add_(self._marks, float(mark - self._mark))
        self._mark = mark
        self.state["step"] = self.step_number
        for number in range(self._changing_values):
            self.state["values"][f"value.{number}"] = self.step_number + number / (self._changing_values + 1)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device.type).synchronize(self._device)

    def set_marks(self, state: State) -> None:
        """Set the current marks in another state of this structure."""
        for theirs, ours in zip(marks_of(state), self._marks, strict=True):
            theirs.copy_(ours)


def marks_of(state: State) -> list[torch.Tensor]:
    """Return views of the elements that change."""
    tensors = [tensor.view(-1) for tensor in tensors_of(state) if tensor.numel()]
    return [tensor[:1] for tensor in tensors] + [tensor[-1:] for tensor in tensors if tensor.numel() > 1]


def are_of(state: State, step_number: int) -> bool:
    """Return whether all marks in ``state`` belong to step ``step_number``."""
    return all(mark.item() == step_number % CYCLE for mark in marks_of(state))
