"""A faulty storage: a wrapper around any storage that calls back before each step, and fails if the callback fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from asyncckpt.format.write_request import Existing
from asyncckpt.storage.storage import (
    FileIdentity,
    FileStamp,
    InputFile,
    LinkSource,
    OpenAttempt,
    OutputFile,
    Resolution,
    Storage,
)

POINTS = ("begin", "create", "write", "sync", "finalize", "finalized")
"""Points of failure: before a step, but ``finalized`` is after it. Attempts that link files also have ``link``."""

Reach = Callable[[str, str], None]
"""Called with a point and a path. The step raises the callback's exception."""


class FaultyStorage(Storage):
    """Writes to ``inner`` with faults, and reads from ``inner`` without."""

    def __init__(self, inner: Storage, reach: Reach) -> None:
        self._inner, self._reach = inner, reach

    def begin_checkpoint(
        self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None, *, linked_bytes: int = 0
    ) -> OpenAttempt:
        self._reach("begin", final)
        its = self._inner.begin_checkpoint(final, attempt, nbytes, orphan_s, linked_bytes=linked_bytes)
        return _FaultyAttempt(its, final, self._reach)

    def has_claimed(self, final: str, attempt: str, name: str) -> bool:
        return self._inner.has_claimed(final, attempt, name)

    def begin_file(self, final: str, attempt: str, nbytes: int, orphan_s: float) -> OpenAttempt:
        self._reach("begin", final)
        return _FaultyAttempt(self._inner.begin_file(final, attempt, nbytes, orphan_s), final, self._reach)

    def resolve(self, final: str, attempt: str, existing: Existing, inode: int | None = None) -> Resolution:
        return self._inner.resolve(final, attempt, existing, inode)

    def revoke(self, final: str, attempt: str) -> str | None:
        return self._inner.revoke(final, attempt)

    def remove(self, leftover: str | None) -> None:
        self._inner.remove(leftover)

    def is_finalized(self, final: str, attempt: str, inode: int | None = None) -> bool:
        return self._inner.is_finalized(final, attempt, inode)

    def may_put(self, path: str, existing: Existing) -> bool:
        return self._inner.may_put(path, existing)

    def check_writable(self, path: str) -> None:
        self._inner.check_writable(path)

    def check_file_place(self, path: str) -> None:
        self._inner.check_file_place(path)

    def names_in(self, folder: str) -> list[str]:
        return self._inner.names_in(folder)

    def stamps_in(self, folder: str, name: str) -> dict[str, FileStamp | None] | None:
        return self._inner.stamps_in(folder, name)

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def size(self, path: str) -> int | None:
        return self._inner.size(path)

    def stamp(self, path: str) -> FileStamp | None:
        return self._inner.stamp(path)

    def identity(self, path: str) -> FileIdentity | None:
        return self._inner.identity(path)

    def distrust(self, path: str) -> None:
        self._inner.distrust(path)

    def read(self, path: str) -> bytes:
        return self._inner.read(path)

    def open(self, path: str) -> InputFile:
        return self._inner.open(path)

    def reading(self, path: str) -> AbstractContextManager[None]:
        return self._inner.reading(path)

    def attempts_under_way(self, folder: str) -> list[str]:
        return self._inner.attempts_under_way(folder)

    def take_name(self, path: str) -> str | None:
        return self._inner.take_name(path)

    def advance(self, path: str, text: str, at: int) -> bool:
        return self._inner.advance(path, text, at)

    def set_aside(self, path: str, why: str) -> None:
        self._inner.set_aside(path, why)


class _FaultyAttempt(OpenAttempt):
    def __init__(self, inner: OpenAttempt, final: str, reach: Reach) -> None:
        self._inner, self._final, self._reach = inner, final, reach
        self.path = inner.path

    def create(self, name: str, *, large: bool) -> OutputFile:
        self._reach("create", self.path)
        file = _FaultyFile(self._inner.create(name, large=large), self._reach)
        self.inode = self._inner.inode
        return file

    def link_source(self, name: str) -> LinkSource | None:
        return self._inner.link_source(name)

    def link(self, name: str, source: LinkSource) -> bool:
        self._reach("link", self.path)
        return self._inner.link(name, source)

    def read(self, name: str) -> bytes | None:
        return self._inner.read(name)

    def claim(self, name: str) -> bool:
        return self._inner.claim(name)

    def names(self) -> set[str]:
        return self._inner.names()

    def missing(self, names: Collection[str]) -> set[str]:
        return self._inner.missing(names)

    def finalize(self, existing: Existing) -> None:
        self._reach("finalize", self._final)
        self._inner.finalize(existing)
        self._reach("finalized", self._final)

    def is_revoked(self) -> bool:
        return self._inner.is_revoked()

    def discard(self, names: Sequence[str] | None = None) -> None:
        self._inner.discard(names)

    def release(self) -> None:
        self._inner.release()


class _FaultyFile(OutputFile):
    def __init__(self, inner: OutputFile, reach: Reach) -> None:
        self._inner, self._reach = inner, reach
        self.path, self.piece_bytes = inner.path, inner.piece_bytes

    @property
    def direct(self) -> bool:  # type: ignore[override]  # a write may change the value
        return self._inner.direct

    def write(self, data: memoryview, offset: int) -> None:
        self._reach("write", self.path)
        self._inner.write(data, offset)

    def truncate(self, nbytes: int) -> None:
        self._inner.truncate(nbytes)

    def sync(self) -> None:
        self._reach("sync", self.path)
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()
