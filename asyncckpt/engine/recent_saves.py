"""What the last saves have cost this rank, for advice on how often to save."""

from __future__ import annotations

from collections import deque
from statistics import median

from asyncckpt.errors import NothingMeasuredError
from asyncckpt.interval import Advice
from asyncckpt.save_handle import Save

_MOST = 100


class RecentSaves:
    """Keeps two numbers of each of the last saves, and no handle of one that has ended: that holds on to memory."""

    def __init__(self) -> None:
        self._under_way: list[Save] = []
        self._measured: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._has_first = False  # the first of all plans, and says little of the others

    def add(self, save: Save) -> None:
        """It was called just now."""
        self.settle()
        self._under_way.append(save)

    def advice(self, mtbf_s: float, restart_s: float | None) -> Advice:
        """From the medians of what is known. Raises ``NothingMeasuredError`` where no save has been committed yet."""
        self.settle()
        if not self._measured:
            raise NothingMeasuredError("no save has been committed yet: ask again after one or two")
        stalls, lags = zip(*self._measured, strict=True)
        return Advice(median(stalls), median(lags), mtbf_s, len(stalls), restart_s)

    def settle(self) -> None:
        """Take note of those that have ended."""
        ended = [save for save in self._under_way if save.done()]
        self._under_way = [save for save in self._under_way if save not in ended]
        for save in ended:
            timings = save.timings
            if save.failure is None and {"stall_s", "durable_s", "slot_s"} <= timings.keys():
                if len(self._measured) == 1 and not self._has_first:
                    self._has_first = True
                    self._measured.clear()
                waited = timings["slot_s"]  # for storage, as saves came too often: it is no cost of a save
                self._measured.append((timings["stall_s"] - waited, timings["durable_s"] - waited))
