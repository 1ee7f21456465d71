"""Load offloaded parameters, sync them to an inference engine, offload them again, and measure each phase.

    parameters = OffloadedParameters(model, "cuda")  # of offload.py; once, and it moves nothing yet


    def sync(metrics):
        publication = publisher.publish(model.state_dict(), step)
        metrics.count(publication)
        return publication


    metrics = sync_with_offload(parameters.load, sync, partial(parameters.offload, unchanged=True))
    logger.log(metrics.as_dict("timing_s/"), step)  # timing_s/load_s, timing_s/stage_s, timing_s/offload_s, ...

If the sync uses ``await``, use the context manager ``loaded`` instead.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from asyncckpt.devices.kinds import synchronize_used
from asyncckpt.publication import Publication

logger = logging.getLogger(__name__)

Phase = Literal["load", "wait", "plan", "stage", "publish", "transfer", "apply", "sync", "offload", "total"]


@dataclass
class SyncMetrics:
    """Seconds of each phase of one sync, and the number of moved bytes.

    A phase that did not run has exactly 0.0. A phase that ran several times has the sum. ``measure`` measures each
    phase until the device has finished, not until its work is queued.
    """

    load_s: float = 0.0
    """Copying offloaded parameters to the device."""
    wait_s: float = 0.0
    """Waiting for a free slot or for a receiver."""
    plan_s: float = 0.0
    """Planning the layout of the weights; 0.0 if the layout of an earlier sync still fits."""
    stage_s: float = 0.0
    """Copying the weights into shared memory."""
    publish_s: float = 0.0
    """Announcing the version."""
    transfer_s: float = 0.0
    """Sending the weights to other hosts."""
    apply_s: float = 0.0
    """Loading the weights into the inference engine."""
    sync_s: float = 0.0
    """All time between load and offload: the phases from ``wait_s`` to ``apply_s``, and the time between them."""
    offload_s: float = 0.0
    """Freeing the device's memory."""
    total_s: float = 0.0
    bytes_staged: int = 0
    bytes_sent: int = 0
    version: int | None = None
    """The version of the weights, if there is one."""
    result: Any = field(default=None, repr=False)
    """The result of ``sync``, see ``sync_with_offload``."""

    @contextlib.contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the time of the body to a phase.

        The time starts when the devices have finished earlier work, and ends when they have finished the body's work.
        """
        name = f"{phase}_s"
        before: float = getattr(self, name)
        synchronize_used()
        began = time.perf_counter()
        try:
            yield
            synchronize_used()
        finally:  # after a failure: the time until the failure
            setattr(self, name, before + time.perf_counter() - began)

    def count(self, publication: Publication) -> None:
        """Add the timings that ``publish`` measured itself and stored in its ``publication``."""
        for name, seconds in publication.timings.items():
            setattr(self, name, getattr(self, name) + seconds)
        self.bytes_staged += publication.nbytes
        self.version = publication.version

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Return all numbers for a logger. ``prefix`` precedes the names: ``as_dict("timing_s/")`` has
        ``"timing_s/load_s"``. Without a version, the result has no version.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "result"}
        return {prefix + name: value for name, value in values.items() if value is not None}


def sync_with_offload(
    load: Callable[[], object] | None,
    sync: Callable[[SyncMetrics], object],
    offload: Callable[[], object] | None,
    *,
    metrics: SyncMetrics | None = None,
) -> SyncMetrics:
    """Call ``load``, ``sync`` and ``offload`` in this order, and measure each. Errors are handled as in ``loaded``.

    Args:
        load: Copies the parameters to the device; ``None`` if they are not offloaded.
        sync: Receives the metrics, and measures its own phases (``with metrics.measure("stage"): ...``). The metrics'
            ``result`` is its return value.
        offload: Moves the parameters off the device. It is called in any case.
        metrics: The caller's metrics, which are filled also if this function raises.

    Returns:
        The metrics.
    """
    with loaded(load, offload, metrics=metrics) as metrics:
        metrics.result = sync(metrics)
    return metrics


@contextlib.contextmanager
def loaded(
    load: Callable[[], object] | None, offload: Callable[[], object] | None, *, metrics: SyncMetrics | None = None
) -> Iterator[SyncMetrics]:
    """Call ``load``, run the body (the sync, which may use ``await``), then call ``offload``.

    Args:
        load: As in ``sync_with_offload``.
        offload: Is called also if ``load`` or the body raises. If ``load`` fails halfway, some parameters are on the
            device, and ``offload`` must accept this. If ``offload`` raises, too, the first error is raised. The second
            error is logged, and added to the first as a note.
        metrics: As in ``sync_with_offload``.
    """
    metrics = SyncMetrics() if metrics is None else metrics

    def measured_offload() -> None:
        if offload is not None:
            with metrics.measure("offload"):
                offload()

    with metrics.measure("total"):
        try:
            if load is not None:
                with metrics.measure("load"):
                    load()
            with metrics.measure("sync"):
                yield metrics
        except BaseException as error:
            try:
                measured_offload()
            except Exception as second:
                logger.error("offloading failed, after a sync that failed", exc_info=True)
                text = "".join(traceback.format_exception(second, chain=False))
                # The same as ``add_note`` of Python 3.11. Older versions do not print notes.
                notes = [*getattr(error, "__notes__", []), f"Then offloading failed, too:\n{text}"]
                error.__notes__ = notes  # type: ignore[attr-defined]
            raise
        measured_offload()
