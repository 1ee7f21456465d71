"""The lock of a root: only one job at a time, on any host, saves to a folder of checkpoints.

The first rank's worker holds the lock from before its first save until its last save has ended, even if its trainer
dies meanwhile. The lock is a kernel lock on a small file in the folder, so it ends with the process of the worker. The
file names the holder, for the errors of other workers, and the job that the folder belongs to. Readers need no lock.
An object store has no locks. The lock file of a root there is in the runtime folder, and is valid for this host only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from asyncckpt.budgets import NOTICE_S, POLL_S
from asyncckpt.errors import JobTakenError, unless_interrupt
from asyncckpt.link.api import Claim, Claimed, RootHolder
from asyncckpt.link.endpoint import ROOT_LOCK, endpoint_name, endpoint_scope, runtime_folder
from asyncckpt.link.takeover import is_running
from asyncckpt.storage import is_address
from asyncckpt.storage.file_system import LockFile, lock_alone, opened, read_facts

logger = logging.getLogger(__name__)

LOCK_NAME = "asyncckpt.lock"


class RootLock:
    """The lock of one root, held by this process until ``release``."""

    def __init__(self, file: LockFile, path: str, holder: RootHolder) -> None:
        """Write the holder to the locked file. Only ``take`` calls this."""
        self._file, self._path = file, path
        self._holder = holder
        self._file.write(asdict(holder), durable=True)

    @classmethod
    def take(cls, claim: Claim, trainer: int) -> RootLock | RootHolder:
        """Take the lock for the trainer with that process id. Return the lock, or its present holder.

        Raises ``JobTakenError`` if the folder belongs to another job, and ``OSError`` if a lock is not possible.
        """
        if is_address(claim.root):
            endpoint_scope()  # makes the runtime folder
        path = _lock_path(claim.root)
        with contextlib.ExitStack() as undo:
            undo.callback((file := LockFile(path)).close)
            if file.is_held is None:
                raise OSError("its file system has no locks, or flock is refused")
            found = _holder(file.read())
            if not file.is_held:
                return found
            _check_job(claim, found)
            scope = pid_scope() if trainer else ""  # 0: a trainer in another container, with an unknown id
            job_id = claim.job_id or found.job_id
            own = RootHolder(socket.gethostname(), scope, os.getpid(), trainer, job_id, leaving=False)
            lock = cls(file, path, own)
            undo.pop_all()
            return lock

    def announce_end(self) -> None:
        """Note in the file that the trainer is gone. The worker releases the lock when everything is written."""
        self._holder = replace(self._holder, leaving=True)
        self._file.write(asdict(self._holder), durable=True)

    def release(self) -> None:
        """Release the lock. A lock file beside checkpoints keeps its content, because it names the folder's job."""
        if self._path.endswith(ROOT_LOCK):
            self._file.remove()
        self._file.close()


def take_root(claim: Claim, ask: Callable[[], Claimed], timeout: float) -> str | None:
    """Have a worker take the lock of a root. Wait for a lock that is about to be released.

    Args:
        claim: The root, and the job that asks for its lock.
        ask: Sends the claim to the worker, and returns the worker's answer.
        timeout: Maximum seconds to wait for a worker that still writes the staged saves of a dead trainer.

    Returns:
        The reason why a lock is not possible; None: the worker has the lock.

    Raises:
        JobTakenError: Another job has the lock, or its worker does not end in time.
    """
    begun = time.monotonic()
    is_told = False
    while (found := ask()).holder is not None:
        holder = found.holder
        who = f"the worker {holder.worker} on host {holder.host}, of the trainer {holder.trainer}"
        who += f" of job {holder.job_id!r}," if holder.job_id else ","
        is_near = holder.scope == pid_scope()
        is_ending = holder.leaving or (is_near and not is_running(holder.trainer))
        patience = timeout if is_ending else 0.0 if is_near else NOTICE_S
        if time.monotonic() - begun >= min(patience, timeout):
            raise JobTakenError(
                f"{who} still writes what that trainer had staged; wait for it, or end it"
                if is_ending
                else f"{who} saves to this folder; end that job, or save to another folder",
                path=claim.root,
            )
        if not is_told:
            logger.warning("this trainer waits until %s releases the lock of %s", who, claim.root)
            is_told = True
        time.sleep(5 * POLL_S)  # each question opens a file, perhaps of a network file system
    return found.trouble


def is_locked(root: str) -> bool:
    """Return whether a process may have the lock of ``root``. On an object store, and for other hosts, say yes."""
    if is_address(root):
        return True
    try:
        with opened(_lock_path(root), os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            is_known = _holder(read_facts(fd)).scope == pid_scope()
            return not is_known or lock_alone(fd) is not True
    except FileNotFoundError:
        return False
    except unless_interrupt(OSError):
        return True


def is_finishing(root: str) -> bool:
    """Return whether the worker of a dead trainer has the lock, and may still write that trainer's staged saves."""
    holder = holder_on_this_host(root)
    return holder is not None and not is_running(holder.trainer)


def holder_on_this_host(root: str) -> RootHolder | None:
    """Return the worker that has the lock, if it sees the same process ids as this process; None if there is none.

    This function reads the kernel's list of locks. Trying to take the lock instead would refuse a worker that asks for
    the lock at that moment.
    """
    try:
        with opened(_lock_path(root), os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            holder, inode = _holder(read_facts(fd)), os.fstat(fd).st_ino
        if holder.scope != pid_scope():
            return None
        with open("/proc/locks") as locks:  # number, kind, mode, type, holder, device and inode, ...
            fields = [line.split() for line in locks]
    except unless_interrupt(OSError):
        return None
    is_held = any(
        [*its[1:2], *its[4:5]] == ["FLOCK", str(holder.worker)] and its[5].rpartition(":")[2] == str(inode)
        for its in fields
    )
    return holder if is_held else None


def check_job(root: str, job_id: str | None) -> None:
    """Raise ``JobTakenError`` if the folder ``root`` belongs to another job than ``job_id``."""
    if job_id is None:
        return
    with contextlib.suppress(OSError):  # no job has ever claimed the folder, or the file cannot be read
        with opened(_lock_path(root), os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            found = _holder(read_facts(fd))
        _check_job(Claim(root, job_id), found)


def _check_job(claim: Claim, found: RootHolder) -> None:
    if claim.job_id and found.job_id and claim.job_id != found.job_id:
        raise JobTakenError(
            f"this folder is of job {found.job_id!r}, and this is job {claim.job_id!r}: choose another folder, or"
            f" remove {LOCK_NAME} in it to give it to this job",
            path=claim.root,
        )


def _holder(found: dict[str, Any]) -> RootHolder:
    """Return the holder that the facts in a lock file name, with empty fields if the facts are incomplete."""
    try:
        host, scope, worker, trainer, leaving = (found[name] for name in _FIELDS)
        job_id = found["job_id"] if isinstance(found["job_id"], str) else None
        return RootHolder(str(host), str(scope), int(worker), int(trainer), job_id, leaving=leaving is True)
    except (ValueError, KeyError, TypeError):
        return RootHolder("unknown", "", 0, 0, None, leaving=False)


_FIELDS = ("host", "scope", "worker", "trainer", "leaving")


def _lock_path(root: str) -> str:
    if is_address(root):
        return os.path.join(runtime_folder(), endpoint_name(root, 0) + ROOT_LOCK)
    return os.path.join(root, LOCK_NAME)


def pid_scope() -> str:
    """Return a text that is equal for processes that see each other's process ids; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
