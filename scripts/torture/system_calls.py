"""Fail system calls of the worker, one at a time, in all phases of a save, by a small preloaded library.

A save that succeeds is whole. A save that fails never appears. The next save works.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.link import process as worker_process
from asyncckpt.loading.source import verify
from asyncckpt.storage import step_folder
from torture.promises import check_root
from torture.tally import CONFIG, LIMIT_S, Tally, is_of, state_of

_ERRORS = [
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ESTALE),
    *(errno.ENOENT, errno.EEXIST, errno.EINTR, errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.EINVAL),
]
# Names of calls to fail, so that each kind is hit; "" fails any call. Calls that only look are the most frequent.
_NAMES = [
    "",
    "open64",
    "pwrite64",
    "fsync",
    "ftruncate64",
    "mkdir",
    "rename",
    "renameat2",
    "unlink",
    "rmdir",
    "unlinkat",
]
_NAMES += ["link", "linkat", "stat64", "lstat64", "fstatat64"]

# An error number of the library. No call fails, and the worker stops.
_STOP = -1


class Calls:
    """The control file of the library. See ``failing_calls.c``."""

    def __init__(self, path: Path) -> None:
        if not path.exists():  # otherwise a process has mapped the file
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def fail(
        self,
        countdown: int,
        error: int,
        *,
        only: str,
        does: bool,
        forever: bool = False,
        everywhere: bool = False,
        memory: bool = False,
    ) -> None:
        """Make the ``countdown``-th call from now on fail.

        Args:
            countdown: 1 for the next call.
            error: The errno that the call sets.
            only: Count only calls of this name; "": all.
            does: The call fails after it did the work.
            forever: All later calls fail, too, until ``failed``.
            everywhere: Count calls on sockets, memory and files outside of the folder, too.
            memory: Count allocations in place of calls. With ``PYTHONMALLOC=malloc`` this includes all of Python's.
        """
        struct.pack_into(
            "iii32s32siii", self._memory, 0, 0, error, does, only.encode(), b"", forever, everywhere, memory
        )
        struct.pack_into("i", self._memory, 0, countdown)

    def stop(self, countdown: int, *, after: bool) -> None:
        """Stop the worker before or ``after`` the ``countdown``-th call that changes something."""
        self.fail(countdown, _STOP, only="", does=after)

    def stopped(self) -> str:
        """Return the name of the call that stopped the worker, or ""."""
        (call,) = struct.unpack_from("32s", self._memory, 44)
        return str(call.rstrip(b"\0").decode())

    def left(self) -> int:
        """Return the number of calls left until one fails."""
        (countdown,) = struct.unpack_from("i", self._memory, 0)
        return int(countdown)

    def failed(self) -> str:
        """Disarm the library. Return the call that failed, or ""."""
        struct.pack_into("i", self._memory, 0, 0)
        return self.stopped()


def build(library: Path) -> None:
    """Compile ``failing_calls.c``."""
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)


def variables_of(library: Path, control: Path, root: Path) -> list[str]:
    """Return the environment variables of a process that loads the library, for calls in ``root``."""
    return [f"LD_PRELOAD={library}", f"ASYNCCKPT_TORTURE_CALLS={control}", f"ASYNCCKPT_TORTURE_CALLS_IN={root}"]


@contextlib.contextmanager
def preloaded(library: Path, control: Path, root: Path) -> Iterator[None]:
    """Preload the library in workers that start in the block, for calls in ``root``."""
    real = worker_process.command
    variables = variables_of(library, control, root)
    worker_process.command = lambda: ["env", *variables, *real()]
    try:
        yield
    finally:
        worker_process.command = real


def fail_calls(tally: Tally, folder: Path, rounds: int, choice: random.Random) -> None:
    """Fail a call in each of ``rounds`` saves."""
    if shutil.which("cc") is None:
        tally.counts["no compiler: no call failed"] += 1
        return
    root = folder / "calls-root"
    build(library := folder / "failing_calls.so")
    calls = Calls(control := folder / "calls")
    with preloaded(library, control, root), Checkpointer(root, CONFIG) as checkpointer:
        checkpointer.save(1, state_of(1)).result(LIMIT_S)
        last = 1
        for _ in tqdm(range(rounds), desc="failing system calls", unit="call", disable=None):
            step, error = last + 1, choice.choice(_ERRORS)
            only = choice.choice(_NAMES)
            calls.fail(choice.randint(1, 5 if only else 60), error, only=only, does=choice.random() < 0.5)
            done = _save(tally, checkpointer, step)
            call = calls.failed()
            tally.counts[f"{call or 'no call'} failed, the save {'done' if done else 'failed'}"] += 1
            what = f"{call} with {os.strerror(error)}"
            if done:
                last = step
            elif step in checkpointer.steps():
                tally.lose(f"step {step} is there, and was said to have failed: {what}")
            _check_newest(tally, checkpointer, last, what)
            if not _save(tally, checkpointer, last + 1):
                tally.lose(f"the save after it failed, too: {what}")
            else:
                last += 1
    check_root(tally, str(root))


def _save(tally: Tally, checkpointer: Checkpointer, step: int) -> bool:
    with tally.timed(f"save {step}"):
        try:
            checkpointer.save(step, state_of(step)).result(LIMIT_S)
        except CheckpointError:
            return False
        return True


def _check_newest(tally: Tally, checkpointer: Checkpointer, step: int, what: str) -> None:
    try:
        damages = verify(step_folder(checkpointer.root, step)).damages
        found = checkpointer.load(into := state_of(0), memory=False)
    except DamagedCheckpointError as error:
        tally.lose(f"damaged by {what}: {error}")
        return
    if damages or found != step or not is_of(into, step):
        tally.lose(f"step {step} does not load (but {found}) after {what}: {damages}")
