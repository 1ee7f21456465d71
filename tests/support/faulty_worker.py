"""A worker that fails at a named point: ``faulty_worker.py POINT:ACTION[:NTH] JSON``.

Points:

- ``start``
- the points of ``faulty_storage.py``: ``begin``, ``create``, ``link``, ``write``, ``sync``, ``finalize``, and
  ``finalized`` after that. If another rank finalizes, ``finalize`` comes after the report of this rank.
- ``report``: before the report to the first rank
- ``prune``: before old checkpoints are removed

Actions at the NTH time only, by default the first: ``enospc`` and ``eio`` (an error), ``lose`` (the connection to the
other ranks), ``kill`` (SIGKILL), ``orphan`` (a warning, and SIGKILL for the trainer), ``warn``, ``stop`` (SIGSTOP).

Action from the NTH time on: ``hold`` (wait until the file ``$ASYNCCKPT_TEST_GATE`` exists).

``stop`` and ``hold`` first make the file ``$ASYNCCKPT_TEST_GATE.reached``.

Actions at ``start``: ``nobody`` (give up root), ``poor`` (the first check for memory finds too little), ``unlinked``
(no file can be linked).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from asyncckpt import errors
from asyncckpt.extension import storage_for
from asyncckpt.ranks import rounds
from asyncckpt.shm import budget
from asyncckpt.storage.file_system import translated
from asyncckpt.storage.history import prune
from asyncckpt.worker import __main__ as worker
from asyncckpt.worker import saves
from asyncckpt.worker.attempt import Attempt

# This file is run as a script, also by trainers that do not have the tests on their path.
sys.path.append(str(Path(__file__).parent.parent))

from support.faulty_storage import FaultyStorage

point, action, nth = (*sys.argv[1].split(":"), "1")[:3]
seen = 0


def reach(here: str, path: str) -> None:
    global seen
    if here != point:
        return
    seen += 1
    if seen < int(nth) or (seen > int(nth) and action != "hold"):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action in ("orphan", "warn"):
        logging.warning("as the test wants")
        if action == "orphan":
            os.kill(os.getppid(), signal.SIGKILL)
        return
    if action == "lose":
        raise errors.WorkerDiedError("the connection broke (as the test wants)", rank=0)
    if action in ("stop", "hold") and (gate := os.environ.get("ASYNCCKPT_TEST_GATE")):
        open(gate + ".reached", "w").close()
    if action == "stop":
        # Signal this thread, so that it stops here. Any thread may handle a signal to the process.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return
    if action == "hold":
        gate = os.environ["ASYNCCKPT_TEST_GATE"]
        deadline = time.monotonic() + 60
        # The folder of a passed test is removed, while a worker may still have files to write.
        while os.path.isdir(os.path.dirname(gate)) and not os.path.exists(gate) and time.monotonic() < deadline:
            time.sleep(0.005)
        return
    with translated(f"{here} (as the test wants)", path):
        code = {"enospc": errno.ENOSPC, "eio": errno.EIO}[action]
        raise OSError(code, os.strerror(code))


class FaultyRounds(rounds.Rounds):
    reported: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def report_soon(self, name: str, value: bytes, timeout: float) -> Future[None]:
        try:
            reach("report", name)
        except errors.WorkerDiedError:
            self._behind._drop()  # the connection is broken
        reporting = super().report_soon(name, value, timeout)
        reporting.add_done_callback(lambda _: self.reported[name].set())
        return reporting

    def outcome(self, name: str, timeout: float, limit: float = 0.0) -> bytes | errors.CheckpointError:
        if point == "finalize":
            self.reported[name].wait(60)  # the wait for the outcome begins with the save
        reach("finalize", name)
        return super().outcome(name, timeout, limit)


class FaultyAttempt:
    """Attempts of the first rank. It reports to itself, without a connection."""

    real_seal = Attempt.seal

    def seal(self: Attempt) -> bytes:  # type: ignore[misc]
        report = FaultyAttempt.real_seal(self)
        if self.request.rank == 0:
            with contextlib.suppress(errors.WorkerDiedError):
                reach("report", self.request.path)
        return report


def faulty_prune(root: str, keep_last: int, is_recent: Callable[[int], bool]) -> None:
    reach("prune", root)
    prune(root, keep_last, is_recent)


if __name__ == "__main__":
    if action == "nobody":
        os.setuid(65534)
    if action == "poor":
        require = budget.require

        def refuse(nbytes: int, purpose: str, hint: str, *_: Any) -> None:
            budget.require = require
            raise errors.OutOfMemoryError(f"no memory for {purpose} (as the test wants); {hint}")

        setattr(budget, "require", refuse)  # noqa: B010
    if action == "unlinked":

        def refuse_link(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        setattr(os, "link", refuse_link)  # noqa: B010
    faulty = lambda path, **options: FaultyStorage(storage_for(path, **options), reach)  # noqa: E731
    setattr(worker, "storage_for", faulty)  # noqa: B010
    setattr(saves, "Rounds", FaultyRounds)  # noqa: B010
    setattr(Attempt, "seal", FaultyAttempt.seal)  # noqa: B010
    setattr(saves, "prune", faulty_prune)  # noqa: B010
    sys.exit(worker.main(sys.argv[2:]))
