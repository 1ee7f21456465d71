"""The client of the process that loads NIXL (``nixl_process.py``)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimeoutOfFuture
from typing import Any

from asyncckpt.link.process import run_module, same_modules
from asyncckpt.transfer.nixl_process import COMMAND_BYTES

# Timeout for the start of the process, and for every command except ``read``.
ANSWER_S = 30.0
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
        self._stderr = os.memfd_create("nixl-stderr", os.MFD_CLOEXEC)
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
                os.close(self._stderr)
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
            return answer.result(ANSWER_S)
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
        """Stop waiting for a command: its future raises. ``on_end`` is called when the command ends, if ever."""
        with self._lock:
            answer = self._asked.pop(number, None)
            if answer is not None:
                self._abandoned[number] = on_end
                answer.set_exception(ConnectionAbortedError("the reading of this image was ended"))
        if answer is None:
            on_end()

    def close(self) -> None:
        """Kill the process, so that nothing is read or written there any more. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        with self._lock:
            self._socket.close()
            stderr, self._stderr = self._stderr, -1
        if stderr >= 0:
            os.close(stderr)

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
        if self._stderr >= 0:
            end = os.lseek(self._stderr, 0, os.SEEK_END)
            text = os.pread(self._stderr, _LAST_WORDS_BYTES, max(0, end - _LAST_WORDS_BYTES))
            words = text.decode(errors="replace").strip()
        return ConnectionResetError(f"the process that has NIXL has ended; its last words: {words or 'none'}")
