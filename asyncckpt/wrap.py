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

logger = logging.getLogger(__name__)

_CORE = "megatron.core.dist_checkpointing.serialization"


def wrap_save(save_fn: Callable[..., Any], args: argparse.Namespace | None = None) -> Callable[..., Any]:
    """``save_fn``, made asynchronous if ``--async-ckpt-use-cpu-shm`` is in ``args`` or in the environment.

    If it is not, ``save_fn`` itself comes back. Else a function that takes the same arguments and returns a handle when
    the tensors are copied: ``handle.result()`` waits until what ``save_fn`` would have made is there, complete and
    durable, or raises what went wrong. Known are

    - ``torch.save``: the file is one that ``torch.load`` reads;
    - ``torch.distributed.checkpoint.save`` and ``async_save``: a folder that DCP's ``load`` reads. A ``storage_writer``
      that is DCP's ``FileSystemWriter`` says where to; with any other the call is made as it is;
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
        return _wrap_megatron(save_fn)
    raise ValueError(f"asyncckpt does not know how to make {name} asynchronous; see wrap_save for what it knows")


def _wrap_dcp(save_fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    @functools.wraps(save_fn)
    def save(state_dict: dict[str, Any], *, storage_writer: Any = None, **options: Any) -> Any:
        if type(storage_writer) is FileSystemWriter:
            options["checkpoint_id"] = options.get("checkpoint_id") or os.fspath(storage_writer.path)
        elif storage_writer is not None:
            logger.warning("saved as before: a %s does its own writing", type(storage_writer).__name__)
            return save_fn(state_dict, storage_writer=storage_writer, **options)
        return dcp.begin_save(
            state_dict, config=config, **options
        )  # what else DCP takes chooses between ways that this one replaces

    return save


def _wrap_megatron(save_fn: Callable[..., Any]) -> Callable[..., Any]:
    from asyncckpt import megatron

    megatron.install()
    queue = megatron.nvrx.AsyncCallsQueue()
    # Newer trees ask which implementation to take, and theirs for nvrx is ours now.
    chosen: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(save_fn).parameters:
        chosen["async_strategy"] = "nvrx"

    @functools.wraps(save_fn)
    def save(*arguments: Any, **options: Any) -> megatron.MegatronSave:
        return megatron.MegatronSave(queue, save_fn(*arguments, **(options | chosen)))

    return save
