"""The services of a worker for other hosts: a transfer server and a mirror. Each starts on demand."""

from __future__ import annotations

import ipaddress
import threading
from typing import TYPE_CHECKING

from asyncckpt.link.api import Served
from asyncckpt.link.segment_store import SegmentStore

if TYPE_CHECKING:
    from asyncckpt.transfer.mirror import Mirror
    from asyncckpt.transfer.server import TransferServer


class Serving:
    """The transfer server and the mirror of one worker, each created on first use. Any thread may call."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._segment_store = segment_store
        self._lock = threading.RLock()
        self._server: TransferServer | None = None
        self._mirror: Mirror | None = None
        self._own_key = self._loading_key = b""
        self.ports = (0, 0)
        """The first and the last port to listen at; (0, 0): any free port."""
        self._place = ("", self.ports)

    def serve(self, key: bytes, address: str, *, to_own_job: bool) -> Served:
        """Serve images and versions to processes that know ``key``.

        Args:
            key: The key of the ranks. The ranks agree on a new key for each load.
            to_own_job: True for the ranks that save together with the worker's trainer. False for ranks that load; the
                key of earlier loads is then no longer accepted.
            address: A numeric address of this host to listen at; "": all addresses.

        Returns:
            The port, or the reason why the worker cannot serve.
        """
        # Import only here, so that workers without a server start faster.
        from asyncckpt.transfer.server import TransferServer

        with self._lock:
            place = (address, self.ports)
            if to_own_job and self._mirror is None and self._server is not None and place != self._place:
                self._server.close()  # the next trainer of the worker knows this host by another address
                self._server = None
            self._place = place if self._server is None else self._place
            try:
                self._server = self._server or TransferServer(self._segment_store, (key,), address, self.ports)
            except OSError as error:
                return Served(0, error.strerror or str(error))
            if to_own_job:
                self._own_key = key
            else:
                self._loading_key = key
            self._server.keys = tuple(filter(None, (self._own_key, self._loading_key)))
            return Served(self._server.port)

    def follow(self, locator: str) -> str | None:
        """Mirror the publication of ``locator`` on this host, and serve it to other hosts. See ``WorkerApi.follow``."""
        from asyncckpt.transfer.locator import Locator
        from asyncckpt.transfer.mirror import Mirror

        with self._lock:
            if self._mirror is not None:
                self._mirror.locator = locator
                return None
            try:
                key = Locator.read(locator).key
            except (OSError, ValueError) as error:
                return str(error)
            served = self.serve(key, "", to_own_job=True)
            if self._server is None:
                return served.trouble
            self._mirror = Mirror(self._segment_store, self._server, locator)
            return None

    @property
    def follows(self) -> bool:
        """Whether this worker follows a publication."""
        return self._mirror is not None

    @property
    def trouble(self) -> str:
        """The reason why no newer version arrives from the publisher; "": unknown, or no publication is followed."""
        return "" if (mirror := self._mirror) is None else mirror.trouble

    def end_following(self) -> None:
        """Stop mirroring. The versions on this host stay."""
        with self._lock:
            if self._mirror is not None:
                self._mirror.close()
                self._mirror = None

    def close(self) -> None:
        """Stop serving and mirroring."""
        with self._lock:
            self.end_following()
            if self._server is not None:
                self._server.close()
                self._server = None


def listens_at(address: str) -> str:
    """Return the numeric address to listen at, for a host known as ``address``; "": all addresses.

    A host name yields "", because it may resolve differently on other hosts.
    """
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""
