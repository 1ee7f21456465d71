"""What the indexes of a checkpoint of ours have, as a stored state, to read values of it; for this torch is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing

from asyncckpt.exporting.checkpoint_source import whole
from asyncckpt.exporting.open_files import OpenFiles
from asyncckpt.exporting.stored import Box, StoredState
from asyncckpt.loading.contents import Shard, Value
from asyncckpt.loading.data_file import ChecksummedFile
from asyncckpt.loading.read_requests import dtype_named
from asyncckpt.loading.source import StorageSource
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.report.stored_item import StoredItem


def state_of(source: StorageSource, items: Mapping[str, Sequence[StoredItem]], held: ExitStack) -> StoredState:
    """The tensors ``items`` of a checkpoint. ``held`` closes its files.

    Raises ``DamagedCheckpointError``, ``StorageError``.
    """
    opened = OpenFiles()
    files: dict[str, ChecksummedFile] = {}
    for name in dict.fromkeys(stored.index.data for its in items.values() for stored in its):
        files[name] = held.enter_context(closing(source.open(name, opened.open)))
    state = StoredState(source.path, {}, {}, {}, files)
    for name, its in items.items():
        boxes = [
            Box(stored.index.data, stored.item.payload_at, *stored.box, contiguous_strides(shape))
            for stored in its
            for shape in (stored.item.shape,)
        ]
        shape = Value(name, "", [Shard(box.file, 0, box.offsets, box.shape) for box in boxes]).shape
        dtypes = {dtype_named(stored.item.dtype) for stored in its}
        state.tensors[name] = whole(name, dtypes, shape, boxes, source.path)
        state.keys[name] = (name,)
    return state
