"""Names for authors of integrations. As for ``asyncckpt``, each change of a name is in the changelog.

An integration imports this module, ``asyncckpt``, and ``asyncckpt.config``, ``errors``, ``events``, ``telemetry`` and
``weights``. Everything else in the package may change at any time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence

from asyncckpt.devices.kinds import wait_for as wait_for_device
from asyncckpt.engine.engine import Engine
from asyncckpt.engine.saves import synchronize_staging
from asyncckpt.engine.shared import Engines
from asyncckpt.engine.shared import shared as engines
from asyncckpt.errors import CheckpointError
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME
from asyncckpt.format.write_request import Pointer, Rotation
from asyncckpt.link.api import Claim, Rendezvous
from asyncckpt.link.endpoint import endpoint_scope
from asyncckpt.link.process import start_module, watched
from asyncckpt.link.root_lock import check_job
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.loading.dcp_reader import CheckpointReader, load_by_dcp
from asyncckpt.loading.image_files import HeldImages
from asyncckpt.loading.load import Filled, load
from asyncckpt.loading.memory_source import FoundImages, HeldAttempt, MemorySource, find_images, held_candidates
from asyncckpt.loading.set_files import SetFiles
from asyncckpt.loading.source import StorageSource, is_stock, wait_for_attempts
from asyncckpt.planning.file_set import FileSet
from asyncckpt.publication import job_of_checkpoints
from asyncckpt.ranks.ranks import Ranks, ranks_of
from asyncckpt.ranks.rounds import Rounds
from asyncckpt.ranks.store import Store
from asyncckpt.save_handle import Save
from asyncckpt.shm import budget
from asyncckpt.shm.segment import Segment
from asyncckpt.storage import absolute, refuse_address, replace_or_set_aside, storage_for
from asyncckpt.storage.follow_up import advance
from asyncckpt.supervisor import known_supervisors

__all__ = [
    "MANIFEST_NAME",
    "METADATA_NAME",
    "CheckpointReader",
    "Claim",
    "Engine",
    "Engines",
    "FileSet",
    "Filled",
    "Pointer",
    "Ranks",
    "Rendezvous",
    "Rotation",
    "Rounds",
    "Save",
    "SetFiles",
    "SocketConnection",
    "StorageSource",
    "Store",
    "absolute_path",
    "advance",
    "check_job",
    "endpoint_scope",
    "engines",
    "give_up",
    "held_checkpoints",
    "held_files",
    "job_of_checkpoints",
    "is_stock",
    "load",
    "load_by_dcp",
    "ranks_of",
    "replace_or_set_aside",
    "shared_memory",
    "start_module",
    "storage_for",
    "synchronize_staging",
    "wait_for_attempts",
    "wait_for_device",
    "watched",
]

logger = logging.getLogger(__name__)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of ``path``. "~" is the user's home.

    Raises:
        StorageError: The path is an address on an object store, or no file system can have it.
    """
    refuse_address(os.fspath(path))
    return absolute(path)


def held_checkpoints(
    engine: Engine, choose: Callable[[Sequence[HeldAttempt]], HeldAttempt | None]
) -> Iterator[MemorySource]:
    """Yield the checkpoints to load from the memory of dead trainers' workers, until one is loaded.

    All ranks get the same checkpoints, and load each within ``with held.tried(), held.opened() as source``. Give
    ``held.path`` and the ``source`` to ``load``. If a checkpoint is unreadable, another copy or an older step follows.

    Args:
        engine: The engine that saves. Workers are found by its ``job``.
        choose: Called on the first rank with the attempts that have the images of all ranks, the newest first. Each
            attempt has the ``request`` of its save (path, step, attempt), and whether the save is ``committed``.
            Returns the attempt to load, or None.

    Raises:
        CheckpointError: As ``choose`` raises.
    """
    if engine.job is None:
        return
    ranks = ranks_of()
    images = find_images(engine.job, _memory_of(engine), engine.config.address, ranks)

    def chosen(found: FoundImages) -> HeldAttempt | None:
        return choose([each for each in found.attempts() if each.is_whole])

    yield from held_candidates(images, chosen, engine.config.transport, ranks)


def held_files(engine: Engine, path: str) -> SetFiles:
    """Open the large files of a ``FileSet``: from the memory of this rank's previous trainer, or else from storage.

    A worker holds the image of a set only if the set says so (``is_held``), and the engine has a job. The checkpoint
    has to be committed. Each rank may call this alone.

    Args:
        engine: The engine that saves.
        path: The checkpoint.

    Returns:
        The files. ``read(name, into)`` fills a buffer, and compares the checksums. The caller has to close them.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError, StorageError: The checkpoint cannot be read.
    """
    return SetFiles(path, _memory_of(engine))


def _memory_of(engine: Engine) -> HeldImages | None:
    try:
        return engine.held() if engine.job is not None else None
    except CheckpointError as error:
        logger.warning("the state is not loaded from memory: %s", error)
        return None


def shared_memory(nbytes: int, purpose: str, hint: str) -> Segment:
    """Return a new file of shared memory. Its descriptor can be passed to other processes.

    Args:
        nbytes: The size in bytes.
        purpose: Use of the memory, for the error.
        hint: Advice for the error.

    Raises:
        OutOfMemoryError: Too little memory is left.
    """
    budget.require(nbytes, purpose, hint)
    return Segment.create("asyncckpt", max(nbytes, 1), touch=True)


def give_up(timeout: float) -> None:
    """End all waits of this process's engines and publishers at once, so that the process can begin anew.

    Any thread may call.

    Args:
        timeout: Maximum duration in seconds.
    """
    deadline = time.monotonic() + timeout
    for supervisor in known_supervisors():
        supervisor.give_up(max(0.0, deadline - time.monotonic()))
