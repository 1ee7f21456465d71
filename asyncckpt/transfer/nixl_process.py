"""``python -m asyncckpt.transfer.nixl_process FD``: the process that loads NIXL and moves bytes for its parent.

``nixl.py`` starts the process and sends commands over a socket, each a line of JSON. Each answer has the number
of its command:

    offer     let others read a segment (sent with its descriptor)                      the data that readers need
    withdraw  stop offering that segment
    buffer    the memory to read into (sent with its descriptor)
    meet      connect to an agent that offers a segment                                 the agent's name
    read      from that agent into the buffer                                           when the bytes are here
    part      disconnect from that agent

NIXL needs a separate process because its UCX library kills the process if offered memory is gone. Over TCP, UCX also
kills the process if the other side goes away while this process is stopped. NIXL also cannot abort a transfer: the
transfer writes to memory until the process ends.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

MODULES = ("nixl_cu12", "nixl_cu13")
"""The NIXL packages; the first that is installed is used."""
COMMAND_BYTES = 1 << 16
"""The largest size of a command or an answer."""

# NIXL's own Python bindings poll for work without a pause. UCX wakes up the progress thread when there is work, so this
# interval is only for events that UCX does not signal.
_PROGRESS_US = 100_000
# Shortest and longest polling interval for the state of a transfer.
_LOOK_S, _LOOK_SELDOM_S = 0.0002, 0.02
# Interval between checks that the parent lives. Another process may have inherited the parent's end of the socket.
_IDLE_S = 2.0
# Without InfiniBand devices, no memory is registered with a device. Registration would require writable memory.
_DEVICES = "/sys/class/infiniband"

# The number of a command, and the answer.
_Answer = tuple[int, object]


class _Agent:
    """A NIXL agent with its registrations. The registrations end together with the agent."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE  # only one thread calls
        self.agent = bindings.nixlAgent(f"asyncckpt-{secrets.token_hex(8)}", config)
        self._backend = self.agent.createBackend("UCX", {})

    def register(self, address: int, nbytes: int) -> None:
        regions = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, [(address, nbytes, 0, "")])
        self.agent.registerMem(regions, [self._backend])

    def read(self, name: str, address: int, to: int, nbytes: int) -> int:
        kind = self._bindings.DRAM_SEG
        into = self._bindings.nixlXferDList(kind, [(to, nbytes, 0)])
        source = self._bindings.nixlXferDList(kind, [(address, nbytes, 0)])
        handle: int = self.agent.createXferReq(self._bindings.NIXL_READ, into, source, name, "", [self._backend])
        return handle


class _Mapping:
    """Memory of the parent process, mapped here."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, prot)
        os.close(fd)
        self.nbytes = nbytes
        numpy = importlib.import_module("numpy")  # NIXL has loaded numpy anyway, and ctypes refuses read-only memory
        self._view = numpy.frombuffer(self._memory, numpy.uint8)
        self.address: int = self._view.ctypes.data

    def close(self) -> None:
        del self._view
        self._memory.close()


class _Reads:
    """The reads that are under way, into one buffer."""

    def __init__(self, bindings: Any, buffer: _Mapping) -> None:
        self._bindings, self._buffer = bindings, buffer
        self._agent = _Agent(bindings)
        self._agent.register(buffer.address, buffer.nbytes)
        self._agents: dict[str, int] = {}  # by name of a connected agent: number of its readings
        self._transfers: dict[int, tuple[int, float]] = {}  # by number: the handle, and the start time

    def meet(self, number: int, metadata: str) -> list[_Answer]:
        name = self._agent.agent.loadRemoteMD(bytes.fromhex(metadata)).decode()
        self._agents[name] = self._agents.get(name, 0) + 1
        return [(number, name)]

    def part(self, number: int, name: str) -> list[_Answer]:
        self._agents[name] -= 1
        if not self._agents[name]:
            del self._agents[name]
            self._agent.agent.invalidateRemoteMD(name)
        return [(number, None)]

    def read(self, number: int, name: str, address: int, at: int, nbytes: int) -> list[_Answer]:
        handle = self._agent.read(name, address, self._buffer.address + at, nbytes)
        self._transfers[number] = handle, time.monotonic()
        return self._state(number, handle, lambda: self._agent.agent.postXferReq(handle, ""))

    def look(self) -> list[_Answer]:
        """Return the answers to all transfers that have ended."""
        answers = []
        for number, (handle, _) in list(self._transfers.items()):
            answers += self._state(number, handle, partial(self._agent.agent.getXferStatus, handle))
        return answers

    def pause(self) -> float:
        """Return the seconds to wait before the next call of ``look``."""
        if not self._transfers:
            return _IDLE_S
        youngest = max(begun for _, begun in self._transfers.values())
        return min(max(_LOOK_S, (time.monotonic() - youngest) / 10), _LOOK_SELDOM_S)

    def _state(self, number: int, handle: int, ask: Callable[[], Any]) -> list[_Answer]:
        answer: object = None
        try:
            state = ask()
            if state == self._bindings.NIXL_IN_PROG:
                return []
            if state != self._bindings.NIXL_SUCCESS:
                answer = {"failure": "the transfer has failed"}
        except Exception as error:
            answer = _failure(error)
        del self._transfers[number]
        with contextlib.suppress(Exception):  # the transfer has ended; leftovers end with this process
            self._agent.agent.releaseXferReq(handle)
        return [(number, answer)]


class _NixlServer:
    def __init__(self, connection: socket.socket, bindings: Any) -> None:
        self._connection, self._bindings = connection, bindings
        self._offered: dict[int, tuple[_Agent, _Mapping]] = {}
        self._reads: _Reads | None = None
        self._commands: dict[str, Callable[..., list[_Answer]]] = {
            "offer": self._offer,
            "withdraw": self._withdraw,
            "buffer": self._begin_reads,
        }

    def run(self) -> None:
        """Serve until the parent process leaves or dies."""
        parent = os.getppid()
        while os.getppid() == parent:
            pause = _IDLE_S if self._reads is None else self._reads.pause()
            if select.select([self._connection], [], [], pause)[0]:
                text, fds, *_ = socket.recv_fds(self._connection, COMMAND_BYTES, 1)
                if not text:
                    return
                number, command, *arguments = json.loads(text)
                try:
                    answers = self._commands[command](number, *fds, *arguments)
                except Exception as error:
                    answers = [(number, _failure(error))]
                self._answer(answers)
            if self._reads is not None:
                self._answer(self._reads.look())

    def _offer(self, number: int, fd: int, key: int, nbytes: int) -> list[_Answer]:
        mapping = _Mapping(fd, nbytes, writable=os.path.isdir(_DEVICES))
        try:
            # Each segment has its own agent, so no process can read the segment once the agent is gone.
            agent = _Agent(self._bindings)
            agent.register(mapping.address, nbytes)
        except Exception:
            mapping.close()
            raise
        self._offered[key] = agent, mapping
        return [(number, [agent.agent.getLocalMD().hex(), mapping.address])]

    def _withdraw(self, number: int, key: int) -> list[_Answer]:
        agent, mapping = self._offered.pop(key)
        del agent  # also closes all its connections
        mapping.close()
        return [(number, None)]

    def _begin_reads(self, number: int, fd: int, nbytes: int) -> list[_Answer]:
        self._reads = _Reads(self._bindings, _Mapping(fd, nbytes, writable=True))
        self._commands |= {"meet": self._reads.meet, "part": self._reads.part, "read": self._reads.read}
        return [(number, None)]

    def _answer(self, answers: list[_Answer]) -> None:
        for answer in answers:
            self._connection.send(json.dumps(answer).encode())


def _failure(error: Exception) -> dict[str, str]:
    return {"failure": f"{type(error).__name__}: {error}"}


def main(argv: list[str]) -> None:
    """Carry out commands from the socket until the other end closes it."""
    # Ignore SIGTERM, because launchers signal every process of a job.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(argv[0]))
    found = next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)
    if found is None:
        sys.exit("NIXL is not installed here: pip install 'asyncckpt[nixl]'")
    bindings = importlib.import_module(f"{found}._bindings")
    with contextlib.suppress(ConnectionError):
        _NixlServer(connection, bindings).run()
    os._exit(0)  # transfers that are under way are abandoned


if __name__ == "__main__":
    main(sys.argv[1:])
