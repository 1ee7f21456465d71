"""A file of Prometheus metrics that a worker keeps up to date, for node_exporter's textfile collector.

The file needs no port. The worker removes the file when the trainer closes. The file stays after a crash.
Then the age of the last durable step keeps growing, and an alert can use that age. The next worker of the training
continues with the last durable step, and counts anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
from prometheus_client.parser import text_string_to_metric_families
from xxhash import xxh3_64_hexdigest

from asyncckpt.budgets import NOTICE_S
from asyncckpt.events import Event, Listener, end_of_save
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link.api import Committed, Failed
from asyncckpt.storage.uploads import Uploaded
from asyncckpt.telemetry.prometheus import PrometheusMetrics

logger = logging.getLogger(__name__)

# The metrics that the next session continues with.
_LAST_STEP, _LAST_TIME = "asyncckpt_last_durable_step", "asyncckpt_last_durable_timestamp_seconds"


class MetricsFile:
    """The metrics file of a worker's session. A thread writes it after each event. An error is logged only once."""

    def __init__(self, folder: str, training: str | None, rank: int) -> None:
        """Write nothing yet.

        Args:
            folder: The folder of the file, created if it is missing.
            training: Identifies the training in the metrics and in the file's name, so that its next session writes the
                same file. If None, the file is always removed, because there is no next session.
            rank: The trainer's rank.
        """
        self._stays, self._rank = training is not None, rank
        training = training or f"worker {os.getpid()} of {os.uname().nodename}"
        name = xxh3_64_hexdigest(os.fsencode(training))[:12]
        self.path = os.path.join(folder, f"asyncckpt-{name}-{rank}.prom")
        self.registry = CollectorRegistry()
        training = os.fsencode(training).decode(errors="replace")  # a path is bytes, and may not be valid text
        self._metrics = PrometheusMetrics(self.registry, training)
        self._metrics.begin(rank)
        started = Gauge(
            "asyncckpt_started_timestamp_seconds",
            "When the worker began to serve its trainer.",
            ["training", "rank"],
            registry=self.registry,
        )
        started.labels(training, rank).set_to_current_time()
        self._has_committed = self._has_failed = False
        self._listener = Listener(self._note)

    def begin(self) -> None:
        """Write the file soon, with the values that the previous worker left. Call when the worker runs."""
        self._listener.tell(Event(phase="worker started", rank=self._rank))

    def on_end(self, request: WriteRequest, outcome: Committed | Failed, seconds: float) -> None:
        """Note the end of a save, ``seconds`` after the call."""
        phase = end_of_save(outcome.error if isinstance(outcome, Failed) else None)
        event = Event(phase=phase, rank=request.rank, path=request.path, step=request.step, seconds=seconds)
        if isinstance(outcome, Committed):
            event = replace(event, nbytes=outcome.nbytes, timings=outcome.timings)
        self._listener.tell(event)

    def on_uploaded(self, uploaded: Uploaded) -> None:
        """Note the end of an attempt at an upload."""
        self._listener.tell(uploaded.event(self._rank))

    def close(self, *, in_order: bool) -> None:
        """Write pending events, and stop. ``in_order``: whether the trainer has closed, so that the file is removed."""
        self._listener.close(NOTICE_S)
        if in_order or not self._stays:
            with contextlib.suppress(OSError):
                os.remove(self.path)

    def _carry_over(self) -> None:
        """Continue with the last durable step of the previous worker, so that alerts see it before a commit here."""
        with contextlib.suppress(OSError, ValueError, OverflowError), open(self.path) as file:
            families = text_string_to_metric_families(file.read())
            found = {sample.name: sample.value for family in families for sample in family.samples}
            if _LAST_TIME in found:
                step = int(found[_LAST_STEP]) if _LAST_STEP in found else None
                self._metrics.note_durable(self._rank, step, found[_LAST_TIME])

    def _note(self, event: Event) -> None:
        self._has_committed |= event.phase == "committed"
        if not self._has_committed:  # every time, because a dead trainer's worker may have written the file just now
            self._carry_over()
        if event.phase != "worker started":  # this event adds a counter of restarts, which a worker cannot count
            self._metrics(event)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            write_to_textfile(self.path, self.registry)  # writes under another name first
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("Config.metrics_folder: %s cannot be written (not logged again): %s", self.path, error)
