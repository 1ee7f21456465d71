"""``wrap_save``: save calls that people already have, made asynchronous by one flag."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver

from asyncckpt.config import Config, is_switched_on
from asyncckpt.integrations import dcp
from asyncckpt.integrations.torch_file import torch_save

_MEGATRON_SAVE = "megatron.core.dist_checkpointing.serialization.save"


def wrap_save(save_fn: Callable[..., Any], args: argparse.Namespace | None = None) -> Callable[..., Any]:
    """``save_fn``, made asynchronous if ``--async-ckpt-use-cpu-shm`` is in ``args`` or in the environment.

    If it is not, this returns ``save_fn`` itself. Else it returns a function that takes the same arguments and returns
    a handle when the tensors are copied: ``handle.result()`` waits until what ``save_fn`` would have made is there,
    complete and durable, or raises what went wrong. These functions are known:

    - ``torch.save``: the file is one that ``torch.load`` reads;
    - ``torch.distributed.checkpoint.save`` and ``async_save``: a folder that DCP's ``load`` reads. A ``storage_writer``
      that is DCP's ``FileSystemWriter`` says where to, and whether to overwrite; with any other, and with extensions or
      another format, the call is made as it is;
    - ``TorchAsyncCheckpoint.async_save``, bound, of any nvidia-resiliency-ext;
    - ``megatron.core.dist_checkpointing.save``: the handle's ``result`` does what the trainer has to do at the end, on
      all ranks, and so has to be called, on all ranks.

    Raises ``ValueError`` for any other function, because nobody can say what it does.
    """
    args = args or argparse.Namespace()
    if not is_switched_on(args):
        return save_fn
    name = f"{getattr(save_fn, '__module__', '')}.{getattr(save_fn, '__qualname__', '')}"
    config = Config.from_args(args)
    if save_fn is torch.save or name.endswith(".TorchAsyncCheckpoint.async_save"):
        return functools.partial(torch_save, config=config)
    if save_fn in (state_dict_saver.save, state_dict_saver.async_save):
        return _wrap_dcp(save_fn, config)
    if name == _MEGATRON_SAVE:
        return _wrap_megatron(save_fn, config)
    raise ValueError(f"asyncckpt does not know how to make {name} asynchronous; see wrap_save for what it knows")


def _wrap_dcp(save_fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    @functools.wraps(save_fn)
    def save(state_dict: dict[str, Any], storage_writer: Any = None, **options: Any) -> Any:
        if not dcp.says_folder(storage_writer, options.get("checkpoint_id")):
            return save_fn(state_dict, storage_writer=storage_writer, **options)
        return dcp.begin_save(state_dict, storage_writer=storage_writer, config=config, **options)

    return save


def _wrap_megatron(save_fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    from asyncckpt.integrations import megatron
    from asyncckpt.integrations.nvrx import AsyncCallsQueue
    from asyncckpt.integrations.nvrx.filesystem import configure

    megatron.install()
    queue = AsyncCallsQueue()
    configure(config)
    chosen: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(save_fn).parameters:
        chosen["async_strategy"] = "nvrx"  # newer trees ask which implementation to take; nvrx's names are ours now

    @functools.wraps(save_fn)
    def save(*arguments: Any, **options: Any) -> megatron.MegatronSave:
        return megatron.MegatronSave(queue, save_fn(*arguments, **(options | chosen)))

    return save
