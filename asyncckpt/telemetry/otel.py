"""Events as OpenTelemetry metrics and spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from asyncckpt.events import Event

_NAME = "asyncckpt"
# The timings of a save that have a histogram and a span each. There is no semantic convention for checkpoints.
_PHASES = {"copy": "staging", "write": "write", "commit": "commit"}
# Bounds for histograms, in seconds: of a stall of the training, and of background work. The default bounds of
# OpenTelemetry are for milliseconds.
_STALL_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_BACKGROUND_S = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class Span(NamedTuple):
    """Name of a span, and its attributes in addition to those of all spans."""

    name: str
    attributes: Mapping[str, AttributeValue] = {}


# The span names of nvidia-resiliency-ext's own worker, for tools that look for them. The write runs beside the
# training, and does not count in a view of goodput.
NVRX_SPANS = {
    "asyncckpt.save": Span("nvrx.checkpoint.save.request", {"is_goodput_span": True}),
    "asyncckpt.save.write": Span("nvrx.checkpoint.save.write", {"is_goodput_span": False}),
}


class OpenTelemetry:
    """Records metrics and spans. Give it to ``Config.on_event``.

    A span ``asyncckpt.save`` begins with the call and ends with the commit, or the failure. Its children are
    ``asyncckpt.save.staging``, ``.write`` and ``.commit``. A load is ``asyncckpt.load``. Histograms of the same names
    are in seconds, as are ``asyncckpt.save.stall`` and ``asyncckpt.upload.lag``. The counter ``asyncckpt.save.written``
    is in bytes. Spans are not linked to spans of the training. Any thread may call.
    """

    def __init__(
        self,
        meter_provider: metrics.MeterProvider | None = None,
        tracer_provider: trace.TracerProvider | None = None,
        spans: Mapping[str, Span] = {},  # noqa: B006
    ) -> None:
        """Make the instruments.

        Args:
            meter_provider, tracer_provider: The providers; None: the providers of the process.
            spans: Other names for spans. A span with an entry here is recorded under that name alone.
        """
        meter = metrics.get_meter(_NAME, meter_provider=meter_provider)
        self._tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)
        self._spans = spans

        def histogram(name: str, about: str, bounds: Sequence[float] = _BACKGROUND_S) -> metrics.Histogram:
            return meter.create_histogram(f"asyncckpt.{name}", "s", about, explicit_bucket_boundaries_advisory=bounds)

        self._save = histogram("save", "From the call until it had ended.")
        self._stall = histogram("save.stall", "What the call has taken from the training.", _STALL_S)
        self._phases = {
            phase: histogram(f"save.{name}", f"The phase of {name}.", _STALL_S if phase == "copy" else _BACKGROUND_S)
            for phase, name in _PHASES.items()
        }
        self._written = meter.create_counter("asyncckpt.save.written", "By", "Bytes of committed images.")
        self._last_step = meter.create_gauge("asyncckpt.save.last_durable_step", "1", "Of the last committed save.")
        self._last_time = meter.create_gauge("asyncckpt.save.last_durable_time", "s", "Since the epoch.")
        self._load = histogram("load", "From the call until all was in place.")
        self._lag = histogram("upload.lag", "From the commit until it was in the root.")
        self._events = meter.create_counter("asyncckpt.events", "1", "What else has happened, by its phase.")

    def __call__(self, event: Event) -> None:
        """Record an event."""
        rank = {"asyncckpt.rank": event.rank}
        match event.phase:
            case "planned" | "staged" | "written":
                pass  # recorded at the end of the save
            case "committed" | "failed" | "skipped":
                self._on_end(event, rank)
            case "uploaded":
                if event.seconds is not None:
                    self._lag.record(event.seconds, rank)
            case "loaded" | "load failed":
                self._load.record(event.seconds or 0.0, {**rank, "asyncckpt.source": event.source or "failed"})
                self._span("asyncckpt.load", event, event.at - (event.seconds or 0.0), event.at)
            case _:
                self._events.add(1, {**rank, "asyncckpt.phase": event.phase})

    def _on_end(self, event: Event, rank: Mapping[str, AttributeValue]) -> None:
        self._save.record(event.seconds or 0.0, {**rank, "asyncckpt.outcome": event.phase})
        called_at = event.at - (event.seconds or 0.0)
        span = self._span("asyncckpt.save", event, called_at, event.at)
        within = trace.set_span_in_context(span)
        for phase, histogram in self._phases.items():
            seconds, begun = event.timings.get(f"{phase}_s"), event.timings.get(f"{phase}_from_s")
            if seconds is None or begun is None:
                continue
            histogram.record(seconds, rank)
            self._span(
                f"asyncckpt.save.{_PHASES[phase]}", event, called_at + begun, called_at + begun + seconds, within
            )
        if "stall_s" in event.timings:
            self._stall.record(event.timings["stall_s"], rank)
        if event.phase == "committed":
            self._written.add(event.nbytes or 0, rank)
            self._last_time.set(event.at, rank)
            if event.step is not None:
                self._last_step.set(event.step, rank)

    def _span(self, name: str, event: Event, begun: float, ended: float, within: Context | None = None) -> trace.Span:
        """Record a span that is over. Both times are in seconds since the epoch."""
        known = self._spans.get(name, Span(name))
        said: dict[str, AttributeValue | None] = {
            "asyncckpt.rank": event.rank,
            "asyncckpt.path": event.path,
            "asyncckpt.step": event.step,
            "asyncckpt.bytes": event.nbytes,
            "asyncckpt.source": event.source,
            "asyncckpt.outcome": event.phase,
        }
        attributes = {key: value for key, value in said.items() if value is not None}
        span = self._tracer.start_span(
            known.name, within, attributes={**attributes, **known.attributes}, start_time=int(begun * 1e9)
        )
        if event.error is not None and event.phase != "skipped" and within is None:
            span.set_status(trace.StatusCode.ERROR, event.error)
        span.end(int(ended * 1e9))
        return span
