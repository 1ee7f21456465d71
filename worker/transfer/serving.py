"""Whether a worker serves its images to other hosts, and whom: nobody, until somebody of its job asks for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from asyncckpt.worker.endpoint_messages import Served
from asyncckpt.worker.segment_store import SegmentStore

if TYPE_CHECKING:
    from asyncckpt.worker.transfer.server import TransferServer


class Serving:
    """The transfer server of one worker, from when it is first needed. Any thread may call."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._segment_store = segment_store
        self._lock = threading.Lock()
        self._server: TransferServer | None = None

    def serve(self, key: bytes, address: str) -> Served:
        """Serve those who know ``key``, and from now on nobody else.

        Args:
            key: That of the job; a job that is started again has another.
            address: A numeric one of this host, to be reached there alone; "": at all.

        Returns:
            The port, or why it cannot.
        """
        # Loaded where it is needed: no other worker shall be slower to start.
        from asyncckpt.worker.transfer.server import TransferServer

        with self._lock:
            try:
                self._server = self._server or TransferServer(self._segment_store, key, address)
            except OSError as error:
                return Served(0, error.strerror or str(error))
            self._server.key = key
            return Served(self._server.port)

    def close(self) -> None:
        """Serve nobody."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None
