"""``wrap_save``: save calls that people have already, made asynchronous by one flag."""

from __future__ import annotations

import argparse
import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from asyncckpt import dcp
from asyncckpt.config import Config, is_switched_on
from asyncckpt.torch_file import torch_save
from asyncckpt.worker.messages import Existing
from asyncckpt.worker.storage import replaceable

logger = logging.getLogger(__name__)

# What DCP calls the format that it writes unless asked for another.
_PLAIN = "torch_save"
_CORE = "megatron.core.dist_checkpointing.serialization"


def wrap_save(save_fn: Callable[..., Any], args: argparse.Namespace | None = None) -> Callable[..., Any]:
    """``save_fn``, made asynchronous if ``--async-ckpt-use-cpu-shm`` is in ``args`` or in the environment.

    If it is not, ``save_fn`` itself comes back. Else a function that takes the same arguments and returns a handle when
    the tensors are copied: ``handle.result()`` waits until what ``save_fn`` would have made is there, complete and
    durable, or raises what went wrong. Known are

    - ``torch.save``: the file is one that ``torch.load`` reads;
    - ``torch.distributed.checkpoint.save`` and ``async_save``: a folder that DCP's ``load`` reads. A ``storage_writer``
      that is DCP's ``FileSystemWriter`` says where to, and whether to overwrite; with any other, and with extensions or
      another format, the call is made as it is;
    - ``TorchAsyncCheckpoint.async_save``, bound, of any nvidia-resiliency-ext;
    - ``megatron.core.dist_checkpointing.save``: what has to be done in the trainer at the end, on all ranks, is done by
      the handle's ``result``, which therefore has to be called, on all ranks.

    Raises ``ValueError`` for any other function: what it does cannot be known.
    """
    if not is_switched_on(args or argparse.Namespace()):
        return save_fn
    name = f"{getattr(save_fn, '__module__', '')}.{getattr(save_fn, '__qualname__', '')}"
    config = Config.from_args(args or argparse.Namespace())
    if save_fn is torch.save or name.endswith(".TorchAsyncCheckpoint.async_save"):
        return functools.partial(torch_save, config=config)
    if save_fn in (state_dict_saver.save, state_dict_saver.async_save):
        return _wrap_dcp(save_fn, config)
    if name == f"{_CORE}.save":
        return _wrap_megatron(save_fn, config)
    raise ValueError(f"asyncckpt does not know how to make {name} asynchronous; see wrap_save for what it knows")


def _wrap_dcp(save_fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    @functools.wraps(save_fn)
    def save(state_dict: dict[str, Any], *, storage_writer: Any = None, **options: Any) -> Any:
        existing: Existing = "replace"
        if storage_writer is not None:
            if not _writes_plainly(storage_writer):
                logger.warning("saved as before: this %s does its own writing", type(storage_writer).__name__)
                return save_fn(state_dict, storage_writer=storage_writer, **options)
            options["checkpoint_id"] = options.get("checkpoint_id") or os.fspath(storage_writer.path)
            existing = "replace" if storage_writer.overwrite else "refuse"
        folder = options.get("checkpoint_id")  # begin_save says if there is none
        if folder is not None and existing == "replace" and not replaceable(os.fspath(folder)):
            existing = "join"  # there are files of others: DCP puts its own beside them
        return dcp.begin_save(state_dict, config=config, existing=existing, **options)

    return save


def _writes_plainly(writer: Any) -> bool:
    """Whether ``writer`` is DCP's own, and asked for nothing but DCP's plain format."""
    if type(writer) is not FileSystemWriter:
        return False
    extensions = getattr(getattr(writer, "transforms", None), "extensions", ())
    return not extensions and getattr(getattr(writer, "serialization_format", None), "value", _PLAIN) == _PLAIN


def _wrap_megatron(save_fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    from asyncckpt import megatron
    from asyncckpt.nvrx import AsyncCallsQueue, runtime

    megatron.install()
    queue = AsyncCallsQueue()
    runtime.configure(config)
    failed: dict[int, BaseException] = {}
    # Newer trees ask which implementation to take, and theirs for nvrx is ours now.
    chosen: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(save_fn).parameters:
        chosen["async_strategy"] = "nvrx"

    @functools.wraps(save_fn)
    def save(*arguments: Any, **options: Any) -> megatron.MegatronSave:
        return megatron.MegatronSave(queue, save_fn(*arguments, **(options | chosen)), failed)

    return save
