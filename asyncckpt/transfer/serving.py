"""What a worker does between hosts: it serves nobody, and follows nobody, until somebody of its job asks for it."""

from __future__ import annotations

import ipaddress
import threading
from typing import TYPE_CHECKING

from asyncckpt.link.endpoint_messages import Followed, Served
from asyncckpt.link.segment_store import SegmentStore

if TYPE_CHECKING:
    from asyncckpt.transfer.mirror import Mirror
    from asyncckpt.transfer.server import TransferServer


class Serving:
    """The transfer server of one worker, and its mirror, from when they are first needed. Any thread may call."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._segment_store = segment_store
        self._lock = threading.RLock()
        self._server: TransferServer | None = None
        self._mirror: Mirror | None = None
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
        from asyncckpt.transfer.server import TransferServer

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

    def follow(self, locator: str) -> Followed:
        """Have on this host what is published where ``locator`` says, and pass it on."""
        from asyncckpt.transfer.locator import Locator
        from asyncckpt.transfer.mirror import Mirror

        with self._lock:
            if self._mirror is not None:
                self._mirror.locator = locator
                return Followed()
            try:
                key = Locator.read(locator).key
            except (OSError, ValueError) as error:
                return Followed(str(error))
            served = self.serve(key, "", to_own_job=True)
            if self._server is None:
                return Followed(served.trouble)
            self._mirror = Mirror(self._segment_store, self._server, locator)
            return Followed()

    @property
    def follows(self) -> bool:
        """Whether it does."""
        return self._mirror is not None

    @property
    def trouble(self) -> str:
        """The reason why nothing newer comes from the publisher; "": none is known, or this follows nobody."""
        return "" if (mirror := self._mirror) is None else mirror.trouble

    def end_following(self) -> None:
        """Fetch no more. What is here stays."""
        with self._lock:
            if self._mirror is not None:
                self._mirror.close()
                self._mirror = None

    def close(self) -> None:
        """Serve nobody, and follow nobody."""
        with self._lock:
            self.end_following()
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
