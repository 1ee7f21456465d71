"""The lock of a root: one job at a time saves to a folder of checkpoints, from whichever host.

The first rank's worker holds it from before its first save until its last one has ended, also when its trainer has
died meanwhile. It is a lock of the kernel, on a small file in the folder: it ends with its holder, however that ends.
The file says who that is, for those who are refused, and which job the folder is of. Who only reads needs no lock.
An object store has no locks: the file of a root there is in the runtime folder, and holds for this host alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from asyncckpt.errors import JobTakenError, unless_interrupt
from asyncckpt.link.endpoint import ROOT_LOCK, endpoint_name, endpoint_scope, runtime_folder
from asyncckpt.link.messages import Claim, Claimed, RootHolder
from asyncckpt.link.takeover import is_running
from asyncckpt.storage import is_address
from asyncckpt.storage.file_system import is_at, lock_alone, opened

logger = logging.getLogger(__name__)

LOCK_NAME = "asyncckpt.lock"

_MOST_BYTES = 4096
_POLL_S = 0.1
# How long the worker of a trainer that has died may take to see that, and to say so; on another host it is not known
# whether the trainer has died.
_NOTICE_S = 5.0


class RootLock:
    """The lock of one root, held by this process until ``release``."""

    def __init__(self, fd: int, path: str, holder: RootHolder) -> None:
        """Say in the file who holds it; ``take`` does."""
        self._fd, self._path = fd, path
        self._holder = holder
        self._write()

    @classmethod
    def take(cls, claim: Claim, trainer: int) -> RootLock | RootHolder:
        """Take the lock for the trainer with that process id. Returns it, or who has it.

        Raises ``JobTakenError`` where the folder is of another job, ``OSError`` where there can be no lock.
        """
        if is_address(claim.root):
            endpoint_scope()  # makes the runtime folder
        path = _lock_path(claim.root)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                is_ours = lock_alone(fd)
                found = _read(fd)
                if is_ours is None:
                    raise OSError("its file system has no locks")
                if not is_ours:
                    return found
                if is_at(fd, path):  # else somebody has removed it meanwhile
                    _check_job(claim, found)
                    job_id = claim.job_id or found.job_id
                    scope = _scope() if trainer else ""  # of a trainer in another container nobody knows the id
                    own = RootHolder(socket.gethostname(), scope, os.getpid(), trainer, job_id, leaving=False)
                    lock = cls(fd, path, own)
                    fd = -1
                    return lock
            finally:
                if fd >= 0:
                    os.close(fd)

    def announce_end(self) -> None:
        """Say that the trainer has gone: the lock will be free when all is written."""
        self._holder = replace(self._holder, leaving=True)
        self._write()

    def release(self) -> None:
        """Let others save there. What the file says stays, where it is beside checkpoints."""
        if self._path.endswith(ROOT_LOCK):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        os.close(self._fd)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # no space: who is refused is told less
            # In one call: it is read at any moment, on other hosts too.
            os.pwrite(self._fd, text := json.dumps(asdict(self._holder)).ljust(1000).encode(), 0)
            os.ftruncate(self._fd, len(text))
            os.fsync(self._fd)


def take_root(claim: Claim, ask: Callable[[], Claimed], timeout: float) -> str | None:
    """Have a worker take the lock of a root; one that is about to be free is waited for.

    Args:
        claim: What is asked for.
        ask: Asks the worker for it.
        timeout: Seconds for which to wait for a worker that writes out what a dead trainer had staged.

    Returns:
        Why there is no lock all the same; None: the worker has it.

    Raises:
        JobTakenError: Another job has it, or its worker does not end.
    """
    begun = time.monotonic()
    is_told = False
    while (found := ask()).holder is not None:
        holder = found.holder
        who = f"the worker {holder.worker} on host {holder.host}, of the trainer {holder.trainer}"
        who += f" of job {holder.job_id!r}," if holder.job_id else ","
        is_near = holder.scope == _scope()
        is_ending = holder.leaving or (is_near and not is_running(holder.trainer))
        patience = timeout if is_ending else 0.0 if is_near else _NOTICE_S
        if time.monotonic() - begun >= min(patience, timeout):
            raise JobTakenError(
                f"{who} is still writing here what that trainer had staged; wait for it, or end it"
                if is_ending
                else f"{who} saves to this folder; end that job, or save to another folder",
                path=claim.root,
            )
        if not is_told:
            logger.warning("waiting until %s lets go of %s", who, claim.root)
            is_told = True
        time.sleep(_POLL_S)
    return found.trouble


def is_finishing(root: str) -> bool:
    """Whether the worker of a trainer that is gone has the lock: it may be about to write what that one had staged.

    That is seen in the kernel's list of locks, of this host alone: who tried to take the lock would, for that moment,
    refuse it to a worker that wants it.
    """
    try:
        with opened(_lock_path(root), os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            holder, inode = _read(fd), os.fstat(fd).st_ino
        if holder.scope != _scope() or is_running(holder.trainer):
            return False
        with open("/proc/locks") as locks:  # number, kind, mode, type, holder, device and inode, ...
            fields = [line.split() for line in locks]
        return any(
            [*its[1:2], *its[4:5]] == ["FLOCK", str(holder.worker)] and its[5].rpartition(":")[2] == str(inode)
            for its in fields
        )
    except unless_interrupt(OSError):
        return False


def check_job(root: str, job_id: str | None) -> None:
    """Raise ``JobTakenError`` if the folder ``root`` belongs to another job than ``job_id``."""
    if job_id is None:
        return
    with contextlib.suppress(OSError):  # nobody has ever claimed it, or nobody can say
        with opened(_lock_path(root), os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            found = _read(fd)
        _check_job(Claim(root, job_id), found)


def _check_job(claim: Claim, found: RootHolder) -> None:
    if claim.job_id and found.job_id and claim.job_id != found.job_id:
        raise JobTakenError(
            f"this folder is of job {found.job_id!r}, and this is job {claim.job_id!r}: choose another folder, or"
            f" remove {LOCK_NAME} in it to give it to this job",
            path=claim.root,
        )


def _read(fd: int) -> RootHolder:
    """Who has taken the lock last; with empty fields where the file does not say. Raises ``OSError``."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(f"{LOCK_NAME} is no file")
    try:
        found = json.loads(os.pread(fd, _MOST_BYTES, 0))
        host, scope, worker, trainer, leaving = (found[name] for name in _FIELDS)
        job_id = found["job_id"] if isinstance(found["job_id"], str) else None
        return RootHolder(str(host), str(scope), int(worker), int(trainer), job_id, leaving=leaving is True)
    except (ValueError, KeyError, TypeError):  # it has just been made
        return RootHolder("unknown", "", 0, 0, None, leaving=False)


_FIELDS = ("host", "scope", "worker", "trainer", "leaving")


def _lock_path(root: str) -> str:
    if is_address(root):
        return os.path.join(runtime_folder(), endpoint_name(root, 0) + ROOT_LOCK)
    return os.path.join(root, LOCK_NAME)


def _scope() -> str:
    """The same for two processes that see each other's process ids; empty where nobody says."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
