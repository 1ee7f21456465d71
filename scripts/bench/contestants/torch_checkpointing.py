"""torch_checkpointing with its asynchronous saver and preallocated staging memory.

A thread of the trainer copies the tensors into shared memory, while a lock keeps the optimizer from changing them. Then
a process writes each item with ``torch.save``. The library does not sync.
"""

from __future__ import annotations

import errno
import logging
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig, WriteStream

from asyncckpt.integrations.torch_checkpointing import CheckpointManager as OurManager
from bench.contestants.contestant import LIMIT_S, Contestant, Pending
from bench.states import State

ITEM = "state"  # one file for each rank


class TorchCheckpointing(Contestant):
    fsyncs = False
    shares_each = True

    _made: Any = CheckpointManager

    def __init__(self, root: str) -> None:
        super().__init__(root)
        storage = LocalFileSystemStorageConfig(use_direct_io=writes_directly(f"{root}/probe"))
        self._manager: Any = self._made(self._made.Config(storage_config=storage))

    def prepare(self, state: State) -> None:
        self._manager.prewarm_staging({ITEM: state})
        if (begun := self._manager._prewarm_staging_future) is not None:
            begun.result()

    def save(self, number: int, state: State) -> Pending:
        written = self._manager.save(self.path(number), {ITEM: state})

        def poll() -> bool:
            if written.done():
                written.result()
            return bool(written.done())

        return Pending(wait=lambda: written.result(LIMIT_S), poll=poll)

    def changing(self) -> AbstractContextManager[object]:
        lock: AbstractContextManager[object] = self._manager.lock()
        return lock

    def load(self, number: int, state: State) -> State:
        return dict(self._manager.load(self.path(number), into={ITEM: state})[ITEM])

    def close(self) -> None:
        self._manager.close()


class OverAsyncckpt(TorchCheckpointing):
    """The manager of torch_checkpointing on our engine."""

    fsyncs = True
    shares_each = False
    _made = OurManager


class OffsetReads(DefaultResharder):
    """The resharder, also if nothing is resharded. It copies each tensor from the file into its place."""

    def should_reshard(self, *_: object) -> bool:
        return True


@cache
def loader() -> Any:
    """Return a warm manager to load. It starts no process, because it saves synchronously."""
    logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)  # it warns of plain tensors at each load
    items = {ITEM: ItemSpec(resharder=OffsetReads())}
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager.Config(items=items, save=SyncCheckpointSaverConfig(), storage_config=storage).build()


def writes_directly(path: str) -> bool:
    """Return whether the library's direct I/O works on this file system. The library does not align its writes."""
    try:
        with WriteStream(path, use_direct_io=True) as stream:
            stream.write(bytes(1000))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
