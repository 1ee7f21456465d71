"""A finding: one line of a diagnosis."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "slow", "risk", "fails"]
"""``ok``: nothing to do. ``slow``: saves work, and cost more than they could. ``risk``: saves work, and some failure of
the surroundings loses more than it has to. ``fails``: a save will fail."""


class Finding(NamedTuple):
    """One thing that was examined.

    Attributes:
        subject: The thing, such as "space" or "memory".
        level: The judgement.
        text: The facts.
        advice: The way to make it better; "" if there is nothing to do.
    """

    subject: str
    level: Level
    text: str
    advice: str = ""
