"""A worker that fails at a named point: ``faulty_worker.py POINT:ACTION[:NTH] JSON``.

Points: ``start``, ``begin``, ``create``, ``write``, ``sync``, ``publish`` (before it), ``published`` (after it).
Actions: ``enospc`` and ``eio`` (an error, the NTH time only, by default the first), ``kill`` (SIGKILL, likewise),
``hold`` (every time: wait until the file ``$ASYNCCKPT_TEST_GATE`` exists), ``nobody`` (at ``start``: give up root).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from typing import Any

from asyncckpt.worker import __main__ as worker
from asyncckpt.worker import storage

point, action, nth = (*sys.argv[1].split(":"), "1")[:3]
seen = 0


def reach(here: str, path: str) -> None:
    global seen
    if here != point:
        return
    seen += 1
    if seen != int(nth) and action != "hold":
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hold":
        deadline = time.monotonic() + 60
        while not os.path.exists(os.environ["ASYNCCKPT_TEST_GATE"]) and time.monotonic() < deadline:
            time.sleep(0.005)
        return
    with storage.translated(f"{here} (as the test wants)", path):
        code = {"enospc": errno.ENOSPC, "eio": errno.EIO}[action]
        raise OSError(code, os.strerror(code))


class FaultyFile(storage.OutputFile):
    def write(self, data: memoryview, offset: int) -> None:
        reach("write", self.path)
        super().write(data, offset)

    def sync(self) -> None:
        reach("sync", self.path)
        super().sync()


class FaultyStorage(storage.LocalStorage):
    def begin(self, final: str, attempt: str, nbytes: int) -> str:
        reach("begin", final)
        return super().begin(final, attempt, nbytes)

    def create(self, path: str, *, large: bool) -> storage.OutputFile:
        reach("create", path)
        return FaultyFile(path, direct=large)

    def publish(self, folder: str, final: str, **options: Any) -> None:
        reach("publish", final)
        super().publish(folder, final, **options)
        reach("published", final)


if __name__ == "__main__":
    if action == "nobody":
        os.setuid(65534)
    setattr(worker, "LocalStorage", FaultyStorage)  # noqa: B010
    sys.exit(worker.main(sys.argv[2:]))
