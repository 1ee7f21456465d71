"""A listener for events."""

from __future__ import annotations

from asyncckpt.events import Event


class Heard:
    """Records the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def phases(self, step: int | None) -> list[str]:
        """Return the phases of a step, in the order of their events."""
        return [event.phase for event in self.events if event.step == step]


all_heard = Heard()
