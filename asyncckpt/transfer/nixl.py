"""Transport by NIXL: one-sided reads over the fastest path that UCX finds between two hosts (RDMA, EFA, TCP).

NIXL has no authentication. Any process that reaches its ports can read the offered memory, and over RDMA also write it.
Use NIXL only on a trusted fabric. ``UCX_NET_DEVICES`` selects the interfaces.

On both sides NIXL runs in a separate process (``nixl_process.py`` gives the reasons). Bytes arrive in a buffer that the
NIXL process shares with the reader, and the reader copies them from there. NIXL never gets the caller's memory, so
nothing is written to this memory once a reading is closed. The buffer is registered only once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimeoutOfFuture
from dataclasses import dataclass
from typing import Any

from asyncckpt.budgets import SILENCE_S
from asyncckpt.link.process import run_module, same_modules
from asyncckpt.shm.memcpy import address_of, memcpy
from asyncckpt.shm.segment import Segment, memory_file
from asyncckpt.transfer.api import Opened, TransferAddress
from asyncckpt.transfer.nixl_process import COMMAND_BYTES
from asyncckpt.transfer.transport import Offering, Reading, TransportKind

_LAST_WORDS_BYTES = 1000


class NixlProcess:
    """A NIXL process. Any thread may call. Commands raise ``OSError`` if they fail or the process has ended."""

    def __init__(self) -> None:
        """Start the process. Raises ``OSError``."""
        self._lock = threading.Condition()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        self._abandoned: dict[int, Callable[[], object]] = {}
        self.has_ended = False
        self._stderr = memory_file("nixl-stderr")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*run_module("asyncckpt.transfer.nixl_process"), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,  # UCX writes its warnings there
                    stderr=self._stderr,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    cwd="/",
                    env=same_modules(),
                )
            except BaseException:
                self._socket.close()
                self._stderr.close()
                raise
        self._thread = threading.Thread(target=self._receive, name="asyncckpt-nixl", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def is_usable(self, within: float = 0.0) -> bool:
        """Wait at most ``within`` seconds for abandoned commands to end. Return whether the process can be used."""
        with self._lock:
            return self._lock.wait_for(lambda: self.has_ended or not self._abandoned, within) and not self.has_ended

    def ask(self, command: str, *arguments: object, fds: Sequence[int] = ()) -> Any:
        """Run a command, and return the answer. Raises ``TimeoutError``."""
        number, answer = self.begin(command, *arguments, fds=fds)
        try:
            return answer.result(SILENCE_S)
        except (TimeoutError, TimeoutOfFuture) as error:
            self.abandon(number, lambda: None)
            raise TimeoutError(f"NIXL takes too long to {command}") from error

    def begin(self, command: str, *arguments: object, fds: Sequence[int] = ()) -> tuple[int, Future[Any]]:
        """Send a command. Return the number of the command, and the future of the answer."""
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            if self.has_ended:
                raise self._ended()
            self._asked[number] = answer
        try:
            socket.send_fds(self._socket, [json.dumps([number, command, *arguments]).encode()], list(fds))
        except OSError:
            with self._lock:
                self._asked.pop(number, None)
            raise
        return number, answer

    def abandon(self, number: int, on_end: Callable[[], object]) -> None:
        """Stop waiting for a command. Its future raises. ``on_end`` is called when the command ends, if ever."""
        with self._lock:
            answer = self._asked.pop(number, None)
            if answer is not None:
                self._abandoned[number] = on_end
                answer.set_exception(ConnectionAbortedError("the reading of this image was ended"))
        if answer is None:
            on_end()

    def close(self) -> None:
        """Kill the process, which ends all its reads and writes. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        with self._lock:
            self._socket.close()
            self._stderr.close()

    def _receive(self) -> None:
        while True:
            try:
                text = self._socket.recv(COMMAND_BYTES)
            except OSError:
                text = b""
            if not text:
                break
            self._on_answer(*json.loads(text))
        with self._lock:
            self.has_ended = True
            for answer in self._asked.values():
                answer.set_exception(self._ended())
            self._asked.clear()
            self._lock.notify_all()

    def _on_answer(self, number: int, said: Any) -> None:
        with self._lock:
            answer = self._asked.pop(number, None)
            on_end = self._abandoned.pop(number, None)
            self._lock.notify_all()
            if answer is not None:
                if isinstance(said, dict):
                    answer.set_exception(ConnectionResetError(f"NIXL has failed: {said['failure']}"))
                else:
                    answer.set_result(said)
        if on_end is not None:
            on_end()

    def _ended(self) -> OSError:
        words = ""
        if not self._stderr.closed:
            end = os.lseek(self._stderr.fileno(), 0, os.SEEK_END)
            text = os.pread(self._stderr.fileno(), _LAST_WORDS_BYTES, max(0, end - _LAST_WORDS_BYTES))
            words = text.decode(errors="replace").strip()
        return ConnectionResetError(f"the process that has NIXL has ended; its stderr ends with: {words or 'nothing'}")


# Size of a piece in bytes, number of pieces for all readings of a process, and number of pieces that one read has under
# way.
PIECE_BYTES = 4 << 20
_PIECES = 8
_AHEAD = 2
# An abandoned transfer that takes longer than this is considered stuck.
_LATE_S = 0.5


class _Reader:
    """The NIXL process for this process's reads, and the pieces of the shared buffer."""

    def __init__(self) -> None:
        """Start the NIXL process. Raises ``OSError``."""
        self.users = 0
        self.owner = os.getpid()
        self.process = NixlProcess()
        nbytes = _PIECES * PIECE_BYTES
        try:
            with memory_file("nixl-buffer") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self._memory = mmap.mmap(file.fileno(), nbytes)
                self.process.ask("buffer", nbytes, fds=[file.fileno()])
        except BaseException:
            self.process.close()
            raise
        self._address = address_of(memoryview(self._memory))
        self._changed = threading.Condition()
        self._free = list(range(_PIECES))

    def close(self) -> None:
        """End the NIXL process and unmap the buffer. Call after all readings are closed."""
        self.process.close()
        self._memory.close()

    def take(self, reading: _NixlReading, *, wait: bool) -> int | None:
        """Take a piece of the buffer; None if none is free or the reading is closed. Raises ``TimeoutError``."""
        begun = time.monotonic()
        with self._changed:
            while not self._free and wait and not reading.is_closed and not self.process.has_ended:
                self._changed.wait(_LATE_S)
                if time.monotonic() > begun + (SILENCE_S if self.process.is_usable() else 2 * _LATE_S):
                    raise TimeoutError("other transfers, which are stuck, have all of the buffer")
            return self._free.pop() if self._free and not reading.is_closed else None

    def give_back(self, piece: int) -> None:
        """Make a piece available for other reads."""
        with self._changed:
            self._free.append(piece)
            self._changed.notify()

    def wake(self) -> None:
        """Wake the threads that wait for a piece."""
        with self._changed:
            self._changed.notify_all()

    def copy(self, piece: int, into: memoryview) -> None:
        """Copy a piece that has arrived."""
        memcpy(address_of(into), self._address + piece * PIECE_BYTES, len(into))


_lock = threading.Lock()
_reader: _Reader | None = None


def _used_reader() -> _Reader:
    """Return the process-wide reader. A reader with a stuck transfer stays with its users; new users get another."""
    global _reader
    with _lock:
        if _reader is None or _reader.owner != os.getpid() or not _reader.process.is_usable(_LATE_S):
            _reader = _Reader()
        _reader.users += 1
        return _reader


def _let_go(reader: _Reader) -> None:
    global _reader
    with _lock:
        reader.users -= 1
        if reader.users:
            return
        if _reader is reader:
            _reader = None
    reader.close()


@dataclass
class _Flying:
    """A piece that is being fetched."""

    number: int
    answer: Future[Any]
    piece: int
    into: memoryview


class _NixlReading(Reading):
    def __init__(self, reader: _Reader, metadata: str, address: int) -> None:
        self._reader, self._address = reader, address
        self._name: str = reader.process.ask("meet", metadata)
        self._changed = threading.Condition()
        self._flying: dict[int, _Flying] = {}
        self._copying = 0
        self.is_closed = False

    def read(self, offset: int, into: memoryview) -> None:
        mine: deque[_Flying] = deque()
        try:
            for at in range(0, len(into), PIECE_BYTES):
                part = into[at : at + PIECE_BYTES]
                piece = self._reader.take(self, wait=not mine)
                while piece is None and mine:
                    self._finish(mine.popleft())
                    piece = self._reader.take(self, wait=not mine)
                if piece is None:
                    raise ConnectionAbortedError("the reading of this image was ended")
                mine.append(self._begin(offset + at, part, piece))
                if len(mine) == _AHEAD:
                    self._finish(mine.popleft())
            while mine:
                self._finish(mine.popleft())
        finally:
            for flying in mine:
                self._abandon(flying)

    def close(self) -> None:
        with self._changed:
            was_closed, self.is_closed = self.is_closed, True
            left = list(self._flying.values())
        for flying in left:
            self._abandon(flying)
        self._reader.wake()
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
        if not was_closed and self._reader.process.is_usable():
            try:
                self._reader.process.ask("part", self._name)
            except OSError:
                pass  # the NIXL process has ended

    def _begin(self, offset: int, into: memoryview, piece: int) -> _Flying:
        with self._changed:
            if self.is_closed:
                self._reader.give_back(piece)
                raise ConnectionAbortedError("the reading of this image was ended")
            where = self._address + offset, piece * PIECE_BYTES, len(into)
            try:
                number, answer = self._reader.process.begin("read", self._name, *where)
            except OSError:
                self._reader.give_back(piece)
                raise
            flying = self._flying[number] = _Flying(number, answer, piece, into)
            return flying

    def _finish(self, flying: _Flying) -> None:
        """Wait until a piece has arrived, and copy the piece to its destination."""
        try:
            try:
                flying.answer.result(SILENCE_S)
            except (TimeoutError, TimeoutOfFuture) as error:
                raise TimeoutError("the holder sends nothing") from error
            with self._changed:
                if self.is_closed:
                    raise ConnectionAbortedError("the reading of this image was ended")
                del self._flying[flying.number]
                self._copying += 1
            try:
                self._reader.copy(flying.piece, flying.into)
            finally:
                self._reader.give_back(flying.piece)
                with self._changed:
                    self._copying -= 1
                    self._changed.notify_all()
        finally:
            self._abandon(flying)

    def _abandon(self, flying: _Flying) -> None:
        """Free a piece of the buffer when its transfer has ended, or at once if the piece has arrived."""
        with self._changed:
            known = self._flying.pop(flying.number, None)
        if known is not None:
            self._reader.process.abandon(flying.number, lambda: self._reader.give_back(flying.piece))


class _NixlOffering(Offering):
    def __init__(self, kind: NixlTransport, offered: _Offered) -> None:
        self._kind, self._offered = kind, offered
        self.description = offered.description

    def close(self) -> None:
        self._kind.end_lease(self._offered)


@dataclass
class _Offered:
    """An offered segment with ``leases`` users."""

    process: NixlProcess
    key: int
    description: bytes
    leases: int = 0


class NixlTransport(TransportKind):
    """The transport kind called ``nixl``."""

    offer_s = SILENCE_S

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._readers: list[_Reader] = []
        self._closed = False
        self._holder: NixlProcess | None = None
        self._offered: dict[int, _Offered] = {}

    def offer(self, segment: Segment) -> Offering:
        with self._lock:
            if self._holder is None or not self._holder.is_usable():
                self._end_holder()
                self._holder = NixlProcess()
            offered = self._offered.get(id(segment))
            if offered is None:
                key = next(self._keys)
                said = self._holder.ask("offer", key, segment.nbytes, fds=[segment.fileno()])
                offered = self._offered[id(segment)] = _Offered(self._holder, key, json.dumps(said).encode())
            offered.leases += 1
            return _NixlOffering(self, offered)

    def end_lease(self, offered: _Offered) -> None:
        """End one lease on a segment."""
        with self._lock:
            offered.leases -= 1
            if offered.leases or offered.process is not self._holder:
                return
            self._offered = {key: each for key, each in self._offered.items() if each is not offered}
            try:
                offered.process.ask("withdraw", offered.key)
            except OSError:
                self._end_holder()

    def read_from(self, address: TransferAddress, key: bytes, opened: Opened) -> Reading:
        metadata, base = json.loads(opened.offer)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the reading of images was ended")
            if not self._readers or not self._readers[-1].process.is_usable(_LATE_S):
                self._readers.append(_used_reader())
            reader = self._readers[-1]
        return _NixlReading(reader, metadata, base)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end_holder()
            while self._readers:
                _let_go(self._readers.pop())

    def _end_holder(self) -> None:
        """End the process that offers segments, so that no offered segment can be read from now on."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None
            self._offered.clear()
