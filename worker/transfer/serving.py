"""Whether a worker serves its images to other hosts, and whom: nobody, until somebody of its job asks for it."""

from __future__ import annotations

import ipaddress
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
        self._own_key = self._loading_key = b""

    def serve(self, key: bytes, address: str, *, to_own_job: bool) -> Served:
        """Serve those who know ``key``.

        Args:
            key: That of the ranks; they agree upon another for each load.
            to_own_job: Whether they are those that the worker's trainer saves with. Else they load; who loaded before
                is not let in any more.
            address: A numeric one of this host, to be reached there alone; "": at all.

        Returns:
            The port, or why it cannot.
        """
        # Loaded where it is needed: no other worker shall be slower to start.
        from asyncckpt.worker.transfer.server import TransferServer

        with self._lock:
            try:
                self._server = self._server or TransferServer(self._segment_store, (key,), address)
            except OSError as error:
                return Served(0, error.strerror or str(error))
            if to_own_job:
                self._own_key = key
            else:
                self._loading_key = key
            self._server.keys = tuple(filter(None, (self._own_key, self._loading_key)))
            return Served(self._server.port)

    def close(self) -> None:
        """Serve nobody."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


def listens_at(address: str) -> str:
    """The numeric address to listen at alone, for a host that is known as ``address``; "": at all of its own.

    What a name means to others is not known here.
    """
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""
