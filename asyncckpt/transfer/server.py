"""The transfer server: a worker lets processes of its job, on any host, read images of saves and published versions.

A process that connects must prove that it knows a key of the job. Otherwise its connection is dropped. Each connection
has a thread. Opening an image takes a lease, which ends with the connection. The image does not change during a lease.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.budgets import CHECK_S, NOTICE_S, POLL_S, SILENCE_S
from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.link.calls import Answer, carry_out
from asyncckpt.link.segment_store import Leased, SegmentStore
from asyncckpt.ranks.store import listen
from asyncckpt.shm.slots import PublishedVersion, VersionKey
from asyncckpt.transfer.api import ImageApi, NewestVersion, NotHeld, Opened, TransferAddress
from asyncckpt.transfer.distribution import Distribution
from asyncckpt.transfer.kinds import transport_named
from asyncckpt.transfer.sealed_connection import SealedConnection
from asyncckpt.transfer.transport import Offering, TransportKind
from asyncckpt.transfer.versions import ServedVersions

logger = logging.getLogger(__name__)

# Maximum number of strangers. A stranger has not proved the key yet.
_STRANGERS = 512
_NOT_HELD = NotHeld("it is not held any more, or not yet")


@dataclass
class _Lease:
    key: ImageKey | VersionKey
    image: Leased[Any]
    offering: Offering
    connection: SealedConnection

    def close(self) -> None:
        self.offering.close()
        self.image.close()


class TransferServer:
    """Serves the images and versions of a segment store to processes that know one of ``keys``, until it is closed.

    ``address``: the numeric address of this host to listen at; "": all addresses. ``port``: the port.
    """

    def __init__(
        self, segment_store: SegmentStore, keys: Sequence[bytes], address: str = "", ports: tuple[int, int] = (0, 0)
    ) -> None:
        """Listen. Raises ``OSError``. ``ports``: the first and the last port to try."""
        self._segment_store = segment_store
        self.versions = ServedVersions(segment_store)
        """The published versions of the segment store."""
        self._distribution = Distribution()
        self.keys = keys
        """The accepted keys. May be replaced."""
        self._listener, self.address = listen(address, ports)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # in the order of arrival
        self._known: set[SealedConnection] = set()
        self._leases: dict[str, _Lease] = {}
        self._kinds: dict[str, TransportKind] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="asyncckpt-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Drop all connections, end all leases, and release the port."""
        with self._lock:
            self._closed = True
            for stranger in self._strangers:
                _shut(stranger)
            for peer in self._known:
                peer.close()
        self._segment_store.end_waits()
        self.versions.end_waits()
        _shut(self._listener)  # wakes the thread
        self._thread.join()
        self._listener.close()
        for thread in list(self._threads):
            thread.join()
        for kind in self._kinds.values():
            kind.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.0 if self._closed else POLL_S)  # perhaps too many open files
                continue
            with self._lock:
                self._strangers[connection] = None
                if self._closed or len(self._strangers) > _STRANGERS:
                    _shut(connection if self._closed else next(iter(self._strangers)))
            thread = threading.Thread(target=self._serve, args=[connection], name="asyncckpt-transfer", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # too many threads
                self._threads.discard(thread)
                with self._lock:
                    self._strangers.pop(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        peer = None
        try:
            peer = SealedConnection(connection, self.keys, asks=False, silence=NOTICE_S)
            with self._lock:
                self._strangers.pop(connection)
                self._known.add(peer)
                if self._closed:
                    peer.close()
            # No timeout until the peer has a lease, because an idle peer without a lease blocks nobody.
            peer.limit(SILENCE_S, before=0)
            reader = _Reader(self, peer)
            while True:
                carry_out(peer.receive(), ImageApi, reader, lambda answer, _: peer.send(answer.sent()))
        except EOFError as error:
            logger.warning("a connection to the images held here is dropped: %s", error)
        except OSError as error:
            logger.debug("a connection to the images held here has ended: %s", error)
        except Exception:
            logger.exception("a connection to the images held here is dropped: please report this")
        finally:
            self._distribution.leave(peer)
            with self._lock:
                self._strangers.pop(connection, None)
                if peer is not None:
                    self._known.discard(peer)
                    peer.close()
                ended = [name for name, lease in self._leases.items() if lease.connection is peer]
                leases = [self._leases.pop(name) for name in ended]
            for lease in leases:
                lease.close()
            self._threads.discard(threading.current_thread())

    def open(
        self, peer: SealedConnection, key: ImageKey | VersionKey, transport: str, with_checksums: bool
    ) -> Opened | NotHeld:
        """Let a peer read an image. See ``ImageApi.open``."""
        leased: Leased[HeldImage] | Leased[tuple[int, ...]] | None
        if isinstance(key, ImageKey):
            leased = self._segment_store.lease(key, with_checksums=with_checksums)
        else:
            leased = self.versions.lease(key)
        if leased is None:
            return _NOT_HELD
        try:
            offering = self._kind(transport).offer(leased.segment)
        except (OSError, ValueError) as error:
            leased.close()
            return NotHeld(f"it cannot be read by way of {transport}: {error}")
        name = secrets.token_hex(8)
        with self._lock:
            self._leases[name] = _Lease(key, leased, offering, peer)
        peer.limit(SILENCE_S)  # a peer with a lease pings; a stopped peer must not hold its lease forever
        return Opened(name, leased.described, offering.description)

    def end_lease(self, name: str) -> None:
        """End a lease."""
        with self._lock:
            lease = self._leases.pop(name, None)
        if lease is not None:
            lease.close()

    def wait_staged(self, after: int, seconds: float) -> tuple[int, ImageKey] | None:
        """Wait for an image of a save. See ``ImageApi.next_image``."""
        return self._segment_store.wait_staged(after, seconds)

    def next_version(
        self,
        peer: SealedConnection,
        after: PublishedVersion | None,
        seconds: float,
        own: TransferAddress,
        refused: tuple[TransferAddress, ...],
    ) -> NewestVersion:
        """Wait for a version. See ``ImageApi.next_version``."""
        host = peer.peer.rpartition(":")[0].removeprefix("::ffff:")  # of an IPv4 peer
        own = own if own.host else TransferAddress(host, own.port)
        self._distribution.has(peer, own, after and after.key)
        newest = self.versions.wait_newer(after, seconds)
        if newest is None:
            return NewestVersion(None, None)
        return NewestVersion(newest, self._distribution.assign(peer, own, newest.key, refused))

    def _kind(self, name: str) -> TransportKind:
        with self._lock:
            if name not in self._kinds:
                self._kinds[name] = transport_named(name)
            return self._kinds[name]

    @contextlib.contextmanager
    def used(self, name: str) -> Iterator[_Lease]:
        """Yield the lease of this ``name``. Its memory stays mapped even if the lease ends meanwhile."""
        with contextlib.ExitStack() as held:
            with self._lock:
                lease = self._leases.get(name)
                if lease is None or lease.connection not in self._known:
                    raise ConnectionAbortedError("a request came without a lease")
                held.enter_context(lease.image.used())
            yield lease


class _Reader(ImageApi):
    """Carries out the calls of one connection."""

    def __init__(self, server: TransferServer, peer: SealedConnection) -> None:
        self._server, self._peer = server, peer

    def ping(self) -> None:
        pass

    def open(self, key: ImageKey | VersionKey, transport: str, with_checksums: bool) -> Opened | NotHeld:
        with _heard(self._peer):
            return self._server.open(self._peer, key, transport, with_checksums)

    def digests(self, lease: str, first: int, seconds: float) -> bytes | None:
        with self._server.used(lease) as leased:
            return leased.image.digests(first, seconds)

    def patches(self, lease: str, first: int, bases: bytes) -> list[bytes]:
        with self._server.used(lease) as leased:
            return self._server.versions.patches(leased.key, first, bases)

    def read(self, lease: str, offset: int, nbytes: int) -> None:
        with self._server.used(lease) as leased:
            self._peer.send_bytes(leased.image.segment.view[offset : offset + nbytes])

    def end_lease(self, lease: str) -> None:
        self._server.end_lease(lease)

    def next_image(self, after: int, seconds: float) -> tuple[int, ImageKey] | None:
        return self._server.wait_staged(after, seconds)

    def next_version(
        self,
        after: PublishedVersion | None,
        seconds: float,
        own: TransferAddress,
        refused: tuple[TransferAddress, ...],
    ) -> NewestVersion:
        return self._server.next_version(self._peer, after, seconds, own, refused)


@contextlib.contextmanager
def _heard(peer: SealedConnection) -> Iterator[None]:
    """Send signs of life during the block, because computing the checksums of an image may take minutes."""
    is_done = threading.Event()

    def say() -> None:
        with contextlib.suppress(OSError):
            while not is_done.wait(CHECK_S):
                peer.send(Answer(0).sent())

    thread = threading.Thread(target=say, name="asyncckpt-transfer", daemon=True)
    with contextlib.suppress(RuntimeError):  # too many threads: only the answer is a sign of life
        thread.start()
    try:
        yield
    finally:
        is_done.set()
        if thread.ident is not None:
            thread.join()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
