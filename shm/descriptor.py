"""A descriptor that somebody owns."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class Descriptor(io.FileIO):
    """A descriptor, until it is closed: ``Descriptor(fd)``. ``close`` is safe to call twice.

    No exception of a signal handler or of another thread comes in the midst of that, or of the making: none is raised
    in what is written in C. So neither may be written here.
    """

    @classmethod
    def of(cls, make: Callable[..., int], *given: Any) -> Descriptor:
        """The descriptor that ``make``, which is written in C, returns for what is ``given``.

        No such exception comes in between. Raises as ``make``.
        """
        return next(map(cls, map(make, *((each,) for each in given))))

    def fileno(self) -> int:
        """Its number; -1: it is closed."""
        return -1 if self.closed else super().fileno()
