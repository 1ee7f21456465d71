"""Whose turn it is in an engine: one thread's at a time."""

from __future__ import annotations

import os
import threading

from asyncckpt.errors import CheckpointError


class Turn:
    """One thread at a time is in an engine."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.RLock(), os.getpid()

    def take(self) -> threading.RLock:
        """The lock. It is left whatever happens: no code of ours does that.

        Raises ``CheckpointError`` where this thread has it: all would be found as the interrupted call has left it.
        """
        if self._owner != os.getpid():  # a thread that is not in this fork may have it for ever
            self._lock, self._owner = threading.RLock(), os.getpid()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise CheckpointError(
                "this was called out of another call of the same checkpointer, in the same thread: by a signal handler,"
                " or while it asks the state for its values; have the handler set a flag, and save when that call has"
                " returned"
            )
        return self._lock
