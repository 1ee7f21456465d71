"""What is stored at a path, whatever it is: a checkpoint, also stock DCP's, or files of safetensors or torch."""

from __future__ import annotations

import os
from contextlib import ExitStack

from asyncckpt.errors import CheckpointNotFoundError, StorageError
from asyncckpt.exporting.checkpoint_source import open_checkpoint
from asyncckpt.exporting.safetensors_source import SUFFIX, open_safetensors, open_safetensors_folder
from asyncckpt.exporting.source_files import SourceFiles
from asyncckpt.exporting.stock_source import open_stock
from asyncckpt.exporting.stored import StoredState
from asyncckpt.exporting.torch_file_source import open_torch_file
from asyncckpt.loading.source import StorageSource, find_step, is_stock
from asyncckpt.worker.manifest import MANIFEST_NAME, METADATA_NAME
from asyncckpt.worker.storage import is_address, named_steps, step_folder, storage_for
from asyncckpt.worker.storage.history import newest_step


def open_state(path: str, held: ExitStack, sources: list[SourceFiles], *, weights_only: bool) -> StoredState:
    """The state at a path, held open, and held against removal.

    Args:
        path: A checkpoint; a root, for its newest step; a file of ``torch.save``; a file of safetensors, or a folder of
            them.
        held: Closes it.
        sources: The files that it is read from are added: whoever has read them looks whether they are unchanged.
        weights_only: Of a file of ``torch.save``: nothing in it may run code.

    Raises:
        CheckpointError: There is none, or it is damaged, or of another kind.
    """

    def files(folder: str) -> SourceFiles:
        sources.append(SourceFiles(folder, held))
        return sources[-1]

    storage, (above, name) = storage_for(path), os.path.split(path)
    if is_address(path) and path.endswith(SUFFIX) and storage.size(path) is not None:
        return open_safetensors(files(above), [name])
    if is_address(path) and storage.size(path):
        raise StorageError(
            "this is a single object, and a file of torch.save is read from a file system: copy it there first",
            path=path,
        )
    if not is_address(path) and os.path.isfile(path):
        if name.endswith(SUFFIX):
            return open_safetensors(files(above), [name])
        return open_torch_file(files(above), name, weights_only=weights_only)
    is_checkpoint = storage.exists(os.path.join(path, MANIFEST_NAME)) or is_stock(path)
    if not is_checkpoint and named_steps(path):
        if (step := newest_step(path)) is None:
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=path)
        find_step(step, 0.0, path)  # or this says what there is
        path = step_folder(path, step)
    held.enter_context(storage.reading(path))  # retention leaves it alone
    folder = files(path)
    if is_stock(path):
        if (found := folder.in_set(METADATA_NAME)) is not None:
            return open_checkpoint(folder, found[0], found[1].removesuffix(METADATA_NAME))
        return open_stock(folder)
    if not storage.exists(os.path.join(path, MANIFEST_NAME)) and (state := open_safetensors_folder(folder)):
        return state
    return open_checkpoint(folder, StorageSource(path))
