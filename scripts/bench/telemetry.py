"""Measure the cost of events: saves with all adapters and saves without listeners, in turns.

Both contestants save the same state, each with its own checkpointer. A turn ends when its save is committed. The next
turn begins after a pause as long as a short training step. For each call the benchmark measures elapsed time and CPU
time of the calling thread. For each adapter it measures CPU time on the adapter's thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from asyncckpt import Checkpointer, Config
from asyncckpt.events import Event
from asyncckpt.telemetry.otel import OpenTelemetry
from asyncckpt.telemetry.prometheus import PrometheusMetrics
from asyncckpt.telemetry.scalars import TensorBoard, WandB
from bench.states import Request, State, make
from bench.turns import Pace, take

NOBODY, ALL = "nobody listens", "all adapters"


class _Timed:
    """An adapter that counts its CPU seconds."""

    def __init__(self, adapter: Callable[[Event], object]) -> None:
        self.name = type(adapter).__name__
        self.cpu_s = 0.0
        self._adapter = adapter

    def __call__(self, event: Event) -> None:
        begun = time.thread_time()
        self._adapter(event)
        self.cpu_s += time.thread_time() - begun


def measure(request: Request, pace: Pace, folder: str) -> dict[str, Any]:
    """Measure seconds and CPU seconds of calls by listeners (``results``), and of each adapter (``adapters``)."""
    made = make(request)
    with ExitStack() as opened:
        adapters = [_Timed(each) for each in _adapters(folder, opened)]
        os.mkdir(metrics_folder := os.path.join(folder, "metrics"))
        configs = {
            NOBODY: Config(linger=0, keep_last=1),
            ALL: Config(linger=0, keep_last=1, on_event=adapters, metrics_folder=metrics_folder),
        }
        turns = {}
        for number, (name, config) in enumerate(configs.items()):
            checkpointer = opened.enter_context(Checkpointer(os.path.join(folder, str(number)), config))
            checkpointer.prepare(made.state)
            turns[name] = partial(_save, checkpointer, made.state, iter(range(10**9)))
        taken = take(turns, pace, "telemetry")
    saves = len(taken.found[ALL])
    return {
        "state": made.facts(),
        "results": {
            name: {"call_s": [call_s for call_s, _ in calls[1:]], "cpu_s": [cpu_s for _, cpu_s in calls[1:]]}
            for name, calls in taken.found.items()
        },
        "adapters": {each.name: each.cpu_s / saves for each in adapters},
        "left_out": taken.left_out,
    }


def _save(checkpointer: Checkpointer, state: State, steps: Any) -> tuple[float, float]:
    """Save, and return the seconds of the call and the CPU seconds of the calling thread."""
    begun, computed = time.perf_counter(), time.thread_time()
    save = checkpointer.save(next(steps), state)
    taken = time.perf_counter() - begun, time.thread_time() - computed
    save.result()
    return taken


def _adapters(folder: str, opened: ExitStack) -> list[Callable[[Event], object]]:
    """Return all adapters, set up as in a training. Spans and metrics are exported in batches, to memory."""
    import wandb
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from prometheus_client import CollectorRegistry
    from torch.utils.tensorboard import SummaryWriter

    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    opened.callback(tracers.shutdown)
    writer = opened.enter_context(SummaryWriter(os.path.join(folder, "tensorboard")))
    run = wandb.init(project="bench", dir=folder, mode="offline", settings=wandb.Settings(silent=True))
    opened.callback(run.finish)
    return [
        PrometheusMetrics(CollectorRegistry()),
        OpenTelemetry(MeterProvider([InMemoryMetricReader()]), tracers),
        TensorBoard(writer),
        WandB(run),
    ]
