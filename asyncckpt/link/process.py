"""The worker as a process: how the trainer starts it, and how it has ended."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from typing import NamedTuple, NoReturn

import psutil
import xxhash

from asyncckpt.errors import WorkerDiedError
from asyncckpt.link.endpoint import FOLDER_VARIABLE, runtime_folder
from asyncckpt.link.messages import Ready, Refused, receive
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.shm.segment import Descriptor, close
from asyncckpt.threads import process_limit

_LAST_WORDS_BYTES = 4096
_END_S = 1.0  # what a process may take to end after its socket is closed
_POLL_S = 0.02
ENDED = 256
"""The exit code of a worker that another process has started: the kernel tells it to nobody else."""
# The beginnings of names in the environment that clients of object stores read, and transports to other hosts.
_OF_CLIENTS = ("AWS_", "AZURE_", "GOOGLE_", "HTTP", "ALL_PROXY", "NO_PROXY", "SSL_")
_OF_TRANSPORTS = ("NIXL_", "UCX_")
# By this a worker's command line is known among all others.
_MARK = {"program": "asyncckpt worker"}


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How the worker process runs; the fields mean what they mean in ``Config``."""

    direct_io: bool = True
    io_threads: int = 2
    nice: int = 10
    io_class: str = "best-effort"
    start_timeout: float = 60.0
    linger: float = 0.0
    endpoint: str | None = None
    """Where others find it, see ``endpoint.py``; None: nowhere, and it never lingers."""
    job: str | None = None
    """What it is for, as its trainer says it (see ``publication.py``); for those who list workers."""
    rank: int = 0
    """The rank of its trainer."""
    metrics_folder: str | None = None


class _Found:
    """A worker process that another process has started. Like ``Popen``, but nobody knows how it ends."""

    def __init__(self, pid: int, connection: SocketConnection) -> None:
        """``pid``: 0 if it is in another container. Then its socket alone shows its end, and it cannot be killed."""
        self.pid, self._connection = pid, connection
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid) if pid else None
            return
        self._process = None

    def poll(self) -> int | None:
        if self._process is None:
            return None if self._connection.has_other_end() else ENDED
        with contextlib.suppress(psutil.Error):
            return None if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE else ENDED
        return ENDED

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("asyncckpt worker", timeout or 0.0)
            time.sleep(_POLL_S)
        return ENDED

    def kill(self) -> None:
        if self._process is None:
            self._connection.hang_up()
        else:
            with contextlib.suppress(psutil.Error):  # it has ended
                self._process.kill()


class WorkerProcess:
    """A worker process in a session of its own, with our end of its socket, ``connection``."""

    _stderr: Descriptor | None = None
    _process: subprocess.Popen[bytes] | _Found
    is_attached = False
    """Whether it ran before, for another trainer."""

    def __init__(self, options: WorkerOptions) -> None:
        """Start it. Raises ``WorkerDiedError``."""
        detached_workers()
        try:
            occupy_standard_streams()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                self.connection = SocketConnection(ours)
                self._stderr = stderr_file()
                self._process = self._start(options, theirs.fileno())
        except BaseException as error:
            with contextlib.suppress(AttributeError):
                self.close()
            if isinstance(error, OSError):
                raise not_started("the worker process did not start:", error) from error
            raise
        _started.add(self)

    @classmethod
    def attached(cls, pid: int, connection: SocketConnection, stderr: Descriptor) -> WorkerProcess:
        """Return a worker that runs already.

        Args:
            pid: Its process id; 0 if it is in another container.
            connection: The connection to it.
            stderr: The file that it writes stderr to, of ``stderr_file``.
        """
        self = cls.__new__(cls)
        self.connection, self._stderr, self.is_attached = connection, stderr, True
        own = next((process for process in _detached if pid and process.pid == pid), None)
        self._process = own or _Found(pid, connection)
        if own is not None:
            _detached.remove(own)
        _started.add(self)
        return self

    def _start(self, options: WorkerOptions, fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            _command_line(options, fd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            pass_fds=[fd],
            start_new_session=True,
            cwd="/",
            env=_worker_environment(),
        )

    def __del__(self) -> None:
        if self._stderr is not None and not self._stderr.closed:
            # An exception came before somebody had this. Without its socket the process ends by itself.
            self.detach()
            self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send_stderr(self) -> None:
        """Send the worker the file that it is to write stderr to. Raises ``OSError``."""
        if self._stderr is not None:
            self.connection.send_descriptor(self._stderr.fileno())

    def wait_ready(self, timeout: float) -> str | None:
        """Wait until it is up. Return the reason why others cannot find it; None: they can, if it has an endpoint.

        Raises ``WorkerDiedError``, ``JobTakenError`` if another worker has its endpoint.
        """
        ready: Sequence[object] = []
        with contextlib.suppress(EOFError, OSError), watched(self.pid) as sentinel:
            # Its socket alone would not tell: a fork of it may hold that open.
            ready = wait([self.connection, *sentinel], timeout)
            if self.connection in ready:
                said: Ready | Refused = receive(self.connection)
                if isinstance(said, Refused):
                    raise said.error
                return said.trouble
        # An end of file may come a little before the end of the process.
        code = self.wait(_END_S) if ready else None
        if not self.is_attached:
            self.kill()
            self.wait()
        how = f"did not get ready within {timeout:g} s" if code is None else f"{how_it_ended(code)} while it started"
        raise WorkerDiedError(f"the worker process {how}; {self.last_words()}")

    def end(self) -> None:
        """End it at once, and give back what it took; or leave one that was attached to, with what it holds."""
        if self.is_attached:
            self.detach()
            self.hang_up()
        else:
            self.kill()
            self.wait()
        self.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait ``timeout`` seconds for its end, and return its exit code; None where it has not ended."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def detach(self) -> None:
        """It goes on while this process lives on; Python is to take note of its end."""
        if self._process not in _detached:
            _detached.append(self._process)

    def hang_up(self) -> None:
        """End all talk with it, at once, in whatever thread."""
        self.connection.hang_up()

    def last_words(self) -> str:
        """The end of what it wrote to stderr, in a sentence."""
        fd = -1 if self._stderr is None else self._stderr.fileno()
        try:
            end = os.lseek(fd, 0, os.SEEK_END)
            text = os.pread(fd, _LAST_WORDS_BYTES, max(0, end - _LAST_WORDS_BYTES)).decode(errors="replace")
        except OSError as error:
            return f"what it said cannot be read: {error}"
        return f"its last words: {text.strip()}" if text.strip() else "it said nothing"

    def close(self) -> None:
        """Give our end of the socket and its stderr back. Safe to call twice."""
        self.connection.close()
        if self._stderr is not None:
            self._stderr.close()


def not_started(text: str, error: OSError) -> WorkerDiedError:
    """Return what to raise for ``error``, with which a process could not be started; ``text`` says which process."""
    limit = f"; {process_limit()}" if error.errno == errno.EAGAIN else ""
    return WorkerDiedError(f"{text} {error}{limit}")


@contextlib.contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """Watch the child process ``pid`` in the block, because others may hold its socket open after its end.

    Yields a list with a descriptor, which becomes readable when the child ends; an empty list if the kernel has none.
    """
    fds: list[int] = []
    with contextlib.suppress(OSError, AttributeError):  # a Python without them
        fds.append(os.pidfd_open(pid))
    try:
        yield fds
    finally:
        for fd in fds:
            close(fd)


def how_it_ended(code: int | None) -> str:
    """Return the exit code of a child process in words. A process that runs, and has closed its socket, has None."""
    if code is None:
        return "closed its socket"
    if code == ENDED:
        return "has ended"
    if code == 0 and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        return "has ended, and nobody knows how, because this process ignores SIGCHLD"
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def stderr_file() -> Descriptor:
    """Make a file in memory that a worker writes stderr to."""
    return Descriptor.of(os.memfd_create, "asyncckpt-stderr", os.MFD_CLOEXEC)


def become_worker(options: WorkerOptions) -> NoReturn:
    """Become a worker that waits for its first trainer. The process keeps its standard streams.

    Raises ``OSError``.
    """
    occupy_standard_streams()
    line, environment = _command_line(options, None), _worker_environment()
    os.chdir("/")
    os.execve(line[0], line, environment)


def _command_line(options: WorkerOptions, fd: int | None) -> list[str]:
    """Return the command line of a worker. ``fd``: the socket of its trainer, this process; None: it has none."""
    trainer = 0 if fd is None else os.getpid()
    said = asdict(options) | _MARK | {"fd": fd, "trainer": trainer, "runtime": runtime_folder()}
    return [*command(), json.dumps(said | {"fingerprint": fingerprint()})]


def _worker_environment() -> dict[str, str]:
    # torch warns, with a stack, of each connection that breaks; we say it in a sentence.
    # And a relative folder is another one from "/".
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | same_modules() | {FOLDER_VARIABLE: runtime_folder()}


def fingerprint() -> str:
    """Return a text that is the same for two workers if one can go on for the other.

    They have the same program and code, and the same environment for transports to other hosts.
    """
    facts = [command()[:2], _code(), _environment(_OF_TRANSPORTS)]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


@dataclass(frozen=True)
class Surroundings:
    """The part of a process that its worker takes over.

    Args:
        environment: The variables that clients of object stores read.
        modules: The folders of Python modules, for those that are not imported yet.
    """

    environment: Mapping[str, str]
    modules: Sequence[str]

    @classmethod
    def here(cls) -> Surroundings:
        """Return the surroundings of this process."""
        return cls(_environment(_OF_CLIENTS), _module_folders())

    def take_over(self) -> None:
        """Give this process these surroundings."""
        for name in _environment(_OF_CLIENTS).keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        sys.path[:] = self.modules


def _environment(begins: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.upper().startswith(begins)}


@functools.cache
def _code() -> list[tuple[str, int, int]]:
    """Return the files of this package: path, size, and time of the last change in ns."""
    found = []
    package = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    for folder, _, names in os.walk(package, followlinks=True):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # a link to nowhere
                if name.endswith((".py", ".so")):
                    facts = os.stat(path)
                    found.append((path, facts.st_size, facts.st_mtime_ns))
    return sorted(found)


def detached_workers() -> set[int]:
    """The process ids of workers that this process has left, and that linger."""
    _detached[:] = [process for process in _detached if process.poll() is None]
    return {process.pid for process in _detached}


def occupy_standard_streams() -> None:
    """Open the null device for each standard stream that is closed, as in a daemon.

    Otherwise a socket or memory of ours has the number of that stream: what somebody prints is written there, and a
    child gets another file in its place.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def same_modules() -> dict[str, str]:
    """The environment for a Python that finds the same modules as this one, whatever this process did to its path."""
    path = [entry for entry in _module_folders() if os.pathsep not in entry]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def start_module(name: str) -> tuple[subprocess.Popen[bytes], SocketConnection]:
    """Start a module as a process in a session of its own, which finds the same modules as this one.

    Args:
        name: The module. Its argument is the descriptor of its end of a socket.

    Returns:
        The process, and this end of the socket.

    Raises:
        WorkerDiedError: The host has refused it.
    """
    try:
        occupy_standard_streams()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            command_line = [*run_module(name), str(theirs.fileno())]
            fds = [theirs.fileno()]
            environment = same_modules()
            started = subprocess.Popen(
                command_line, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True, env=environment
            )
            undo.pop_all()
    except OSError as error:
        raise not_started(f"{name} did not start:", error) from error
    return started, SocketConnection(ours)


def run_module(name: str) -> list[str]:
    """The command that runs a module, in the environment of ``same_modules``."""
    path = _module_folders()
    if not any(os.pathsep in entry for entry in path):
        return [sys.executable, "-m", name]
    # A folder with a colon in its name cannot be told by the environment.
    run = f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import runpy, sys; sys.path[:] = {path!r}; {run}"]


def _module_folders() -> list[str]:
    folders = []
    for entry in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the current folder was removed, and no module is there any more
            folders.append(os.path.abspath(entry))
    return [folder for folder in folders if os.path.exists(folder)]


class CommandLine(NamedTuple):
    """The content of a worker's command line.

    ``trainer``: the process id of its first trainer; 0: it was started ahead of it. ``runtime``: the folder of its
    endpoint. ``fd``: its end of the socket to that trainer. ``fingerprint``: see ``fingerprint``.
    """

    options: WorkerOptions
    trainer: int
    runtime: str
    fd: int | None
    fingerprint: str


def parse(command_line: Sequence[str]) -> CommandLine | None:
    """Read the command line of a process; None if it is no worker."""
    try:
        said = json.loads(command_line[-1])
        if any(said.pop(name) != value for name, value in _MARK.items()):
            return None
        its = {name: said.pop(name) for name in ("trainer", "runtime", "fd", "fingerprint")}
        return CommandLine(WorkerOptions(**said), **its)
    except (IndexError, ValueError, AttributeError, KeyError, TypeError):  # as of any other process, or another version
        return None


def command() -> list[str]:
    """Return the command of a worker. Tests replace it by a faulty one."""
    return run_module("asyncckpt.worker")


_detached: list[subprocess.Popen[bytes] | _Found] = []
_started: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A fork (a data loader's worker, say) must not hold the trainer's end of a socket open."""
    for process in list(_started):
        process.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
