"""Provide the names that Megatron-LM and others import from nvidia-resiliency-ext (nvrx), on our engine.

The names and their signatures are the same as in nvrx 0.7.0's ``checkpointing.async_ckpt``, but nvrx need not be
installed. Code that uses them needs no change: plan, schedule, finalize. ``save_state_dict_async_plan`` stages the
tensors. Then a worker writes and commits the checkpoint, even if the trainer dies. ``family`` chooses between these
names and the names of the installed nvrx.
"""

from asyncckpt.integrations.nvrx.family import Family as Family
from asyncckpt.integrations.nvrx.family import family as family
from asyncckpt.integrations.nvrx.filesystem import CachedMetadataFileSystemReader as CachedMetadataFileSystemReader
from asyncckpt.integrations.nvrx.filesystem import CheckpointMetadataCache as CheckpointMetadataCache
from asyncckpt.integrations.nvrx.filesystem import FileSystemWriterAsync as FileSystemWriterAsync
from asyncckpt.integrations.nvrx.filesystem import get_write_results_queue as get_write_results_queue
from asyncckpt.integrations.nvrx.filesystem import save_state_dict_async_finalize as save_state_dict_async_finalize
from asyncckpt.integrations.nvrx.filesystem import save_state_dict_async_plan as save_state_dict_async_plan
from asyncckpt.integrations.nvrx.queue import AbortAsyncckpt as AbortAsyncckpt
from asyncckpt.integrations.nvrx.queue import AsyncCallsQueue as AsyncCallsQueue
from asyncckpt.integrations.nvrx.queue import AsyncRequest as AsyncRequest
from asyncckpt.integrations.nvrx.queue import TorchAsyncCheckpoint as TorchAsyncCheckpoint
from asyncckpt.integrations.nvrx.queue import abort_nvrx_checkpoint as abort_nvrx_checkpoint
