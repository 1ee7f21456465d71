"""The step of a save that its caller does not report as saved before it is durable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DeferredStep(int):
    """A step whose checkpoint may become durable later: the worker that completes the step names it as the latest.

    The driver of a job gives it to the workers in the place of verl's ``int``. Of any other step they have to return
    when it is durable: the caller will name it at once.
    """

    parts: tuple[str, ...]
    """The folders that make up the step, such as ``actor`` and ``critic``."""

    def __new__(cls, step: int, parts: Sequence[str]) -> DeferredStep:
        new = super().__new__(cls, step)
        new.parts = tuple(parts)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.parts)
