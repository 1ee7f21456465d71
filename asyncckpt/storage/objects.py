"""The objects of one bucket, through obstore: what a store does, with its errors as ours.

obstore does not survive a fork: a process that is forked off one that has used it may not. Credentials, region and
endpoint are those of the environment, as obstore reads it (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``).
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

# One request may last so long: a part of 16 MiB at 140 kB/s. And so long a request is repeated.
_REQUEST = timedelta(seconds=120)
_RETRIES, _RETRY = 10, timedelta(seconds=60)
_CONNECT = timedelta(seconds=10)
# What obstore has given up at once is repeated after these.
_AT_ONCE_S = 10.0
_PAUSES_S = (0.1, 0.4, 1.6)
# Parts of one object under way at a time.
_PARTS_AT_ONCE = 8
# A store takes 10,000 parts of 5 MiB to 5 GiB for an object, all but the last of one size; S3 copies up to 5 GiB.
PART_BYTES, _MOST_PARTS = 16 << 20, 9000
_MOST_COPIED = 5 << 30
# Each that is sent by way of here takes memory.
_sending = threading.Lock()


def part_bytes_of(nbytes: int) -> int:
    """How large the parts are in which so many bytes are sent."""
    return max(PART_BYTES, -(-nbytes // _MOST_PARTS))


ObjectVersion: TypeAlias = dict[str, str]
"""What tells the contents of a key from those that it had before, or has later: ``e_tag`` and ``version``."""

_ADVICE = {
    "UnauthenticatedError": "the store does not accept the credentials, or the clock of this host is off: check both",
    "PermissionDeniedError": "check the permissions of these credentials, and the clock of this host",
    "NotSupportedError": "this store cannot do that",
}
# What obstore does not tell apart of a request that lists.
_KINDS = {"401": "UnauthenticatedError", "403": "PermissionDeniedError"}


class Found(NamedTuple):
    """What is known of an object: its ``key``, size, and when it was changed, by the clock of the store."""

    key: str
    nbytes: int
    modified: datetime
    e_tag: str


class Objects:
    """Those of one bucket. All calls raise ``StorageError`` where the store refuses, or is not there."""

    def __init__(self, store: Any, base: str) -> None:
        """``store`` is obstore's; ``base`` the address of its bucket, without a slash at its end."""
        self._store, self.base = store, base

    def get(self, key: str) -> tuple[bytes, ObjectVersion] | None:
        """All of an object, and its version; None: there is none."""

        def get() -> tuple[bytes, ObjectVersion]:
            found = self._store.get(key)
            return bytes(found.bytes()), _version(found.meta)

        return self._ask("reading", key, get)

    def get_range(self, key: str, begin: int, nbytes: int) -> memoryview:
        """Some bytes of an object, which has them."""
        found = self._ask("reading", key, lambda: memoryview(self._store.get_range(key, start=begin, length=nbytes)))
        if found is None:
            raise StorageError("reading failed: the object is gone", path=f"{self.base}/{key}")
        return found

    def head(self, key: str) -> Found | None:
        """What is known of an object; None: there is none."""
        return self._ask("looking at an object", key, lambda: _found(self._store.head(key))) if key else None

    def list(self, prefix: str) -> list[Found]:
        """All objects below a ``prefix``, which is whole parts of a path."""

        def look() -> list[Found]:
            return [_found(each) for page in self._store.list(prefix=f"{prefix}/" if prefix else None) for each in page]

        return self._ask("listing", prefix, look) or []

    def folders(self, prefix: str) -> Sequence[str]:
        """The keys of what has anything below it, one part below a ``prefix``."""
        below = f"{prefix}/" if prefix else None
        found = self._ask("listing", prefix, lambda: self._store.list_with_delimiter(prefix=below))
        return [] if found is None else found["common_prefixes"]

    def put(self, key: str, data: bytes | memoryview) -> str:
        """Make an object, or replace it, by one request. Returns its e-tag, as far as the store says it."""
        put = self._ask("writing", key, lambda: self._store.put(key, data, use_multipart=False))
        return (put or {}).get("e_tag") or ""

    def put_if(self, key: str, data: bytes, version: ObjectVersion | None) -> bool:
        """Replace an object if it still has that ``version``; None: make it if there is none.

        Returns whether it was done, as far as the store's answer says: one that was lost, and the request repeated,
        says that it was not.
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
        """Make an object of ``parts`` while they come. Their memory is sent as it is, and may not change meanwhile.
        Returns as ``put``.

        ``parts`` is called again where all has to be sent once more. What they raise is raised, and what was sent is
        thrown away.
        """
        options = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": _PARTS_AT_ONCE}
        put = self._ask("writing", key, lambda: self._store.put(key, parts(), **options))
        return (put or {}).get("e_tag") or ""

    def copy(self, key: str, to: str, nbytes: int) -> None:
        """Have an object of ``nbytes`` stand ``to`` another key, too, if it is there. The store does it, or, where it
        cannot, as with very large ones, all of it goes by way of here.
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
            # On threads of ours: obstore asks for the parts on one of its own, where it cannot be called.
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
        """Remove objects, if they are there."""
        if keys and self._ask("removing", keys[0], lambda: self._store.delete([*keys]) is None) is None and keys[1:]:
            for key in keys:  # one was missing, and some stores stop there
                self.delete([key])

    def _ask(self, doing: str, key: str, ask: Callable[[], T]) -> T | None:
        """What the store answers; None: there is no such object.

        All that is asked may be asked twice. obstore repeats what the store refuses for a while; what it does not, as
        an answer that ends too early, is repeated here. Raises ``StorageError``.
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
    """The objects of the bucket that ``address`` is in.

    Raises ``StorageError`` where obstore is missing, or this process was forked off one that has used it.
    """
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next(filter(None, map(os.environ.get, names)), "")
    return _connect(split_address(address)[0], endpoint, os.getpid())


def split_address(address: str) -> tuple[str, str]:
    """The bucket's address and the key of ``address``."""
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
        # Over TLS nobody changes what is sent; a checksum by SHA-256 would cap a host at some 700 MB/s.
        options["unsigned_payload"] = not endpoint.startswith("http://")
        if endpoint.startswith("http://"):
            client["allow_http"] = True  # type: ignore[assignment]
    retries = {"max_retries": _RETRIES, "retry_timeout": _RETRY}
    try:
        return Objects(from_url(base, client_options=client, retry_config=retries, **options), base)
    except (BaseError, ValueError) as error:
        said = " ".join(str(error).split("\n\nDebug source")[0].split())
        raise StorageError(f"the store cannot be asked: {said}; look at the environment", path=base) from error


@functools.cache
def _first_process() -> int:
    """The process that has used obstore first, of those that were forked from each other since."""
    return os.getpid()


def _found(meta: Any) -> Found:
    return Found(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"] or "")


def _version(meta: Any) -> ObjectVersion:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
