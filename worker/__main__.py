"""``python -m asyncckpt.worker JSON``: started by ``client.py``, which says what stands in ``JSON``."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

from multiprocess.connection import Connection

from asyncckpt.worker import priority
from asyncckpt.worker.holdings import Holdings
from asyncckpt.worker.server import Server
from asyncckpt.worker.storage import LocalStorage


def main(argv: list[str]) -> int:
    """Serve the trainer at the other end of the socket until it closes or dies."""
    # Launchers signal every process of a job. The worker ends when its trainer does, after what is staged is written.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A thread that has written its piece must get to the next at once, not after 5 ms of another's checksums.
    sys.setswitchinterval(0.0002)
    logging.basicConfig(level=logging.WARNING, format="asyncckpt worker %(process)d: %(levelname)s: %(message)s")
    options = json.loads(argv[0])
    priority.lower(options["nice"], options["io_class"])
    connection = Connection(options["fd"])
    holdings = Holdings(os.getpid(), options["trainer"], options["door"])
    try:
        storage = LocalStorage(direct=options["direct_io"])
        server = Server(connection, storage, holdings, options["io_threads"], options["linger"])
        finished = server.run(_watch(options["trainer"]))
    finally:
        holdings.shut()
    if not finished:
        logging.error("storage does not answer; leaving a write behind")
        os._exit(1)
    return 0


def _watch(pid: int) -> int | None:
    """A descriptor that becomes readable when the trainer dies."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # a kernel without them, or the trainer is dead already: then its socket says so
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
