"""A sync of weights whose parameters are kept off the device: load, sync, offload."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator

from asyncckpt.weights.offload.metrics import SyncMetrics

logger = logging.getLogger(__name__)


def sync_with_offload(
    load: Callable[[], object] | None,
    sync: Callable[[SyncMetrics], object],
    offload: Callable[[], object] | None,
    *,
    metrics: SyncMetrics | None = None,
) -> SyncMetrics:
    """Call ``load``, ``sync`` and ``offload``, one after the other, and measure each.

    Args:
        load: Brings the parameters to the device; None where they are not offloaded.
        sync: Is given the metrics, to fill in what it knows of its own phases (``with metrics.measure("stage"): ...``).
            What it returns is their ``result``.
        offload: Takes the parameters off the device; it is called in any case.
        metrics: The caller's own, which it has also if this raises.

    Returns:
        The metrics.

    Raises:
        Exception: See ``loaded``.
    """
    with loaded(load, offload, metrics=metrics) as metrics:
        metrics.result = sync(metrics)
    return metrics


@contextlib.contextmanager
def loaded(
    load: Callable[[], object] | None, offload: Callable[[], object] | None, *, metrics: SyncMetrics | None = None
) -> Iterator[SyncMetrics]:
    """``load``, then the body, the sync, which may await, then ``offload``; arguments as in ``sync_with_offload``.

    - If ``load`` or the body raises, ``offload`` is called, and the error goes on. After a ``load`` that came half
      the way, parameters are in both places, and have to go back: an ``offload`` must be able to start from there.
    - If ``offload`` raises then, too, the error is still the first; the second is logged, and is a note of the first.
    - If ``offload`` alone raises, that is the error.
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
                _add_note(error, f"Then offloading failed, too:\n{text}")
            raise
        measured_offload()


def _add_note(error: BaseException, text: str) -> None:
    """``add_note`` of Python 3.11; before that, nobody prints it."""
    error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
