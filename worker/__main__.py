"""``python -m asyncckpt.worker JSON``: the worker process. ``link/process.py`` starts it, and makes ``JSON``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.storage import storage_for
from asyncckpt.transfer.serving import Serving
from asyncckpt.worker.endpoint_service import EndpointService
from asyncckpt.worker.server import Server

if TYPE_CHECKING:
    from asyncckpt.worker.metrics_file import MetricsFile

# Launchers send these signals to every process of a job, also to announce the end of its time (for example Slurm's
# --signal=USR1@90). The worker ignores them, and ends after its trainer ends and all staged images are written.
_FOR_TRAINERS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


def main(argv: list[str]) -> int:
    """Serve the trainer at the other end of the socket until it closes or dies."""
    for each in _FOR_TRAINERS:
        signal.signal(each, signal.SIG_IGN)
    # A thread that has written its chunk must continue at once, not after 5 ms of another thread's checksums.
    sys.setswitchinterval(0.0002)
    threading.excepthook = lambda args: _end(args.exc_value)
    logging.getLogger("concurrent.futures").addHandler(_LostResult(logging.CRITICAL))
    logging.basicConfig(level=logging.WARNING, format="asyncckpt worker %(process)d: %(levelname)s: %(message)s")
    # The first rank's worker has several connections from each rank of the job.
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    options = json.loads(argv[0])
    _lower_priority(options["nice"], options["io_class"])
    segment_store = SegmentStore()
    serving = Serving(segment_store)
    endpoint_service = EndpointService(options["endpoint"], options["trainer"], segment_store, serving)
    metrics, server = None, None
    try:
        storages = partial(storage_for, direct_io=options["direct_io"])
        connection, trainer = SocketConnection(socket.socket(fileno=options["fd"])), options["trainer"]
        metrics = _metrics_file(options)
        server = Server(
            connection, storages, segment_store, endpoint_service, serving, options["io_threads"], trainer, metrics
        )
        finished = server.run(_watch(trainer), options["linger"])
    except Exception as error:
        _end(error)
    finally:
        if metrics is not None:  # before another worker of this job can start, which would write the same file
            metrics.close(in_order=server is not None and server.is_closed_in_order)
        endpoint_service.close()
        serving.close()
    if not finished:
        logging.error("storage does not answer; leaving a write behind")
        os._exit(1)
    server.finish_uploads()
    return 0


def _end(error: BaseException | None) -> NoReturn:
    """End the process at once: a part of it has failed. The trainer notices, and starts another worker."""
    traceback.print_exception(error)
    os._exit(1)


class _LostResult(logging.Handler):
    """End the process, because a pool had no memory for the result of a task: somebody would wait for it for ever."""

    def emit(self, record: logging.LogRecord) -> None:
        _end(record.exc_info[1] if record.exc_info else None)


def _metrics_file(options: dict[str, Any]) -> MetricsFile | None:
    if options["metrics_folder"] is None:
        return None
    from asyncckpt.worker.metrics_file import MetricsFile  # its dependencies are optional

    training = options["job"] and options["job"].replace("\n", " ").strip()  # its folder and job id
    return MetricsFile(options["metrics_folder"], training, options["rank"])


def _lower_priority(nice: int, io_class: str) -> None:
    """Lower the priority, in favor of the training. If the host refuses, only log that: the checkpoint matters more."""
    try:
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        process = psutil.Process()  # fails if /proc is that of another PID namespace
        if io_class == "best-effort":
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)
        elif io_class == "idle":
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
    except (psutil.Error, OSError) as error:
        logging.warning("the worker keeps its priority: %s", error)


def _watch(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the trainer dies; None if there is no such descriptor."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        # The kernel or Python lacks pidfds, or the trainer is already dead, which its socket shows.
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
