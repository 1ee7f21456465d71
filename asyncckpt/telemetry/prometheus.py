"""Events as Prometheus metrics."""

from __future__ import annotations

import threading
from collections import Counter as Count
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from asyncckpt.events import Event

# Bounds of a stall of the training, and of background work, in seconds.
_STALL_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_BACKGROUND_S = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
# The timings of a save that have a histogram each.
_PHASES = {
    "stall_s": ("save_stall_seconds", "What the call of save has taken from the training.", _STALL_S),
    "copy_s": ("staging_seconds", "Copying the tensors into shared memory.", _STALL_S),
    "write_s": ("write_seconds", "Writing to storage, by the worker.", _BACKGROUND_S),
    "commit_s": ("commit_seconds", "From when this rank had written until the commit.", _BACKGROUND_S),
}


class PrometheusMetrics:
    """Keeps metrics up to date. Give it to ``Config.on_event``, and expose the registry as you do for all metrics.

    All metrics have the labels ``training`` and ``rank``. Times are in seconds, sizes in bytes. Any thread may call.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, training: str = "") -> None:
        """Make the metrics.

        Args:
            registry: The registry for the metrics; it must not have them yet.
            training: The value of the label ``training``, to distinguish this training from others.

        Raises:
            ValueError: The registry has the metrics already.
        """
        names = ["training", "rank"]
        histogram = partial(Histogram, labelnames=names, namespace="asyncckpt", registry=registry)
        counter = partial(Counter, namespace="asyncckpt", registry=registry)
        gauge = partial(Gauge, labelnames=names, namespace="asyncckpt", registry=registry)
        self._phases = {
            timing: histogram(name, about, buckets=buckets) for timing, (name, about, buckets) in _PHASES.items()
        }
        self._durable_lag = histogram(
            "durable_lag_seconds",
            "From the call of save until the checkpoint was durable on all ranks.",
            buckets=_BACKGROUND_S,
        )
        self._written = counter("written_bytes", "Of committed images.", names)
        self._speed = gauge("write_bytes_per_second", "Of the last committed save.")
        self._saves = counter("saves", "Saves that have ended: committed, failed, skipped.", [*names, "outcome"])
        self._busy = gauge("slots_busy", "Saves that have a slot, and have not ended.")
        self._last_step = gauge("last_durable_step", "The step of the last committed save.")
        self._last_time = gauge("last_durable_timestamp_seconds", "When the last save was committed.")
        self._replicated_lag = gauge("replicated_lag_seconds", "From a commit until it was uploaded, of the last one.")
        self._uploads = counter("uploads", "Attempts at uploads: done, failed.", [*names, "outcome"])
        self._restarts = counter("worker_restarts", "Workers started after one that died.", names)
        self._takeovers = counter("memory_takeovers", "Takeovers of a dead trainer's memory.", names)
        self._loads = Histogram(
            "load_seconds",
            "Loads, by where from: memory, local, storage; or failed.",
            labelnames=[*names, "source"],
            namespace="asyncckpt",
            buckets=_BACKGROUND_S,
            registry=registry,
        )
        self._training = training
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._under_way: Count[tuple[int, str]] = Count()

    def begin(self, rank: int) -> None:
        """Begin the counters of ``rank`` at 0. Otherwise the first increase would not show."""
        if rank not in self._begun:
            self._begun.add(rank)
            for outcome in ("committed", "failed", "skipped"):
                self._saves.labels(self._training, rank, outcome)
            self._written.labels(self._training, rank)

    def note_durable(self, rank: int, step: int | None, at: float) -> None:
        """Record the newest durable save of ``rank``: its ``step``, and its time ``at`` (seconds since the epoch)."""
        self._last_time.labels(self._training, rank).set(at)
        if step is not None:
            self._last_step.labels(self._training, rank).set(step)

    def __call__(self, event: Event) -> None:
        """Record an event."""
        labels = self._training, event.rank
        self.begin(event.rank)
        match event.phase:
            case "planned":
                self._count(event, 1)
            case "committed" | "failed" | "skipped":
                self._saves.labels(*labels, event.phase).inc()
                if event.nbytes is not None:  # otherwise it was never planned
                    self._count(event, -1)
                self._on_end(event, labels)
            case "uploaded":
                self._uploads.labels(*labels, "done").inc()
                if event.seconds is not None:
                    self._replicated_lag.labels(*labels).set(event.seconds)
            case "upload failed":
                self._uploads.labels(*labels, "failed").inc()
            case "loaded" | "load failed":
                self._loads.labels(*labels, event.source or "failed").observe(event.seconds or 0.0)
            case "worker started":
                for each in (self._restarts, self._takeovers):
                    each.labels(*labels)
            case "worker restarted":
                self._restarts.labels(*labels).inc()
            case "memory taken over":
                self._takeovers.labels(*labels).inc()

    def _on_end(self, event: Event, labels: tuple[str, int]) -> None:
        for timing, histogram in self._phases.items():
            if timing in event.timings:
                histogram.labels(*labels).observe(event.timings[timing])
        if event.phase != "committed":
            return
        self._durable_lag.labels(*labels).observe(event.seconds or 0.0)
        self.note_durable(event.rank, event.step, event.at)
        if event.nbytes is not None:
            self._written.labels(*labels).inc(event.nbytes)
            if (write_s := event.timings.get("write_s", 0.0)) > 0:
                self._speed.labels(*labels).set(event.nbytes / write_s)

    def _count(self, event: Event, change: int) -> None:
        """Count a save that is planned, or has ended. The worker has no events of planned saves."""
        key = event.rank, event.path
        with self._lock:
            if change > 0 or self._under_way[key]:
                self._under_way[key] += change
                self._under_way += Count()  # removes the counts of 0
                count = sum(count for (rank, _), count in self._under_way.items() if rank == event.rank)
                self._busy.labels(self._training, event.rank).set(count)
