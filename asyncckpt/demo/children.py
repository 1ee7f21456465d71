"""The training processes as the demo sees them: it starts them, listens to them, and ends what is left of them."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

_SILENCE_S = 300.0
_LINES_S = 4.0  # between the lines of progress where there is no bar


class Child:
    """A process forked from this one, with what it has reported so far."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any, is_killed: bool = False) -> None:
        """Start it.

        Args:
            name: For messages.
            target: Is called with the arguments, and with a connection as ``reports``.
            is_killed: It ends by SIGKILL, and reports "killed" just before that.
        """
        # A fork has torch imported, which takes seconds on a busy machine.
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self._name, self._is_killed = name, is_killed
        self._process = context.Process(target=target, args=arguments, kwargs={"reports": theirs}, daemon=True)
        self._process.start()
        theirs.close()
        self.losses: dict[int, float] = {}
        """Of each step."""
        self.said: dict[str, Any] = {}
        """What else was reported, the newest by its word."""

    def listen(self) -> str | None:
        """Take the next report. Returns its word; None: it has ended.

        Exits where it has failed, which it has shown itself.
        """
        try:
            word, said = self.connection.recv()
        except EOFError:
            self._check_end()
            return None
        if word == "loss":
            step, self.losses[step] = said[0], said[1]
        else:
            self.said[word] = said
        return str(word)

    def _check_end(self) -> None:
        self._process.join()
        # The kernel, too, kills by SIGKILL, where memory is short; then nothing was said of it.
        is_foreseen = "killed" in self.said or not self._is_killed
        if not is_foreseen or self._process.exitcode != (-signal.SIGKILL if self._is_killed else 0):
            sys.exit(f"asyncckpt demo: {self._name} ended with status {self._process.exitcode}")

    def end(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def listen_until(children: Sequence[Child], word: str | None, progress: Callable[[], None]) -> None:
    """Take reports until each of ``children`` has reported ``word``, or, if that is None, has ended.

    Args:
        children: Whose.
        word: What is waited for.
        progress: Called after each report.
    """
    waiting = {child.connection: child for child in children}
    while waiting:
        if not (ready := wait(list(waiting), _SILENCE_S)):
            sys.exit(f"asyncckpt demo: nothing was heard from a trainer for {_SILENCE_S:.0f} s")
        for connection in ready:
            heard = waiting[connection].listen()  # type: ignore[index]
            progress()
            if heard in (word, None):
                del waiting[connection]  # type: ignore[arg-type]


class PhaseProgress:
    """A line every few seconds, on stderr, of how far something is."""

    def __init__(self, what: str, unit: str) -> None:
        """Say nothing yet; ``what`` is done stands in the line, and in which ``unit`` that is counted."""
        self._what, self._unit = what, unit
        self._shown_at = time.monotonic()

    def show(self, done: int, total: int) -> None:
        """Note that so much is done, of so much."""
        if time.monotonic() - self._shown_at > _LINES_S:
            print(f"  {self._what}: {done} of {total} {self._unit}", file=sys.stderr, flush=True)
            self._shown_at = time.monotonic()
