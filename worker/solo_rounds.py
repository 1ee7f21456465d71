"""Rounds for a job of one rank: what it reports is all there is to collect, and nobody else is told."""

from __future__ import annotations

import threading

from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.worker.rounds import round_name


class SoloRounds:
    """The methods are those of ``Rounds``, without a store."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reports: dict[str, bytes | CheckpointError] = {}

    def report(self, name: str, value: bytes | CheckpointError) -> None:
        """As ``Rounds.report``; with an error as ``Rounds.fail``. The first one counts."""
        with self._changed:
            self._reports.setdefault(name, value)
            self._changed.notify_all()

    fail = report

    def fail_soon(self, name: str, error: CheckpointError, timeout: float) -> None:
        """As ``Rounds.fail_soon``, at once."""
        self.report(name, error)

    def collect(self, name: str, timeout: float) -> list[bytes]:
        """As ``Rounds.collect``."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._reports, timeout)
            report = self._reports.pop(name, None)
        if report is None:
            raise SaveTimeoutError(f"not written within {timeout:g} s; the storage may be stalled", rank=0)
        if isinstance(report, CheckpointError):
            raise report
        return [report]

    def outcome(self, name: str, timeout: float) -> bytes | CheckpointError:
        """Never called: there is no rank but the first."""
        raise NotImplementedError

    def store_id(self, timeout: float) -> bytes:
        """Always the same."""
        return b"solo"

    def conclude(self, name: str, outcome: bytes) -> None:
        """Nobody else is told."""

    def conclude_failed(self, name: str, error: CheckpointError) -> None:
        """Nobody else is told."""

    def clear(self, kind: str, number: int) -> None:
        """Forget what came too late."""
        with self._changed:
            self._reports.pop(round_name(kind, number), None)

    def gone(self, error: CheckpointError) -> None:
        """Nobody else is told."""

    def leave(self) -> None:
        """There is nobody to leave."""

    def wait_left(self, timeout: float) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """There is no connection."""
