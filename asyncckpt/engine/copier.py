"""Which thread copies: the caller's and a few of ours; with overlap, one of ours in the place of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from asyncckpt.errors import CheckpointError
from asyncckpt.staging.host_copy import copy_pool


class Copier:
    """The threads of an engine that copy tensors into slots; with ``overlaps`` the caller does not wait for them."""

    def __init__(self, *, overlaps: bool) -> None:
        self.pool = copy_pool()
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="asyncckpt-stager") if overlaps else None
        self._last: Future[CheckpointError | None] | None = None

    def run(self, copy: Callable[[], CheckpointError | None]) -> CheckpointError | None:
        """Have ``copy`` called, now or, with overlap, behind the caller's back. Returns the failure, if it is known."""
        if self._behind is None:
            return copy()
        self._last = self._behind.submit(copy)
        return None

    def wait(self) -> None:
        """Return when nothing is being copied."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Wait for all copies, and end the threads."""
        if self._behind is not None:
            self._behind.shutdown()
        self.pool.shutdown()
