"""A file of Prometheus metrics that a worker keeps up to date, for node_exporter's textfile collector.

It needs no port. It goes when the trainer closes in good order, and stays when the trainer, or this worker, has died:
so the age of the last durable step goes on growing, and can be alerted on.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from prometheus_client import CollectorRegistry, write_to_textfile
from xxhash import xxh3_64_hexdigest

from asyncckpt.events import Event, Listener
from asyncckpt.telemetry.prometheus import PrometheusMetrics
from asyncckpt.worker.messages import Committed, Failed, WriteRequest
from asyncckpt.worker.uploads import Uploaded

_CLOSE_S = 5.0


class MetricsFile:
    """That of one worker, written on a thread of its own after each event. What goes wrong is logged once."""

    def __init__(self, folder: str, job: str, rank: int) -> None:
        """Write nothing yet.

        Args:
            folder: Where it stands, as ``asyncckpt-JOB-RANK.prom``.
            job: By this text the next worker of the same job writes the same file.
            rank: That of the trainer.
        """
        self.path = os.path.join(folder, f"asyncckpt-{xxh3_64_hexdigest(os.fsencode(job))[:12]}-{rank}.prom")
        self._rank, self._registry = rank, CollectorRegistry()
        self._metrics = PrometheusMetrics(self._registry)
        self._listener = Listener(self._note)

    def on_end(self, request: WriteRequest, outcome: Committed | Failed, seconds: float) -> None:
        """A save has ended, so many ``seconds`` after the call."""
        event = Event(phase="failed", rank=request.rank, path=request.path, step=request.step, seconds=seconds)
        if isinstance(outcome, Committed):
            event = replace(event, phase="committed", nbytes=outcome.nbytes, timings=outcome.timings)
        self._listener.tell(event)

    def on_uploaded(self, uploaded: Uploaded) -> None:
        """An attempt at an upload has ended."""
        self._listener.tell(uploaded.event(self._rank))

    def close(self, *, remove: bool) -> None:
        """Write what is left to be written, and ``remove`` it, if that is wanted."""
        self._listener.close(_CLOSE_S)
        if remove:
            with contextlib.suppress(OSError):
                os.remove(self.path)

    def _note(self, event: Event) -> None:
        self._metrics(event)
        write_to_textfile(self.path, self._registry)  # under another name first
