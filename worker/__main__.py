"""``python -m asyncckpt.worker JSON``: the worker process. ``link/process.py`` starts it, and makes ``JSON``."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import psutil

from asyncckpt.errors import JobTakenError
from asyncckpt.link.calls import Answer, send_answer
from asyncckpt.link.endpoint import runtime_folder
from asyncckpt.link.process import NO_PLACE, NOT_WANTED, WorkerOptions, parse, watched
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.storage import forget_clients, storage_for
from asyncckpt.transfer.serving import Serving
from asyncckpt.worker.endpoint_service import EndpointService, Trainer
from asyncckpt.worker.session import Session

if TYPE_CHECKING:
    from asyncckpt.storage.uploader import Uploader
    from asyncckpt.worker.metrics_file import MetricsFile

# Launchers send these signals to every process of a job, also to announce the end of its time (for example Slurm's
# --signal=USR1@90). The worker ignores them, and ends after its trainer ends and all staged images are written.
_FOR_TRAINERS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
# These signals end a worker that has no first trainer yet.
_ENDING = signal.SIGTERM, signal.SIGINT


def main(argv: list[str]) -> int:
    """Serve trainers, one after the other, until a trainer closes, or none comes in time. Return the exit status."""
    if (said := parse(argv)) is None:
        sys.exit("this is how asyncckpt starts a worker: start one by `asyncckpt worker`")
    for each in _FOR_TRAINERS:
        if said.fd is not None or each not in _ENDING:
            signal.signal(each, signal.SIG_IGN)
    # A thread that has written its chunk must continue at once, not after 5 ms of checksums by another thread.
    sys.setswitchinterval(0.0002)
    threading.excepthook = lambda args: _end(args.exc_value)
    logging.getLogger("concurrent.futures").addHandler(_LostResult(logging.CRITICAL))
    logging.basicConfig(level=logging.WARNING, format="asyncckpt worker %(process)d: %(levelname)s: %(message)s")
    # The first rank's worker has several connections from each rank of the job.
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _lower_priority(said.options)  # before other threads start, because threads inherit the priority
    first, name, linger = None, said.options.endpoint, said.options.linger
    if said.fd is not None:
        first = Trainer(SocketConnection(socket.socket(fileno=said.fd)), said.trainer, said.options)
    segment_store = SegmentStore()
    serving = Serving(segment_store)
    endpoint_service = EndpointService(name, said.fingerprint, linger, segment_store, serving, is_ahead=first is None)
    for each in _ENDING if first is None else ():
        signal.signal(each, lambda *_: endpoint_service.terminate())
    uploaders: dict[str, Uploader] = {}
    is_stuck = False
    try:
        trouble = _opened(endpoint_service, said.trainer)
        if first is None and trouble is not None:
            logging.error("no trainer would find this worker: %s", trouble)
            return NO_PLACE
        trainer = first or endpoint_service.next_trainer()
        while trainer is not None and not is_stuck:
            for each in _ENDING:
                signal.signal(each, signal.SIG_IGN)
            its = _begin(trainer)
            storages, metrics = partial(storage_for, direct_io=its.direct_io), _metrics_file(its)
            threads = its.io_threads
            session = Session(trainer, storages, segment_store, endpoint_service, serving, threads, uploaders, metrics)
            with watched(trainer.pid) as pidfd:
                is_stuck = not session.run(pidfd, trouble, lingers=its.linger > 0)
            trainer.is_over.set()
            # A worker with a trainer ignores SIGTERM. Without a trainer, it only spares other processes a read from
            # storage, so SIGTERM may end it.
            signal.signal(signal.SIGTERM, lambda *_: endpoint_service.terminate())
            trainer = None if is_stuck else endpoint_service.next_trainer()
            session.close_metrics()
    except JobTakenError as error:
        if first is None:
            logging.error("%s", error)
            return NOT_WANTED
        send_answer(first.connection, Answer.refused(0, error))
    except Exception as error:
        _end(error)
    finally:
        serving.end_following()
        segment_store.close()
        endpoint_service.close()
        serving.close()
    if is_stuck:
        logging.error("storage does not answer: the worker exits, and a write stays unfinished")
        os._exit(1)
    for uploader in uploaders.values():
        uploader.close()  # waits for uploads; no trainer waits for this process
    return NOT_WANTED if endpoint_service.is_not_wanted else 0


def _opened(endpoint_service: EndpointService, trainer: int) -> str | None:
    """Take the endpoint. Return the reason if that is not possible. Raises ``JobTakenError``."""
    try:
        endpoint_service.open(trainer)
    except OSError as error:
        return f"{error.strerror or error}: {runtime_folder()}"
    return None


def _begin(trainer: Trainer) -> WorkerOptions:
    """Take over the stderr and the surroundings of an attached trainer. Return its options."""
    if trainer.surroundings is not None and trainer.stderr is not None:
        os.dup2(trainer.stderr.fileno(), sys.stderr.fileno())
        trainer.stderr.close()
        trainer.surroundings.take_over()
        forget_clients()
        _lower_priority(trainer.options)
    return trainer.options


def _end(error: BaseException | None) -> NoReturn:
    """End the process at once, because one of its threads has failed. The trainer starts another worker."""
    traceback.print_exception(error)
    os._exit(1)


class _LostResult(logging.Handler):
    """End the process if a pool had no memory for the result of a task. A thread would wait for that result forever."""

    def emit(self, record: logging.LogRecord) -> None:
        _end(record.exc_info[1] if record.exc_info else None)


def _metrics_file(options: WorkerOptions) -> MetricsFile | None:
    if options.metrics_folder is None:
        return None
    from asyncckpt.worker.metrics_file import MetricsFile  # its dependencies are optional

    training = options.job and options.job.replace("\n", " ").strip()  # its folder and job id
    return MetricsFile(options.metrics_folder, training, options.rank)


def _lower_priority(options: WorkerOptions) -> None:
    """Lower the priority of this thread, and of threads that it starts, in favor of the training. Never raise it.

    If the host refuses, only log that, because the checkpoint matters more.
    """
    try:
        if options.nice > os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, options.nice)
        process = psutil.Process()  # fails if /proc belongs to another PID namespace
        is_idle = process.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
        if options.io_class == "best-effort" and not is_idle:
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)
        elif options.io_class == "idle":
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
    except (psutil.Error, OSError) as error:
        logging.warning("the worker keeps its priority: %r", error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
