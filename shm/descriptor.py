"""A descriptor that somebody owns."""

from __future__ import annotations

import io


class Descriptor(io.FileIO):
    """A descriptor, until it is closed: ``Descriptor(fd, "rb")``. ``close`` is safe to call twice.

    No exception of a signal handler or of another thread comes in the midst of that, or of the making: none is raised
    in what is written in C. So neither may be written here.
    """

    def fileno(self) -> int:
        """Its number; -1: it is closed."""
        return -1 if self.closed else super().fileno()
