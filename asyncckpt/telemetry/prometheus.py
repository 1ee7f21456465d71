"""Events as Prometheus metrics."""

from __future__ import annotations

from collections import Counter as Count
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from asyncckpt.events import Event

# Of a stop of the training, and of what goes on beside it.
_STALL_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_BACKGROUND_S = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
# The timings of a committed save that have a histogram each.
_PHASES = {
    "stall_s": ("save_stall_seconds", "What the call of save has taken from the training.", _STALL_S),
    "copy_s": ("staging_seconds", "Copying the tensors into shared memory.", _STALL_S),
    "write_s": ("write_seconds", "Writing to storage, by the worker.", _BACKGROUND_S),
    "commit_s": ("commit_seconds", "From when this rank had written until the commit.", _BACKGROUND_S),
}


class PrometheusMetrics:
    """Keeps metrics up to date. Give it to ``Config.on_event``, and expose the registry as you do for all metrics.

    All have the label ``rank``; times are in seconds, sizes in bytes.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Make the metrics.

        Args:
            registry: Where to; it must not have them yet.

        Raises:
            ValueError: It has them.
        """
        histogram = partial(Histogram, labelnames=["rank"], namespace="asyncckpt", registry=registry)
        counter = partial(Counter, namespace="asyncckpt", registry=registry)
        gauge = partial(Gauge, labelnames=["rank"], namespace="asyncckpt", registry=registry)
        self._phases = {
            timing: histogram(name, about, buckets=buckets) for timing, (name, about, buckets) in _PHASES.items()
        }
        self._durable_lag = histogram(
            "durable_lag_seconds",
            "From the call of save until the checkpoint was durable on all ranks.",
            buckets=_BACKGROUND_S,
        )
        self._written = counter("written_bytes", "Of committed images.", ["rank"])
        self._speed = gauge("write_bytes_per_second", "Of the last committed save.")
        self._saves = counter("saves", "Saves that have ended: committed, failed, skipped.", ["rank", "outcome"])
        self._busy = gauge("slots_busy", "Saves that have been planned, and have not ended.")
        self._last_step = gauge("last_durable_step", "The step of the last committed save.")
        self._last_time = gauge("last_durable_timestamp_seconds", "When the last save was committed.")
        self._replicated_lag = gauge("replicated_lag_seconds", "From a commit until it was uploaded, of the last one.")
        self._uploads = counter("uploads", "Attempts at uploads: done, failed.", ["rank", "outcome"])
        self._restarts = counter("worker_restarts", "Workers started after one that died.", ["rank"])
        self._takeovers = counter("memory_takeovers", "Takeovers of a dead trainer's memory.", ["rank"])
        self._loads = Histogram(
            "load_seconds",
            "Loads, by where from: memory, local, storage; or failed.",
            labelnames=["rank", "source"],
            namespace="asyncckpt",
            buckets=_BACKGROUND_S,
            registry=registry,
        )
        self._under_way: Count[tuple[str, str]] = Count()

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        rank, seconds = str(event.rank), event.seconds or 0.0
        match event.phase:
            case "planned":
                self._count(rank, event.path, 1)
            case "committed" | "failed" | "skipped":
                self._saves.labels(rank, event.phase).inc()
                self._count(rank, event.path, -1)
                if event.phase == "committed":
                    self._on_commit(event, rank, seconds)
            case "uploaded":
                self._uploads.labels(rank, "done").inc()
                self._replicated_lag.labels(rank).set(seconds)
            case "upload failed":
                self._uploads.labels(rank, "failed").inc()
            case "loaded" | "load failed":
                self._loads.labels(rank, event.source or "failed").observe(seconds)
            case "worker restarted":
                self._restarts.labels(rank).inc()
            case "memory taken over":
                self._takeovers.labels(rank).inc()

    def _on_commit(self, event: Event, rank: str, seconds: float) -> None:
        for timing, histogram in self._phases.items():
            if timing in event.timings:
                histogram.labels(rank).observe(event.timings[timing])
        self._durable_lag.labels(rank).observe(seconds)
        self._last_time.labels(rank).set(event.at)
        if event.step is not None:
            self._last_step.labels(rank).set(event.step)
        if event.nbytes is not None:
            self._written.labels(rank).inc(event.nbytes)
            if (write_s := event.timings.get("write_s", 0.0)) > 0:
                self._speed.labels(rank).set(event.nbytes / write_s)

    def _count(self, rank: str, path: str, change: int) -> None:
        """A save to ``path`` has been planned, or has ended; of one that never was planned nothing was said before."""
        if change > 0 or self._under_way[rank, path]:
            self._under_way[rank, path] += change
            if not self._under_way[rank, path]:
                del self._under_way[rank, path]
            self._busy.labels(rank).set(sum(count for (of, _), count in self._under_way.items() if of == rank))
