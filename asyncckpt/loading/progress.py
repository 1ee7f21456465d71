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
    """How many bytes are done, on stderr, if that is a terminal and tqdm is there. It goes at the end of the context.

    The methods are for any thread, and raise nothing: when the terminal fails, there is no bar any more.
    """

    def __init__(self, what: str, *, delay: float = 0.1, shown: bool = True) -> None:
        """Make a bar.

        Args:
            what: Stands before the bar.
            delay: Seconds, more than 0, before which nothing is shown.
            shown: False: there is no bar at all.
        """
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        self.nbytes = 0
        """How many are done, whether that is shown or not."""
        with self._harmless():
            if shown and sys.stderr is not None and sys.stderr.isatty():
                from asyncckpt.loading.bar import Bar

                # miniters: it looks at the clock each time. By tqdm's guess, and with no thread to correct that, it
                # would stand still where storage becomes slow.
                self._bar = Bar(total=0, unit="B", unit_scale=True, desc=what, leave=False, delay=delay, miniters=1)

    @property
    def shown(self) -> bool:
        """Whether there is a bar, or may be one once the delay is over."""
        return self._bar is not None

    def expect(self, nbytes: int) -> None:
        """So many bytes more are to be done, or less."""
        with self._harmless():
            if self._bar is not None:
                self._bar.total = (self._bar.total or 0) + nbytes

    def update(self, nbytes: int) -> None:
        """So many bytes more are done."""
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
        """One thread at a time, and without errors."""
        with self._lock:
            try:
                yield
            except unless_interrupt(Exception) as error:
                logger.debug("there is no progress bar: %r", error)
                if self._bar is not None:
                    self._bar.disable = True  # or it tries again when it is collected
                    self._bar.set_lock(threading.RLock())  # after an error tqdm still holds the one it had
                    self._bar = None
