"""A file of Prometheus metrics that a worker keeps up to date, for node_exporter's textfile collector.

It needs no port. It goes when the trainer closes in good order, and stays when the trainer, or this worker, has died:
so the age of the last durable step goes on growing, and can be alerted on. The next worker of the training goes on with
that, and counts anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
from prometheus_client.parser import text_string_to_metric_families
from xxhash import xxh3_64_hexdigest

from asyncckpt.events import Event, Listener, end_of_save
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.messages import Committed, Failed
from asyncckpt.storage.uploads import Uploaded
from asyncckpt.telemetry.prometheus import PrometheusMetrics

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
# What the next worker goes on with.
_LAST_STEP, _LAST_TIME = "asyncckpt_last_durable_step", "asyncckpt_last_durable_timestamp_seconds"


class MetricsFile:
    """That of one worker, written on a thread of its own after each event. What goes wrong is said once."""

    def __init__(self, folder: str, training: str | None, rank: int) -> None:
        """Write nothing yet.

        Args:
            folder: Where it stands, made if it is missing.
            training: By this text the next worker of the same training writes the same file, and metrics are told from
                those of others; None: there is no next one, and the file goes in any case.
            rank: That of the trainer.
        """
        self._stays, self._rank = training is not None, rank
        training = training or f"worker {os.getpid()} of {os.uname().nodename}"
        name = xxh3_64_hexdigest(os.fsencode(training))[:12]
        self.path = os.path.join(folder, f"asyncckpt-{name}-{rank}.prom")
        self.registry = CollectorRegistry()
        training = os.fsencode(training).decode(errors="replace")  # a path is bytes, and may be no text
        self._metrics = PrometheusMetrics(self.registry, training)
        self._metrics.begin(rank)
        started = Gauge(
            "asyncckpt_started_timestamp_seconds",
            "When the worker was started.",
            ["training", "rank"],
            registry=self.registry,
        )
        started.labels(training, rank).set_to_current_time()
        self._has_committed = self._has_failed = False
        self._listener = Listener(self._note)

    def begin(self) -> None:
        """The worker runs: have it written soon, with what the worker before this one has left."""
        self._listener.tell(Event(phase="worker started", rank=self._rank))

    def on_end(self, request: WriteRequest, outcome: Committed | Failed, seconds: float) -> None:
        """A save has ended, so many ``seconds`` after the call."""
        phase = end_of_save(outcome.error if isinstance(outcome, Failed) else None)
        event = Event(phase=phase, rank=request.rank, path=request.path, step=request.step, seconds=seconds)
        if isinstance(outcome, Committed):
            event = replace(event, nbytes=outcome.nbytes, timings=outcome.timings)
        self._listener.tell(event)

    def on_uploaded(self, uploaded: Uploaded) -> None:
        """An attempt at an upload has ended."""
        self._listener.tell(uploaded.event(self._rank))

    def close(self, *, in_order: bool) -> None:
        """Write what is left to be written, and no more. ``in_order``: the training is done with it."""
        self._listener.close(_CLOSE_S)
        if in_order or not self._stays:
            with contextlib.suppress(OSError):
                os.remove(self.path)

    def _carry_over(self) -> None:
        """Go on with what was durable before: the alert has to see that, also where this worker commits nothing."""
        with contextlib.suppress(OSError, ValueError, OverflowError), open(self.path) as file:
            families = text_string_to_metric_families(file.read())
            found = {sample.name: sample.value for family in families for sample in family.samples}
            if _LAST_TIME in found:
                step = int(found[_LAST_STEP]) if _LAST_STEP in found else None
                self._metrics.note_durable(self._rank, step, found[_LAST_TIME])

    def _note(self, event: Event) -> None:
        self._has_committed |= event.phase == "committed"
        if not self._has_committed:  # each time: the worker of a dead trainer may just have written its last
            self._carry_over()
        if event.phase != "worker started":  # who is told here knows nothing of others
            self._metrics(event)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            write_to_textfile(self.path, self.registry)  # under another name first
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("Config.metrics_folder: %s cannot be written (not said again): %s", self.path, error)
