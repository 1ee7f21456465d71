"""The worker process: start it, wait for its end, and describe its exit."""

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
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from typing import NamedTuple

import psutil
import xxhash

from asyncckpt.budgets import NOTICE_S
from asyncckpt.errors import WorkerDiedError
from asyncckpt.link.calls import receive_answer
from asyncckpt.link.endpoint import FOLDER_VARIABLE, runtime_folder
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.shm.segment import Descriptor, close, memory_file
from asyncckpt.threads import process_limit, wait_until

_LAST_WORDS_BYTES = 4096
ENDED = 256
"""The exit code of a worker that another process has started. The kernel tells the real code to that process only."""
NO_PLACE, NOT_WANTED = 2, 3
"""The exit codes of a worker that was started ahead: it cannot have an endpoint; or another worker has its endpoint, or
its first trainer has started another one."""
# Prefixes of the environment variables that clients of object stores read, and that transports to other hosts read.
_OF_CLIENTS = ("AWS_", "AZURE_", "GOOGLE_", "HTTP", "ALL_PROXY", "NO_PROXY", "SSL_")
_OF_TRANSPORTS = ("NIXL_", "UCX_")
# The mark of a worker's command line.
_MARK = {"program": "asyncckpt worker"}


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of a worker process. The fields are explained in ``Config``."""

    direct_io: bool = True
    io_threads: int = 2
    nice: int = 10
    io_class: str = "best-effort"
    start_timeout: float = 60.0
    linger: float = 0.0
    endpoint: str | None = None
    """The name of its endpoint, see ``endpoint.py``; None: it has no endpoint, and never lingers."""
    job: str | None = None
    """The description of its job by its trainer (see ``publication.py``), for lists of workers."""
    rank: int = 0
    """The rank of its trainer."""
    metrics_folder: str | None = None
    ports: tuple[int, int] = (0, 0)
    """The first and the last port at which the worker may listen; (0, 0): any free port."""


class _Found:
    """A worker process that another process has started. Like ``Popen``, but without an exit code."""

    def __init__(self, pid: int, connection: SocketConnection) -> None:
        """Find the process.

        Args:
            pid: Its process id; 0: the process is in another container. A process there cannot be killed, and only
                its socket shows its end.
            connection: The connection to the process.
        """
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
        if wait_until(self.poll, timeout) is None:
            raise subprocess.TimeoutExpired("asyncckpt worker", timeout or 0.0)
        return ENDED

    def kill(self) -> None:
        if self._process is None:
            self._connection.hang_up()
        else:
            with contextlib.suppress(psutil.Error):  # the process has ended
                self._process.kill()


class WorkerProcess:
    """A worker process in a process session of its own. ``connection`` is this process's end of its socket."""

    _stderr: Descriptor | None = None
    _process: subprocess.Popen[bytes] | _Found
    is_attached = False
    """Whether the worker ran before, for another trainer."""

    def __init__(self, options: WorkerOptions) -> None:
        """Start the worker. Raises ``WorkerDiedError``."""
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
            pid: The process id of the worker; 0: the worker is in another container.
            connection: The connection to the worker.
            stderr: The file for the worker's stderr, made by ``stderr_file``.
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
            # An exception came before any caller had this object. Without its socket the process ends by itself.
            self.detach()
            self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send_stderr(self) -> None:
        """Send the worker the file for its stderr. Raises ``OSError``."""
        if self._stderr is not None:
            self.connection.send_descriptor(self._stderr.fileno())

    def wait_ready(self, timeout: float) -> str | None:
        """Wait until a worker that this process has started is up, at most ``timeout`` seconds.

        Returns the reason why others cannot find it; None: they can, if it has an endpoint. Raises ``WorkerDiedError``
        if the worker does not get ready, and ``JobTakenError`` if another worker has its endpoint.
        """
        ready: Sequence[object] = []
        with contextlib.suppress(EOFError, OSError), watched(self.pid) as sentinel:
            # Watch the process too, because a fork of the worker may hold the socket open.
            ready = wait([self.connection, *sentinel], timeout)
            if self.connection in ready:
                trouble: str | None = receive_answer(self.connection).result()
                return trouble
        # An end of file may come a little before the end of the process.
        code = self.wait(NOTICE_S) if ready else None
        self.kill()
        self.wait()
        how = f"did not get ready within {timeout:g} s" if code is None else f"{how_it_ended(code)} while it started"
        raise WorkerDiedError(f"the worker process {how}; {self.last_words()}")

    def end(self) -> None:
        """Kill a worker that this process has started, and release its resources. Leave an attached worker running."""
        if self.is_attached:
            self.detach()
            self.hang_up()
        else:
            self.kill()
            self.wait()
        self.close()

    def kill(self) -> None:
        """Kill the worker."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait at most ``timeout`` seconds for the end of the worker. Return its exit code; None after a timeout."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def detach(self) -> None:
        """Let the worker run on. Keep its process object, so that this process reaps the worker when it ends."""
        if self._process not in _detached:
            _detached.append(self._process)

    def hang_up(self) -> None:
        """Shut the connection down at once. Any thread may call."""
        self.connection.hang_up()

    def last_words(self) -> str:
        """Return the end of the worker's stderr, in a sentence."""
        fd = -1 if self._stderr is None else self._stderr.fileno()
        try:
            end = os.lseek(fd, 0, os.SEEK_END)
            text = os.pread(fd, _LAST_WORDS_BYTES, max(0, end - _LAST_WORDS_BYTES)).decode(errors="replace")
        except OSError as error:
            return f"its stderr cannot be read: {error}"
        return f"its stderr ends with: {text.strip()}" if text.strip() else "its stderr is empty"

    def close(self) -> None:
        """Close this end of the socket, and the worker's stderr file. Safe to call twice."""
        self.connection.close()
        if self._stderr is not None:
            self._stderr.close()


def not_started(text: str, error: OSError) -> WorkerDiedError:
    """Return the error to raise if starting a process failed with ``error``. ``text``: the begin of its message."""
    limit = f"; {process_limit()}" if error.errno == errno.EAGAIN else ""
    return WorkerDiedError(f"{text} {error}{limit}")


@contextlib.contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """Watch the child process ``pid`` in the block, because others may hold its socket open after its end.

    Yields a list with a descriptor, which becomes readable when the child ends; an empty list if the kernel has none.
    """
    fds: list[int] = []
    with contextlib.suppress(OSError, AttributeError):  # a Python or a kernel without pidfds
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
        return "has ended, with an unknown status because this process ignores SIGCHLD"
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def stderr_file() -> Descriptor:
    """Make a file in memory for the stderr of a worker."""
    return memory_file("asyncckpt-stderr")


def leave_folder() -> None:
    """Change to the folder "/", and keep the meaning of relative folders of modules and endpoints."""
    sys.path[:] = _module_folders()
    os.environ[FOLDER_VARIABLE] = runtime_folder()
    os.chdir("/")


def start_ahead(options: WorkerOptions) -> int:
    """Start a worker ahead of its first trainer. Return its process id.

    The worker has the standard streams and the folder of this process. Raises ``OSError``.
    """
    occupy_standard_streams()
    _code.cache_clear()  # the files may have been updated since the last start
    line = _command_line(options, None)
    return os.posix_spawn(line[0], line, _worker_environment())


def _command_line(options: WorkerOptions, fd: int | None) -> list[str]:
    """Return the command line of a worker. ``fd``: the socket of its trainer, this process; None: it has none."""
    trainer = 0 if fd is None else os.getpid()
    said = asdict(options) | _MARK | {"fd": fd, "trainer": trainer, "runtime": runtime_folder()}
    return [*command(), json.dumps(said | {"fingerprint": fingerprint()})]


def _worker_environment() -> dict[str, str]:
    # torch warns of each broken connection, with a stack. Our own error says the same in a sentence.
    # The runtime folder must be absolute, because the worker runs in "/".
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | same_modules() | {FOLDER_VARIABLE: runtime_folder()}


def fingerprint() -> str:
    """Return a text that is equal for two workers if one can continue the work of the other.

    Both workers have the same program and code, and the same environment for transports to other hosts.
    """
    facts = [command()[:2], _code(), _environment(_OF_TRANSPORTS)]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a process that its worker takes over.

    Args:
        environment: The variables that clients of object stores read.
        modules: The folders of Python modules, for modules that the worker has not imported yet.
    """

    environment: Mapping[str, str]
    modules: Sequence[str]

    @classmethod
    def here(cls) -> Surroundings:
        """Return the surroundings of this process."""
        return cls(_environment(_OF_CLIENTS), _module_folders())

    def take_over(self) -> None:
        """Apply these surroundings to this process."""
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
            with contextlib.suppress(OSError):  # a dangling link
                if name.endswith((".py", ".so")):
                    facts = os.stat(path)
                    found.append((path, facts.st_size, facts.st_mtime_ns))
    return sorted(found)


def detached_workers() -> set[int]:
    """Return the process ids of workers that this process has detached, and that still run."""
    _detached[:] = [process for process in _detached if process.poll() is None]
    return {process.pid for process in _detached}


def occupy_standard_streams() -> None:
    """Open the null device for each standard stream that is closed, as in a daemon.

    Otherwise a socket or a memory file of ours would get the number of that stream. Then printed text would be written
    there, and a child process would get another file in its place.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def same_modules() -> dict[str, str]:
    """Return an environment in which Python finds the same modules as here, even if ``sys.path`` was changed."""
    path = [entry for entry in _module_folders() if os.pathsep not in entry]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def start_module(name: str) -> tuple[subprocess.Popen[bytes], SocketConnection]:
    """Start a module as a process in its own process session. The process finds the same modules as this process.

    Args:
        name: The module. The process gets the descriptor of its end of a socket as its command-line argument.

    Returns:
        The process, and this end of the socket.

    Raises:
        WorkerDiedError: The host has refused the process.
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
    """Return the command that runs a module, in the environment of ``same_modules``."""
    path = _module_folders()
    if not any(os.pathsep in entry for entry in path):
        return [sys.executable, "-m", name]
    # PYTHONPATH cannot have a folder with a colon in its name.
    run = f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import runpy, sys; sys.path[:] = {path!r}; {run}"]


def _module_folders() -> list[str]:
    folders = []
    for entry in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the current folder was removed, so it has no modules
            folders.append(os.path.abspath(entry))
    return [folder for folder in folders if os.path.exists(folder)]


class CommandLine(NamedTuple):
    """The content of a worker's command line.

    Args:
        options: The options of the worker.
        trainer: The process id of the first trainer; 0: the worker was started before its trainer.
        runtime: The folder of the worker's endpoint.
        fd: The worker's end of the socket to the first trainer; None: the worker was started before its trainer.
        fingerprint: See the function ``fingerprint``.
    """

    options: WorkerOptions
    trainer: int
    runtime: str
    fd: int | None
    fingerprint: str


def parse(command_line: Sequence[str]) -> CommandLine | None:
    """Parse the command line of a process. Return None if the process is no worker."""
    try:
        said = json.loads(command_line[-1])
        if any(said.pop(name) != value for name, value in _MARK.items()):
            return None
        its = {name: said.pop(name) for name in ("trainer", "runtime", "fd", "fingerprint")}
        return CommandLine(WorkerOptions(**said), **its)
    except (IndexError, ValueError, AttributeError, KeyError, TypeError):  # another program, or another version
        return None


def command() -> list[str]:
    """Return the command of a worker. Tests replace this function to start a faulty worker."""
    return run_module("asyncckpt.worker")


_detached: list[subprocess.Popen[bytes] | _Found] = []
_started: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Close the trainer's ends of all sockets in a fork, for example in a data loader's worker."""
    for process in list(_started):
        process.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
