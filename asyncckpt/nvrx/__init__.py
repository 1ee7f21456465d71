"""What Megatron-LM and others take from nvidia-resiliency-ext (nvrx), on our engine; and nvrx itself, where it can do
the same.

The names and their signatures are those of nvrx 0.7.0's ``checkpointing.async_ckpt``. Code that uses them goes on as it
is: plan, schedule, finalize. The tensors are staged by ``save_state_dict_async_plan``; from then on a worker writes and
commits them, whatever becomes of the trainer. Nothing here needs nvrx to be installed, nor CUDA.

``family`` picks between these and the installed nvrx's own.
"""

from asyncckpt.nvrx.calls import AsyncCallsQueue, AsyncRequest, abort_nvrx_checkpoint
from asyncckpt.nvrx.family import Family, family
from asyncckpt.nvrx.reader import CachedMetadataFileSystemReader
from asyncckpt.nvrx.torch_checkpoint import TorchAsyncCheckpoint
from asyncckpt.nvrx.writer import (
    CheckpointMetadataCache,
    FileSystemWriterAsync,
    get_write_results_queue,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CachedMetadataFileSystemReader",
    "CheckpointMetadataCache",
    "Family",
    "FileSystemWriterAsync",
    "TorchAsyncCheckpoint",
    "abort_nvrx_checkpoint",
    "family",
    "get_write_results_queue",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]
