"""The endpoint of a worker: a named socket in a folder of this user, for processes that did not start the worker.

The name stands for a rank of a job. Two workers never have the same name, because a worker holds a lock on its name.
The kernel releases the lock when the worker dies, even after a crash.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import xxhash

from asyncckpt.budgets import ANSWER_S, POLL_S
from asyncckpt.errors import CheckpointError, JobTakenError, SaveTimeoutError
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.storage.file_system import LockFile, is_at, lock_alone, opened, read_facts
from asyncckpt.threads import start, wait_until

FOLDER_VARIABLE = "ASYNC_CKPT_RUNTIME_DIR"

_BACKLOG = 64
_MEMORY = ".memory"
ROOT_LOCK = ".root"
"""The suffix of lock files for roots on object stores."""
_LOG_BYTES = 10_000


def endpoint_name(job: str, rank: int) -> str:
    """Return the name of the endpoint of ``rank`` of ``job``. The job may be any text."""
    return f"{xxhash.xxh3_128_hexdigest(os.fsencode(job))}-{rank}"


def runtime_folder() -> str:
    """Return the folder of the endpoints: ``$ASYNC_CKPT_RUNTIME_DIR``, or this user's folder in the temporary folder.

    ``$XDG_RUNTIME_DIR`` is not suitable: the system removes it when the user logs out, while a training continues.
    """
    folder = os.environ.get(FOLDER_VARIABLE) or os.path.join(tempfile.gettempdir(), f"asyncckpt-{os.geteuid()}")
    return os.path.abspath(os.path.expanduser(folder))


def endpoint_scope() -> str:
    """Return a text that is equal for two processes if they find each other's endpoints. Make the runtime folder.

    Raises ``OSError`` if that folder cannot be used.
    """
    with _opened_folder(make=True) as folder:
        facts = os.fstat(folder)
    # Several hosts may mount the same folder, but a socket in it works on one host only. So add the boot id.
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{facts.st_dev:x}/{facts.st_ino:x}"


class Endpoint:
    """The worker's side of an endpoint: it holds the name, and listens. ``close`` removes all files."""

    def __init__(self, name: str, trainer: int) -> None:
        """Take ``name`` for the trainer with that process id.

        Raises ``JobTakenError`` if another worker has the name, ``OSError`` if the runtime folder cannot be used.
        """
        self._name = name
        self._lock: LockFile | None = None
        self._closed = False
        self._folder = _open_folder(make=True)
        try:
            _sweep(self._folder)
            self._lock = _locked(self._folder, name)
            self.name_trainer(trainer)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_socket_name(name), dir_fd=self._folder)  # the socket of a killed worker
            self._socket.bind(_path(self._folder, name))
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._give_back()
            raise

    def name_trainer(self, trainer: int) -> None:
        """Note that the worker serves the trainer with that process id from now on."""
        if self._lock is not None:
            self._lock.write({"worker": os.getpid(), "trainer": trainer})

    def listen(self, answer: Callable[[SocketConnection], None]) -> None:
        """Call ``answer`` with each connection of this user from now on, each on its own thread."""
        start(threading.Thread(target=self._accept, args=[answer], name="asyncckpt-endpoint", daemon=True))

    def close(self) -> None:
        """Release the name. Open connections stay open."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._socket.close()
        self._give_back()

    def _accept(self, answer: Callable[[SocketConnection], None]) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(POLL_S)  # too many open files, perhaps
                continue
            with contextlib.ExitStack() as undo:
                undo.callback(peer.close)
                if _is_ours(peer):
                    thread = threading.Thread(target=_serve, args=[peer, answer], name="asyncckpt-answer", daemon=True)
                    with contextlib.suppress(RuntimeError):  # too many threads; the client may connect again
                        thread.start()
                        undo.pop_all()

    def _give_back(self) -> None:
        if self._lock is not None:
            _remove(self._folder, self._name)
            self._lock.close()
        os.close(self._folder)


def redirect_log(name: str) -> None:
    """Redirect stderr of this worker to the log of its endpoint, and copy the output that its dead trainer cannot read.

    Raises ``OSError``.
    """
    with _opened_folder(make=True) as folder:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(f"{name}.log", flags, 0o600, dir_fd=folder)
    stderr = sys.stderr.fileno()
    said = os.dup(stderr)
    os.dup2(log, stderr)
    os.close(log)
    os.write(stderr, os.pread(said, _LOG_BYTES, 0))
    os.close(said)


def take_log(name: str) -> str:
    """Remove the log of an endpoint, and return its text; "" if there is no log."""
    with contextlib.suppress(OSError), _opened_folder(make=False) as folder:
        fd = os.open(f"{name}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        os.unlink(f"{name}.log", dir_fd=folder)
        with open(fd, errors="replace") as file:
            return file.read(_LOG_BYTES).strip()
    return ""


@contextlib.contextmanager
def host_lock(timeout: float) -> Iterator[bool]:
    """Hold the lock of this host in a ``with`` block. Only one worker of this user has the lock at a time.

    Yields whether the lock is held: False after ``timeout`` seconds, or if the runtime folder cannot be used.
    """
    with contextlib.ExitStack() as held:
        has = False
        with contextlib.suppress(OSError):
            folder = held.enter_context(_opened_folder(make=True))
            has = wait_until(lambda: lock_alone(folder) is not False, timeout) and lock_alone(folder) is True
        yield has


@contextlib.contextmanager
def announce_memory(fd: int, end: int) -> Iterator[None]:
    """Announce in a ``with`` block that this process takes the memory file ``fd`` up to byte ``end``.

    ``announced_bytes`` counts the part of that memory that is not taken yet.
    """
    name = f"{os.getpid()}-{fd}{_MEMORY}"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder = held.enter_context(_opened_folder(make=True))
            file = held.enter_context(contextlib.closing(LockFile(name, folder)))  # the lock ends with this process
            atexit.register(file.remove)  # for a daemon thread that does not leave the block
            held.callback(atexit.unregister, file.remove)
            held.callback(file.remove)
            file.write({"end": end})
        yield


def announced_bytes() -> int:
    """Return the number of bytes that workers of this user on this host are about to take."""
    total = 0
    with contextlib.suppress(OSError), _opened_folder(make=False) as folder:
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if name.endswith(_MEMORY) and not _is_stale(name, folder):
                    facts = os.stat("/proc/{}/fd/{}".format(*name.removesuffix(_MEMORY).split("-")))
                    total += max(0, (_announced_end(name, folder) or facts.st_size) - facts.st_blocks * 512)
    return total


def _announced_end(name: str, folder: int) -> int:
    """Return the end of the announced memory, in bytes; 0 if it is not written yet. Raises ``OSError``."""
    with opened(name, os.O_NOFOLLOW, folder) as fd:
        return int(read_facts(fd).get("end", 0))


def _is_stale(name: str, folder: int) -> bool:
    """Return whether no process holds the lock of a file, and remove a file without a holder. Raises ``OSError``."""
    with opened(name, os.O_RDWR | os.O_NOFOLLOW, folder) as fd:
        is_stale = lock_alone(fd) is True
        if is_stale and is_at(fd, name, folder):
            os.unlink(name, dir_fd=folder)
        return is_stale


def endpoint_names(job: str | None = None) -> list[str]:
    """Return the names of the endpoints of this user on this host, of ``job`` or of all jobs."""
    begin = "" if job is None else endpoint_name(job, 0)[:-1]
    with contextlib.suppress(OSError), _opened_folder(make=False) as folder:
        return sorted(name for entry in _locks(folder) if (name := entry.removesuffix(".lock")).startswith(begin))
    return []


def connect(
    name: str, timeout: float | None = None, runtime: str | None = None, *, strict: bool = False
) -> SocketConnection | None:
    """Return a connection to the worker with an endpoint; None if no worker of this user accepts it.

    Args:
        name: The name of the endpoint.
        timeout: Seconds that the worker may take to accept; None: ``ANSWER_S``.
        runtime: The runtime folder; None: the folder of this process.
        strict: Raise ``SaveTimeoutError`` if a worker listens but does not accept in that time.
    """
    timeout = ANSWER_S if timeout is None else timeout
    is_full = False
    with (
        contextlib.suppress(OSError),
        _opened_folder(make=False, path=runtime) as folder,
        contextlib.ExitStack() as undo,
    ):
        peer = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        # Without this timeout, connecting to a stopped worker with a full backlog would block until it continues.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
        if code := peer.connect_ex(_path(folder, name)):
            is_full = code == errno.EAGAIN
            raise OSError(code, os.strerror(code))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        if _is_ours(peer):
            undo.pop_all()
            return SocketConnection(peer)
    if is_full and strict:
        raise SaveTimeoutError(f"a worker did not accept at its endpoint within {timeout:g} s; it may be stopped")
    return None


@contextlib.contextmanager
def _opened_folder(*, make: bool, path: str | None = None) -> Iterator[int]:
    folder = _open_folder(make=make, path=path)
    try:
        yield folder
    finally:
        os.close(folder)


def _serve(peer: socket.socket, answer: Callable[[SocketConnection], None]) -> None:
    with SocketConnection(peer) as connection, contextlib.suppress(CheckpointError, EOFError, OSError):
        answer(connection)


def _open_folder(*, make: bool, path: str | None = None) -> int:
    """Open the runtime folder (at ``path``). Raises ``OSError``, also if other users have access to the folder."""
    path = path or runtime_folder()
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    facts = os.fstat(fd)
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(
            errno.EPERM, f"it has to be a folder of this user, closed to all others; or set ${FOLDER_VARIABLE}", path
        )
    return fd


def _locked(folder: int, name: str) -> LockFile:
    """Lock ``name``. Raises ``JobTakenError`` if another worker has the name, and ``OSError``."""
    lock = LockFile(f"{name}.lock", folder)
    if lock.is_held:
        return lock
    with contextlib.closing(lock):
        if lock.is_held is None:
            why = f"it cannot be locked: allow flock, or set ${FOLDER_VARIABLE} to a folder on a file system with locks"
            raise OSError(errno.ENOLCK, why, runtime_folder())
        holders = lock.read()  # none while the holder is writing them
        raise job_taken_error(holders.get("worker", 0), holders.get("trainer", 0))


def job_taken_error(worker: int, trainer: int) -> JobTakenError:
    """Return the error for a name that another worker has.

    Args:
        worker: The process id of the worker.
        trainer: The process id of its trainer; 0: the worker waits for one, or the trainer is in another container.
    """
    if not trainer:
        return JobTakenError(
            f"this rank of this job has a worker already ({worker}; its trainer may be in another container): end it"
            " (asyncckpt workers --end), or save to another folder"
        )
    return JobTakenError(
        f"another trainer (process {trainer}, its worker {worker}) saves as this rank of this job, or has just died;"
        " end it, or save to another folder"
    )


def trainer_of(name: str, worker: int, runtime: str) -> tuple[int, float] | None:
    """Return the trainer of a worker with an endpoint, even if the worker does not answer; None if it has no trainer.

    Args:
        name: The name of the endpoint.
        worker: The process id of the worker.
        runtime: The runtime folder.

    Returns:
        The process id of the trainer, and the time when its session began (Unix time in seconds).
    """
    with (
        contextlib.suppress(OSError),
        _opened_folder(make=False, path=runtime) as folder,
        opened(f"{name}.lock", os.O_NOFOLLOW, folder) as fd,
    ):
        found = read_facts(fd)
        return (found.get("trainer", 0), os.fstat(fd).st_mtime) if found.get("worker") == worker else None
    return None


def _sweep(folder: int) -> None:
    """Remove the files of workers that were killed."""
    for entry in os.listdir(folder):
        with contextlib.suppress(OSError):
            if entry.endswith((_MEMORY, ROOT_LOCK)):
                _is_stale(entry, folder)
    for entry in _locks(folder):
        with contextlib.suppress(OSError), opened(entry, os.O_RDWR | os.O_NOFOLLOW, folder) as fd:
            if lock_alone(fd) and is_at(fd, entry, folder):
                _remove(folder, entry.removesuffix(".lock"))


def _locks(folder: int) -> Iterator[str]:
    return (entry for entry in os.listdir(folder) if entry.endswith(".lock"))


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        if not os.stat(f"{name}.log", dir_fd=folder, follow_symlinks=False).st_size:
            os.unlink(f"{name}.log", dir_fd=folder)
    # Remove the lock file last: without it, any worker may take the name.
    for file in (_socket_name(name), f"{name}.lock"):
        with contextlib.suppress(OSError):
            os.unlink(file, dir_fd=folder)


def _socket_name(name: str) -> str:
    return f"{name}.sock"


def _path(folder: int, name: str) -> str:
    """Return a short path to the socket, because the kernel allows only 107 bytes."""
    return f"/proc/self/fd/{folder}/{_socket_name(name)}"


def peer_pid(connection: SocketConnection) -> int:
    """Return the process id of the other end of a connection to an endpoint; 0 if it is in another container."""
    return _credentials(connection.socket)[0]


def _is_ours(peer: socket.socket) -> bool:
    """Return whether a process of this user is at the other end."""
    return _credentials(peer)[1] == os.geteuid()


def _credentials(peer: socket.socket) -> tuple[int, int]:
    """Return the process id and the user of the peer, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
