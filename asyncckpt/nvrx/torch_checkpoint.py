"""``torch.save`` in the background, as nvrx has it."""

from __future__ import annotations

from collections import deque
from typing import Any

from asyncckpt.errors import CheckpointError
from asyncckpt.handle import Save
from asyncckpt.nvrx.writer import write_exception
from asyncckpt.torch_file import torch_save


class TorchAsyncCheckpoint:
    """As nvrx's class of that name. Files are written by this process's worker; nothing is agreed between ranks."""

    def __init__(self, persistent_queue: bool = True) -> None:
        """The worker always stays for the next save, as ``persistent_queue`` asks."""
        self._saves: deque[Save] = deque()

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> Save:
        """Take what ``torch.save`` takes. When this returns, the caller may change the tensors."""
        save = torch_save(state_dict, *args, **kwargs)
        self._saves.append(save)
        return save

    def finalize_async_save(self, blocking: bool = False, no_dist: bool = True, terminate: bool = False) -> None:
        """Take note of the saves that have ended, with ``blocking`` or ``terminate`` of all.

        Raises DCP's ``CheckpointException`` if one has failed.
        """
        while self._saves and (blocking or terminate or self._saves[0].done()):
            try:
                self._saves.popleft().result()
            except CheckpointError as error:
                raise write_exception({error.rank or 0: error}) from error

    def close(self, abort: bool = False) -> None:
        """Wait for all saves. With ``abort`` do not: they come to their end by themselves."""
        if abort:
            self._saves.clear()
        self.finalize_async_save(blocking=True)
