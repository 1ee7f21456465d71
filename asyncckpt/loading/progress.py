"""A progress bar on the terminal, for long loads and checks."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncckpt.errors import unless_interrupt

if TYPE_CHECKING:
    from asyncckpt.loading.bar import Bar

logger = logging.getLogger(__name__)


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Progress in bytes on stderr, if stderr is a terminal and tqdm is installed.

    The bar disappears at the end of the context. The methods may be called by any thread, and never raise. If the
    terminal fails, the bar is dropped.
    """

    def __init__(self, what: str, *, delay: float = 0.1, shown: bool = True) -> None:
        """Make a bar.

        Args:
            what: The text before the bar.
            delay: Seconds before the bar is shown; more than 0.
            shown: False: never show a bar.
        """
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        self.nbytes = 0
        """Number of bytes done, with or without a bar."""
        with self._harmless():
            if shown and sys.stderr is not None and sys.stderr.isatty():
                from asyncckpt.loading.bar import Bar

                # miniters=1 makes tqdm look at the clock each time. With its own estimate, and no thread to correct the
                # estimate, the bar would stop if storage becomes slow.
                self._bar = Bar(total=0, unit="B", unit_scale=True, desc=what, leave=False, delay=delay, miniters=1)

    @property
    def shown(self) -> bool:
        """Return whether there is a bar. The delay may still hide the bar."""
        return self._bar is not None

    def expect(self, nbytes: int) -> None:
        """Add ``nbytes``, which may be negative, to the total."""
        with self._harmless():
            if self._bar is not None:
                self._bar.total = (self._bar.total or 0) + nbytes

    def update(self, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes that are done."""
        with self._harmless():
            self.nbytes += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)

    def __exit__(self, *_: object) -> None:
        with self._harmless():
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Let one thread in at a time, and suppress errors."""
        with self._lock:
            try:
                yield
            except unless_interrupt(Exception) as error:
                logger.debug("there is no progress bar: %r", error)
                if self._bar is not None:
                    self._bar.disable = True  # otherwise tqdm tries again when the bar is collected
                    self._bar.set_lock(threading.RLock())  # after an error tqdm still holds the previous lock
                    self._bar = None
