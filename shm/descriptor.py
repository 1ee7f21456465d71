"""A descriptor that somebody owns."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any


class Descriptor(io.FileIO):
    """A descriptor of memory or of a lock, until it is closed: ``Descriptor(fd)``. ``close`` is safe to call twice.

    No exception of a signal handler or of another thread comes in the midst of the making, because none is raised in
    what is written in C. So the making may not be written here.
    """

    @classmethod
    def of(cls, make: Callable[..., int], *given: Any) -> Descriptor:
        """The descriptor that ``make``, which is written in C, returns for what is ``given``.

        No such exception comes in between. Raises as ``make``.
        """
        return next(map(cls, map(make, *((each,) for each in given))))

    def close(self) -> None:
        """Close it, as the function ``close``."""
        with contextlib.suppress(OSError):
            super().close()

    def fileno(self) -> int:
        """Its number; -1: it is closed."""
        return -1 if self.closed else super().fileno()


def close(fd: int) -> None:
    """Close a descriptor that no file was written through. Whatever the kernel says, the descriptor is closed then."""
    with contextlib.suppress(OSError):
        os.close(fd)
