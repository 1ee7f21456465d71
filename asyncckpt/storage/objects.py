"""The objects of one bucket, accessed through obstore, with its errors translated.

obstore does not survive a fork: a process that was forked from a user of obstore cannot use obstore. obstore reads
credentials, region and endpoint from the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``).
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

from asyncckpt.errors import StorageError

T = TypeVar("T")
SCHEMES = ("s3", "gs", "az")

# Timeout of one request: enough for a part of 16 MiB at 140 kB/s. Below: number of retries of a request, their timeout.
_REQUEST = timedelta(seconds=120)
_RETRIES, _RETRY = 10, timedelta(seconds=60)
_CONNECT = timedelta(seconds=10)
# If obstore gives up a request within this time, retry the request after these pauses.
_AT_ONCE_S = 10.0
_PAUSES_S = (0.1, 0.4, 1.6)
# Number of parts of one object under way at a time.
_PARTS_AT_ONCE = 8
# An object has at most 10,000 parts of 5 MiB to 5 GiB, all of one size except the last. S3 copies up to 5 GiB.
PART_BYTES, _MOST_PARTS = 16 << 20, 9000
_MOST_COPIED = 5 << 30
# Held during a copy through this host, because each such copy takes memory.
_sending = threading.Lock()


def part_bytes_of(nbytes: int) -> int:
    """Return the size in bytes of each part of an object of ``nbytes`` bytes."""
    return max(PART_BYTES, -(-nbytes // _MOST_PARTS))


ObjectVersion: TypeAlias = dict[str, str]
"""Identifies the contents of a key among earlier and later contents: ``e_tag`` and ``version``."""

_ADVICE = {
    "UnauthenticatedError": "the store does not accept the credentials, or the clock of this host is off: check both",
    "PermissionDeniedError": "check the permissions of these credentials, and the clock of this host",
    "NotSupportedError": "this store cannot do that",
}
# Errors of list requests, which obstore does not distinguish by type.
_KINDS = {"401": "UnauthenticatedError", "403": "PermissionDeniedError"}


class Found(NamedTuple):
    """Facts of an object: its ``key``, its size in bytes, and the time of its last change, by the store's clock."""

    key: str
    nbytes: int
    modified: datetime
    e_tag: str


class Objects:
    """The objects of one bucket. All calls raise ``StorageError`` if the store refuses or cannot be reached."""

    def __init__(self, store: Any, base: str) -> None:
        """Use ``store``, an obstore store. ``base``: address of its bucket, without a slash at its end."""
        self._store, self.base = store, base

    def get(self, key: str) -> tuple[bytes, ObjectVersion] | None:
        """Return an object's bytes and its version; None if there is no such object."""

        def get() -> tuple[bytes, ObjectVersion]:
            found = self._store.get(key)
            return bytes(found.bytes()), _version(found.meta)

        return self._ask("reading", key, get)

    def get_range(self, key: str, begin: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` bytes of an existing object, from ``begin`` on."""
        found = self._ask("reading", key, lambda: memoryview(self._store.get_range(key, start=begin, length=nbytes)))
        if found is None:
            raise StorageError("reading failed: the object is gone", path=f"{self.base}/{key}")
        return found

    def head(self, key: str) -> Found | None:
        """Return the facts of an object; None if there is no such object."""
        return self._ask("looking at an object", key, lambda: _found(self._store.head(key))) if key else None

    def list(self, prefix: str) -> list[Found]:
        """Return all objects below ``prefix``, which consists of whole path parts."""

        def look() -> list[Found]:
            return [_found(each) for page in self._store.list(prefix=f"{prefix}/" if prefix else None) for each in page]

        return self._ask("listing", prefix, look) or []

    def folders(self, prefix: str) -> Sequence[str]:
        """Return the keys one part below ``prefix`` that have objects below them."""
        below = f"{prefix}/" if prefix else None
        found = self._ask("listing", prefix, lambda: self._store.list_with_delimiter(prefix=below))
        return [] if found is None else found["common_prefixes"]

    def put(self, key: str, data: bytes | memoryview) -> str:
        """Create or replace an object in one request. Return its e-tag; empty if the store does not report it."""
        put = self._ask("writing", key, lambda: self._store.put(key, data, use_multipart=False))
        return (put or {}).get("e_tag") or ""

    def put_if(self, key: str, data: bytes, version: ObjectVersion | None) -> bool:
        """Replace an object if it still has ``version``. With None, create it if there is no object.

        Returns False if the store reports a failed condition. This also happens after a lost answer, because the first
        request took effect, and the store refuses the retry.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def put() -> bool:
            try:
                self._store.put(key, data, mode="create" if version is None else version)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        return bool(self._ask("deciding by a condition", key, put))

    def put_parts(self, key: str, parts: Callable[[], Iterator[memoryview]], part_bytes: int) -> str:
        """Create an object from ``parts``. Send the parts while they are produced. Return as ``put``.

        The parts are sent from their own memory, which must not change meanwhile. ``parts`` is called again if the
        object has to be sent again. If ``parts`` raises, its error is raised, and the sent parts are discarded.
        """
        options = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": _PARTS_AT_ONCE}
        put = self._ask("writing", key, lambda: self._store.put(key, parts(), **options))
        return (put or {}).get("e_tag") or ""

    def copy(self, key: str, to: str, nbytes: int) -> None:
        """Copy an object of ``nbytes`` to the key ``to``, if the object exists.

        The store makes the copy. If the store cannot copy the object, e.g. because it is very large, the bytes pass
        through this host.
        """
        if nbytes <= _MOST_COPIED:
            try:
                self._ask("copying", to, lambda: self._store.copy(key, to))
                return
            except StorageError:
                if nbytes <= PART_BYTES:
                    raise
        part_bytes = part_bytes_of(nbytes)
        begins = range(0, nbytes, part_bytes)

        def read(begin: int) -> memoryview:
            return self.get_range(key, begin, min(part_bytes, nbytes - begin))

        def parts() -> Iterator[memoryview]:
            # Read ahead on separate threads. obstore asks for the parts on its own thread, and obstore cannot be called
            # there.
            ahead: deque[Future[memoryview]] = deque()
            for begin in begins:
                ahead.append(pool.submit(read, begin))
                if len(ahead) == _PARTS_AT_ONCE:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

        with _sending, ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="asyncckpt-copy") as pool:
            if self.head(key) is not None:
                self.put_parts(to, parts, part_bytes)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, if they exist."""
        if keys and self._ask("removing", keys[0], lambda: self._store.delete([*keys]) is None) is None and keys[1:]:
            for key in keys:  # one object was missing, and some stores stop at a missing object
                self.delete([key])

    def _ask(self, doing: str, key: str, ask: Callable[[], T]) -> T | None:
        """Return the store's answer to ``ask``; None if there is no such object. Raises ``StorageError``.

        ``ask`` must be safe to repeat. obstore itself retries some failures for a while. This method retries other
        failures, e.g. an answer that ends too early.
        """
        from obstore.exceptions import BaseError

        for pause in (*_PAUSES_S, None):
            begun = time.monotonic()
            try:
                return ask()
            except (BaseError, OSError, ValueError, NotImplementedError) as error:
                said = str(error).split("\n\nDebug source")[0]
                is_missing = "NoSuchBucket" in said or "ContainerNotFound" in said
                if isinstance(error, FileNotFoundError) and not is_missing:
                    return None
                advice = _ADVICE.get(_KINDS.get(said.partition("status code: ")[2][:3], type(error).__name__))
                if pause is None or is_missing or advice is not None or time.monotonic() - begun > _AT_ONCE_S:
                    said = "there is no such bucket" if is_missing else " ".join(said.split())[:400]
                    otherwise = "make it, or choose another" if is_missing else "look at the store and the network"
                    path = f"{self.base}/{key}"
                    raise StorageError(f"{doing} failed: {said}; {advice or otherwise}", path=path) from error
                time.sleep(pause)
        return None


def objects_at(address: str) -> Objects:
    """Return the objects of the bucket of ``address``.

    Raises ``StorageError`` if obstore is missing, or if this process was forked from a user of obstore.
    """
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next(filter(None, map(os.environ.get, names)), "")
    return _connect(split_address(address)[0], endpoint, os.getpid())


def split_address(address: str) -> tuple[str, str]:
    """Split ``address`` into the address of its bucket and the key."""
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key.strip("/")


@functools.cache
def _connect(base: str, endpoint: str, process: int) -> Objects:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise StorageError("object stores need obstore: pip install 'asyncckpt[cloud]'", path=base) from error
    if process != _first_process():
        raise StorageError("a forked process cannot use object stores: start it by exec, or spawn", path=base)
    options: dict[str, Any] = {}
    client = {"timeout": _REQUEST, "connect_timeout": _CONNECT}
    if base.startswith("s3://"):
        if endpoint:
            options["endpoint"] = endpoint
        # TLS protects the request body. A checksum by SHA-256 would cap a host at some 700 MB/s.
        options["unsigned_payload"] = not endpoint.startswith("http://")
        if endpoint.startswith("http://"):
            client["allow_http"] = True  # type: ignore[assignment]
    retries = {"max_retries": _RETRIES, "retry_timeout": _RETRY}
    try:
        return Objects(from_url(base, client_options=client, retry_config=retries, **options), base)
    except (BaseError, ValueError) as error:
        said = " ".join(str(error).split("\n\nDebug source")[0].split())
        raise StorageError(f"the store cannot be asked: {said}; check credentials and endpoint", path=base) from error


def forget_connections() -> None:
    """Forget the cached clients. The next ``objects_at`` makes new clients."""
    _connect.cache_clear()


@functools.cache
def _first_process() -> int:
    """Return the id of the process that used obstore first. Forked children inherit the cached id."""
    return os.getpid()


def _found(meta: Any) -> Found:
    return Found(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"] or "")


def _version(meta: Any) -> ObjectVersion:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
