"""Check that no process, socket or file is left behind."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from asyncckpt.link.endpoint import ROOT_LOCK
from asyncckpt.link.takeover import Takeover
from torture.jobs import MARK
from torture.tally import LIMIT_S, Tally


def send_away(runtime: Path) -> None:
    """Retire lingering workers."""
    for lock in runtime.glob("*.lock"):
        if (takeover := Takeover.find(lock.stem, LIMIT_S)) is not None:
            with takeover:
                takeover.retire(LIMIT_S)


def check_left(tally: Tally, runtime: Path) -> None:
    """Retire lingering workers, and report each process, socket or file that is left."""
    send_away(runtime)
    deadline = time.monotonic() + LIMIT_S
    while (left := _processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        tally.lose(f"left over: {process}")
    for file in runtime.glob("*"):
        if file.suffix not in (".log", ROOT_LOCK):  # an unread log of a worker, or a lock that nobody holds
            tally.lose(f"left over: {file}")


def _processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get(MARK) == os.environ[MARK] and "asyncckpt.worker" in process.cmdline()
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
