"""The kinds of transport, by their names in ``Config.transport``."""

from __future__ import annotations

from asyncckpt.transfer.sockets import SocketTransport
from asyncckpt.transfer.transport import TransportKind


def transport_named(name: str) -> TransportKind:
    """Return the transport kind with that name. Raises ``ValueError`` if the name is unknown."""
    if name == "sockets":
        return SocketTransport()
    if name == "nixl":
        from asyncckpt.transfer.nixl import NixlTransport  # imported only if needed

        return NixlTransport()
    raise ValueError(f"there is no transport {name!r}")
