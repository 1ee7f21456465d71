"""A sync of weights whose parameters are kept off the device: load, sync, offload, and how long each takes.

    parameters = OffloadedParameters(model, "cuda")  # of offload.py; once, and it moves nothing yet


    def sync(metrics):
        publication = publisher.publish(model.state_dict(), step)
        metrics.count(publication)
        return publication


    metrics = sync_with_offload(parameters.load, sync, partial(parameters.offload, unchanged=True))
    logger.log(metrics.as_dict("timing_s/"), step)  # timing_s/load_s, timing_s/stage_s, timing_s/offload_s, ...

Where the sync awaits, ``loaded`` is the same as a context manager.
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
    """Seconds of each phase of one sync, and what it moved.

    A phase that did not take place has exactly 0.0; one that took place several times has the sum. Each is measured
    with ``measure``, and so ends when the device has finished, not when the last of its work is queued.
    """

    load_s: float = 0.0
    """Bringing offloaded parameters to the device."""
    wait_s: float = 0.0
    """Waiting for others: for a free slot, for a receiver."""
    plan_s: float = 0.0
    """Laying out the weights; 0.0 as long as the layout of an earlier sync still fits."""
    stage_s: float = 0.0
    """Copying them into shared memory."""
    publish_s: float = 0.0
    """Announcing the version."""
    transfer_s: float = 0.0
    """Sending them to other hosts."""
    apply_s: float = 0.0
    """Bringing them into the inference engine."""
    sync_s: float = 0.0
    """All that is between load and offload: the phases from ``wait_s`` to ``apply_s``, and what is in none of them."""
    offload_s: float = 0.0
    """Giving the device's memory back."""
    total_s: float = 0.0
    bytes_staged: int = 0
    bytes_sent: int = 0
    version: int | None = None
    """That of the weights, if they have one."""
    result: Any = field(default=None, repr=False)
    """What ``sync`` returned, see ``sync_with_offload``."""

    @contextlib.contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the time that the body takes to a phase: from when devices are done with what came before, until they are
        done with this.
        """
        name = f"{phase}_s"
        before: float = getattr(self, name)
        synchronize_used()
        began = time.perf_counter()
        try:
            yield
            synchronize_used()
        finally:  # if it failed, the time until then
            setattr(self, name, before + time.perf_counter() - began)

    def count(self, publication: Publication) -> None:
        """Add what a ``publish`` measured of itself, which its ``publication`` has."""
        for name, seconds in publication.timings.items():
            setattr(self, name, getattr(self, name) + seconds)
        self.bytes_staged += publication.nbytes
        self.version = publication.version

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """All numbers, for a logger, by their names with ``prefix`` before them: ``as_dict("timing_s/")`` has
        ``"timing_s/load_s"``. No version if it has none.
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
    """Call ``load``, ``sync`` and ``offload``, one after the other, and measure each. What fails is as in ``loaded``.

    Args:
        load: Brings the parameters to the device; None where they are not offloaded.
        sync: Is given the metrics, to fill in what it knows of its own phases (``with metrics.measure("stage"): ...``).
            What it returns is their ``result``.
        offload: Takes the parameters off the device; it is called in any case.
        metrics: The caller's own, which it has also if this raises.
    """
    with loaded(load, offload, metrics=metrics) as metrics:
        metrics.result = sync(metrics)
    return metrics


@contextlib.contextmanager
def loaded(
    load: Callable[[], object] | None, offload: Callable[[], object] | None, *, metrics: SyncMetrics | None = None
) -> Iterator[SyncMetrics]:
    """``load``, then the body, the sync, which may await, then ``offload``.

    Args:
        load: As in ``sync_with_offload``.
        offload: Is called also if ``load`` or the body raises. After a ``load`` that came half the way, parameters are
            in both places, and it must be able to start from there. If it raises then, too, the error is still the
            first; the second is logged, and is a note of the first.
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
                # As ``add_note`` of Python 3.11 does; before that, nobody prints it.
                notes = [*getattr(error, "__notes__", []), f"Then offloading failed, too:\n{text}"]
                error.__notes__ = notes  # type: ignore[attr-defined]
            raise
        measured_offload()
