"""Make existing save calls asynchronous by one flag: ``wrap_save``."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver

from asyncckpt.config import Config, is_switched_on
from asyncckpt.extension import Save
from asyncckpt.integrations import dcp
from asyncckpt.integrations.torch_file import torch_save

# Parameters of the supported functions that take the destination.
_PLACES = ("f", "checkpoint_id", "storage_writer", "checkpoint_dir")
_MEGATRON_SAVE = "megatron.core.dist_checkpointing.serialization.save"


def wrap_save(save_fn: Callable[..., Any], args: argparse.Namespace | None = None) -> Callable[..., Any]:
    """Make ``save_fn`` asynchronous if ``--async-ckpt-use-cpu-shm`` is set in ``args`` or in the environment.

    The returned function takes the same arguments and returns a handle. ``handle.result()`` waits until the checkpoint
    is complete and durable, or raises the error of the save. With the flag, the function returns when the tensors are
    copied. Without the flag, it calls ``save_fn``, and the handle is done unless ``save_fn`` saves in the background.

    Supported functions:

    - ``torch.save``: ``torch.load`` reads the file;
    - ``torch.distributed.checkpoint.save`` and ``async_save``: DCP's ``load`` reads the folder. A ``FileSystemWriter``
      of DCP as ``storage_writer`` sets the folder and the overwrite option. A call with any other writer, with
      extensions or with another format goes to DCP unchanged;
    - ``TorchAsyncCheckpoint.async_save``, bound, of any nvidia-resiliency-ext;
    - ``megatron.core.dist_checkpointing.save``: all ranks must call ``result`` of the handle, because ``result`` runs
      the finalize functions in the trainer.

    For any other function, raise ``ValueError`` if the flag is set, because the function's effect is unknown. Return
    the function unchanged if the flag is not set.
    """
    args = args or argparse.Namespace()
    name = f"{getattr(save_fn, '__module__', '')}.{getattr(save_fn, '__qualname__', '')}"
    is_nvrx = name.endswith(".TorchAsyncCheckpoint.async_save")
    is_dcp = save_fn in (state_dict_saver.save, state_dict_saver.async_save)
    if not is_switched_on(args):
        return _handled(save_fn) if save_fn is torch.save or is_nvrx or is_dcp or name == _MEGATRON_SAVE else save_fn
    config = Config.from_args(args)
    if save_fn is torch.save or is_nvrx:
        return functools.partial(torch_save, config=config)
    if is_dcp:
        return _wrap_dcp(save_fn, config)
    if name == _MEGATRON_SAVE:
        return _wrap_megatron(save_fn, config)
    raise ValueError(f"asyncckpt does not know how to make {name} asynchronous; see wrap_save for what it knows")


def _handled(save_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_fn`` so that it returns a handle, and change nothing else."""
    signature = inspect.signature(save_fn)

    @functools.wraps(save_fn)
    def save(*arguments: Any, **options: Any) -> Any:
        answer = save_fn(*arguments, **options)
        path = _place(signature.bind(*arguments, **options).arguments)
        if isinstance(answer, Save):
            return answer
        if isinstance(answer, Future):
            return Save.of_another(path, answer)
        if isinstance(upload := getattr(answer, "upload_completion", None), Future):  # if DCP has a stager
            return Save.of_another(path, upload, answer.staging_completion)
        if (finalize := getattr(getattr(save_fn, "__self__", None), "finalize_async_save", None)) is not None:
            return _NvrxSave.begun(path, finalize)
        if type(answer).__name__ == "AsyncRequest":  # the caller of Megatron-LM asked for a request
            return answer
        return Save.finished(path)

    return save


class _NvrxSave(Save):
    """The handle of a save that nvrx makes.

    Each method that returns the outcome blocks until nvrx has finalized the save, because nvrx reports no progress and
    has no timeout.
    """

    _outcome: Future[None]
    _finalize: Callable[..., Any]

    @classmethod
    def begun(cls, path: str | os.PathLike[str], finalize: Callable[..., Any]) -> _NvrxSave:
        """Return the handle of a save that ``finalize`` finalizes."""
        outcome = Future[None]()
        save = cls.of_another(path, outcome)
        save._outcome, save._finalize = outcome, finalize
        return save

    def done(self) -> bool:
        if not self._outcome.done():
            try:
                self._finalize(blocking=True)
            except Exception as error:  # nvrx drops the failed call, and would raise nothing the next time
                self._outcome.set_exception(error)
            else:
                self._outcome.set_result(None)
        return True

    def result(self, timeout: float | None = None) -> str:
        self.done()
        return super().result(timeout)

    def when_durable(self, action: Callable[[], object], what: str) -> Future[None]:
        self.done()
        return super().when_durable(action, what)

    @property
    def future(self) -> Future[str]:
        self.done()
        return super().future


def _place(arguments: dict[str, Any]) -> str | os.PathLike[str]:
    """Return the destination in the ``arguments`` of a save call: its path, or else its ``repr``."""
    # nvrx passes the arguments after the state dict on to torch.save.
    handed_on = dict(zip(_PLACES, arguments.get("args", ())[:1], strict=False)) | arguments.get("kwargs", {})
    said = arguments | handed_on
    found = next((said[name] for name in _PLACES if said.get(name) is not None), None)
    for place in (found, getattr(found, "path", None), getattr(found, "name", None)):  # writers have path, files name
        if isinstance(place, (str, os.PathLike)):
            return place
    return repr(found)


def _wrap_dcp(save_fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    theirs = _handled(save_fn)

    @functools.wraps(save_fn)
    def save(state_dict: dict[str, Any], storage_writer: Any = None, **options: Any) -> Any:
        if not dcp.says_folder(storage_writer, options.get("checkpoint_id")):
            return theirs(state_dict, storage_writer=storage_writer, **options)
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
        chosen["async_strategy"] = "nvrx"  # newer trees have this choice; install() replaces nvrx's names by ours

    @functools.wraps(save_fn)
    def save(*arguments: Any, **options: Any) -> megatron.MegatronSave:
        return megatron.MegatronSave(queue, save_fn(*arguments, **(options | chosen)))

    return save
