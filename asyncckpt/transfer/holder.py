"""The reader's connection to a worker on any host, which holds images."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from asyncckpt.budgets import ANSWER_S, LONG_S, SILENCE_S
from asyncckpt.errors import CheckpointError
from asyncckpt.format.manifest import DIGEST_BYTES
from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.link.calls import call_of, receive_answer, tell
from asyncckpt.link.segment_store import ImageKind
from asyncckpt.shm.slots import PublishedVersion, VersionKey
from asyncckpt.threads import start
from asyncckpt.transfer.api import ImageApi, NewestVersion, NotHeld, Opened, TransferAddress
from asyncckpt.transfer.kinds import transport_named
from asyncckpt.transfer.sockets import connect
from asyncckpt.transfer.transport import Reading

P = ParamSpec("P")
T = TypeVar("T")

# Interval between pings of the other end.
_PING_S = SILENCE_S / 3
NEXT_S = 3.0
"""The longest wait for the next image or version in one question."""


class Holder:
    """A connection to one worker. Any thread may call.

    Every method raises ``OSError`` if the worker is gone or does not answer. The connection is unusable from then on.
    """

    def __init__(self, address: TransferAddress, key: bytes, transport: str, answer_s: float = ANSWER_S) -> None:
        """Connect.

        Args:
            address: The address where the worker serves.
            key: The job's key.
            transport: The name of the transport kind.
            answer_s: Timeout in seconds for each answer, and for silence of the worker during a read.

        Raises:
            OSError: The worker cannot be reached, or does not know the key.
        """
        self.address = address
        self._key, self._answer_s = key, answer_s
        self._transport, self._kind = transport, transport_named(transport)
        self._asking = threading.Lock()
        self._open: list[RemoteImage[Any]] = []
        self._connection = connect(address, key, answer_s)
        self._ended = threading.Event()
        self._pinger = threading.Thread(target=self._ping, name="asyncckpt-ping", daemon=True)
        start(self._pinger)

    def next_image(self, after: int, seconds: float) -> tuple[int, ImageKey] | None:
        """Wait for the holder's trainer to stage another image. See ``ImageApi.next_image``.

        ``seconds``: maximum time to wait, less than the timeout for an answer.
        """
        return self._call(0.0, ImageApi.next_image, after, seconds)

    def next_version(
        self,
        after: PublishedVersion | None,
        seconds: float,
        own: TransferAddress,
        refused: tuple[TransferAddress, ...] = (),
    ) -> NewestVersion:
        """Wait at most ``seconds`` for a version other than ``after``. See ``ImageApi.next_version``."""
        return self._call(0.0, ImageApi.next_version, after, seconds, own, refused)

    def ping(self) -> None:
        """Check that the worker answers."""
        self._call(0.0, ImageApi.ping)

    @overload
    def open(self, key: ImageKey, *, with_checksums: bool = False) -> RemoteImage[HeldImage]: ...

    @overload
    def open(self, key: VersionKey) -> RemoteImage[tuple[int, ...]]: ...

    def open(self, key: ImageKey | VersionKey, *, with_checksums: bool = False) -> RemoteImage[Any]:
        """Open the image of a save or of a published version. The image does not change until it is closed.

        Args:
            key: The image.
            with_checksums: For the image of a save, also get all checksums. The worker may first have to compute the
                checksums of the whole image.

        Raises:
            FileNotFoundError: The worker does not hold the image.
        """
        within = (LONG_S if with_checksums else self._answer_s) + self._kind.offer_s
        answer = self._call(within, ImageApi.open, key, self._transport, with_checksums)
        if isinstance(answer, NotHeld):
            raise FileNotFoundError(f"{_name_of(key)} cannot be read at {self._connection.peer}: {answer.why}")
        image: RemoteImage[Any] = RemoteImage(self, answer, self._read(answer))
        self._open.append(image)
        if self._ended.is_set():
            image.close()
        return image

    def close(self) -> None:
        """Close the connection. Reads that are under way raise. Safe to call twice."""
        self._ended.set()
        self._connection.close()
        for image in list(self._open):
            image.close()
        if self._pinger is not threading.current_thread():
            self._pinger.join()
        self._kind.close()

    def digests(self, lease: str, first: int, seconds: float) -> bytes | None:
        """Ask for digests of an image under a lease. See ``RemoteImage.digests``."""
        return self._call(0.0, ImageApi.digests, lease, first, seconds)

    def patches(self, lease: str, first: int, bases: bytes) -> list[bytes]:
        """Ask for patches of a version under a lease. See ``ImageApi.patches``."""
        return self._call(0.0, ImageApi.patches, lease, first, bases)

    def release(self, image: RemoteImage[Any], lease: str) -> None:
        """End the lease of an image that is closed on this side."""
        with contextlib.suppress(ValueError):
            self._open.remove(image)
        with contextlib.suppress(OSError), self._asking:
            tell(self._connection, ImageApi.end_lease, lease)

    def _read(self, opened: Opened) -> Reading:
        try:
            return self._kind.read_from(self.address, self._key, opened)
        except OSError:
            with self._asking:
                tell(self._connection, ImageApi.end_lease, opened.lease)
            raise

    def _call(self, within: float, method: Callable[Concatenate[Any, P], T], *given: P.args, **named: P.kwargs) -> T:
        """Call a method of ``ImageApi``, and return its result.

        ``within``: timeout in seconds for the answer while the other end gives signs of life. The connection has its
        own timeout for silence.
        """
        with self._asking:
            try:
                self._connection.limit(self._answer_s)
                self._connection.send(call_of(1, method, *given, **named))
                until = time.monotonic() + within
                while not (answer := receive_answer(self._connection)).number:
                    if time.monotonic() > until:
                        raise TimeoutError(f"{self._connection.peer} has not answered within {within:g} s")
            except OSError:
                self._connection.close()  # the answer may still arrive
                raise
            except Exception as error:  # the other end may have another version
                self._connection.close()
                raise ConnectionAbortedError(f"{self._connection.peer} gave no answer of this version") from error
        try:
            result: T = answer.result()
        except CheckpointError as error:
            raise ConnectionAbortedError(f"{self._connection.peer} refuses: {error.message}") from error
        return result

    def _ping(self) -> None:
        """Ping the worker regularly, so that each end notices the death of the other. Transports may not notice."""
        while not self._ended.wait(min(_PING_S, self._answer_s)):
            try:
                self.ping()
            except OSError:
                for image in list(self._open):
                    image.close()
                return

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RemoteImage(Generic[ImageKind]):
    """An image that is open at another worker, under a lease.

    It is the image of a save, or of a published version that may still be arriving at the worker.

    ``described``: see ``api.Opened``.
    """

    def __init__(self, holder: Holder, opened: Opened, reading: Reading) -> None:
        self._holder, self._lease, self._reading = holder, opened.lease, reading
        self.described: ImageKind = opened.described  # type: ignore[assignment]  # the kind of the key

    def digests(self, first: int, seconds: float) -> bytes:
        """Return digests of some spans from ``first`` on that can be read now; none after a timeout of ``seconds``.

        Raises ``OSError``, also if the other worker has given up this image.
        """
        digests = self._holder.digests(self._lease, first, seconds)
        if digests is None:
            raise ConnectionAbortedError("the worker that passes this image on has abandoned it")
        return digests

    def patches(self, first: int, bases: bytes) -> list[bytes]:
        """Return patches of the spans from ``first`` on, if the image is a version. See ``ImageApi.patches``.

        Raises ``OSError``.
        """
        patches = self._holder.patches(self._lease, first, bases)
        if len(patches) != len(bases) // DIGEST_BYTES:
            raise ConnectionAbortedError("the worker did not answer with a patch for each span")
        return patches

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of the segment from ``offset`` on. Any thread may call.

        Raises ``OSError``. The bytes are not checked.
        """
        self._reading.read(offset, into)

    def close(self) -> None:
        """End the lease. Reads that are under way raise. Safe to call twice."""
        self._reading.close()
        self._holder.release(self, self._lease)


def _name_of(key: ImageKey | VersionKey) -> str:
    return f"version {key.version}" if isinstance(key, VersionKey) else f"the image of rank {key.rank}"
