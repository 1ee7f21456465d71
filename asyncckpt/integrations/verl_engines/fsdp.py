"""Provide the checkpoint managers that verl's engines for FSDP and VeOmni make on each rank.

``model`` and ``optimizer`` are in one checkpoint of DCP with full parameter names, so that another number of ranks can
load them. Each rank saves its learning rate schedule and the states of its random number generators in its own file,
with verl's file name.

VeOmni's experts are sharded beyond their DTensors, so that two ranks may have different tensors of one name. So its
manager saves the files of verl, one of each kind a rank, and the same number of ranks loads them.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fs import is_non_local

from asyncckpt.errors import MismatchError, UntrustedValueError
from asyncckpt.extension import (
    MANIFEST_NAME,
    METADATA_NAME,
    CheckpointReader,
    StorageSource,
    absolute_path,
    load,
    ranks_of,
    storage_for,
)
from asyncckpt.integrations.capture import Capture, replaced
from asyncckpt.integrations.verl_engines.manager import AsyncManager

logger = logging.getLogger(__name__)

_LORA = ("lora_", ".adapter_")  # as verl recognizes them
_STATE = "optimizer.state."


def stored_names(path: str) -> list[str] | None:
    """Return the names of the values in the checkpoint ``path``; None if asyncckpt has not saved the checkpoint.

    Raises ``DamagedCheckpointError``, ``StorageError``.
    """
    if not storage_for(path).exists(os.path.join(path, MANIFEST_NAME)):
        return None
    if METADATA_NAME not in StorageSource(path).manifest.files:
        return []
    return list(CheckpointReader(path).read_metadata().state_dict_metadata)


def model_state(model: Any, *, lora_only: bool = False) -> dict[str, Any]:
    """Return this rank's shards of the parameters and buffers, by their full names, without copies.

    Args:
        model: The model as verl has wrapped it. With FSDP1 all ranks must call this function.
        lora_only: Return only the adapters' parameters, if the model has adapters.

    Raises:
        ValueError: With ``lora_only``, the model has adapters but no parameters of adapters. verl raises this, too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as verl does: FSDP1 warns of itself
        state = get_model_state_dict(model)
    if lora_only and hasattr(getattr(model, "_fsdp_wrapped_module", model), "peft_config"):
        state = {name: value for name, value in state.items() if _is_lora(name)}
        if not state:
            raise ValueError("save_lora_only is set, and none of the model's parameters is one of an adapter")
    return state


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state, by the names of the parameters. The state of a fresh optimizer is empty."""
    is_fresh = not optimizer.state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if is_fresh and optimizer.state:  # torch has made a state by an extra step, which must not count
        optimizer.state.clear()
        state["state"] = {}
    return state


def extra_name(rank: int, ranks: int) -> str:
    """Return the name of a rank's own file."""
    return f"extra_state_world_size_{ranks}_rank_{rank}.pt"


def extra_file(lr_scheduler: Any, rng: Mapping[str, Any]) -> bytes:
    """Return a file with the schedule and the state of the generators. Reading it runs no code.

    Args:
        lr_scheduler: A scheduler of torch, or None.
        rng: The result of verl's ``get_rng_state``.
    """
    kind, keys, *rest = rng["numpy"]
    plain = {**rng, "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)}
    file = io.BytesIO()
    torch.save({"lr_scheduler": lr_scheduler and lr_scheduler.state_dict(), "rng": plain}, file)
    return file.getvalue()


def read_extra(path: str, rank: int, ranks: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the state of the schedule, and the state of this rank's generators; None for a missing state.

    If another number of ranks has saved, each rank takes the states of the rank with its number. If there was no such
    rank, it takes the first rank's schedule, because all ranks have the same schedule, and no state of generators.

    Raises:
        DamagedCheckpointError, StorageError: A file cannot be read, or has other bytes than were written.
        UntrustedValueError: The schedule has objects that could run code.
        MismatchError: No rank has saved such states.
    """
    source = StorageSource(path)
    worlds = {name.split("_")[4] for name in source.manifest.files if name.startswith("extra_state_world_size_")}
    if not worlds:
        raise MismatchError("no state of a schedule, or of generators, was saved: take 'extra' out of load_contents")
    saved = ranks if str(ranks) in worlds else int(min(worlds))

    def read(of: int) -> Any:
        name = extra_name(of, saved)
        try:
            return torch.load(io.BytesIO(source.read(name)), weights_only=True)
        except pickle.UnpicklingError as error:
            raise UntrustedValueError(f"{name} has an object that could run code: {error}", path=path) from error

    own = read(rank if rank < saved else 0)
    if rank >= saved:
        return own["lr_scheduler"], None
    kind, keys, *rest = own["rng"]["numpy"]
    own["rng"]["numpy"] = (kind, keys.numpy().astype(np.uint32), *rest)
    return own["lr_scheduler"], own["rng"]


def load_state(
    path: str,
    names: Iterable[str],
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    with_model: bool = True,
    with_optimizer: bool = True,
) -> None:
    """Load a checkpoint that any number of ranks has saved, and check every byte that is read.

    Args:
        path: The checkpoint's folder.
        names: Names of the stored values.
        model, optimizer: The objects to fill; the optimizer is the model's.
        with_model, with_optimizer: Which of the two to load.

    Raises:
        CheckpointError: As ``loading.load`` raises.
        ValueError: The checkpoint has only parameters of adapters, and the model lacks some of them.
    """
    stored = set(names)
    of_model = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    is_lora_only = bool(of_model) and all(map(_is_lora, of_model))
    states: dict[str, Any] = {}
    if with_model:
        states["model"] = model_state(model)
        if is_lora_only:
            if unknown := sorted(of_model - states["model"].keys()):
                raise ValueError(f"the checkpoint has adapters that the model has not: {', '.join(unknown[:5])}")
            states["model"] = {name: value for name, value in states["model"].items() if name in of_model}
    if with_optimizer and optimizer is not None:
        states["optimizer"] = _stored_of_optimizer(model, optimizer, stored)
    if not states:
        return
    load(states, path, warns=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if with_model:
            set_model_state_dict(model, states["model"], options=StateDictOptions(strict=not is_lora_only))
        if with_optimizer and optimizer is not None:
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(model, optimizer, states["optimizer"], options=options)


def _stored_of_optimizer(model: Any, optimizer: torch.optim.Optimizer, stored: set[str]) -> dict[str, Any]:
    """Return the optimizer's state, reduced to the values that the checkpoint has.

    The checkpoint has no state for a parameter that has never had a gradient, and it may lack options of param groups
    that other releases of torch have. The optimizer keeps its own values for these. If only a part of a parameter's
    state is in the checkpoint, the result has all names of that state, so that the load raises.
    """
    if not optimizer.state:
        optimizer.zero_grad(set_to_none=True)  # otherwise torch makes no state to load into
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if not any(name.startswith("optimizer.") for name in stored):
        return state
    state["state"] = {
        name: values
        for name, values in state["state"].items()
        if any(isinstance(value, Mapping) or f"{_STATE}{name}.{key}" in stored for key, value in values.items())
    }
    for number, group in enumerate(state["param_groups"]):
        for key in [key for key in group if f"optimizer.param_groups.{number}.{key}" not in stored]:
            logger.info("the checkpoint has no %r of param group %d: it stays %r", key, number, group[key])
    state["param_groups"] = [
        {key: value for key, value in group.items() if f"optimizer.param_groups.{number}.{key}" in stored}
        for number, group in enumerate(state["param_groups"])
    ]
    return state


def _is_lora(name: str) -> bool:
    return any(each in name for each in _LORA)


class AsyncckptVeOmniManager(AsyncManager, FSDPCheckpointManager):  # type: ignore[misc]  # verl has no types
    """Saves the files of verl's ``FSDPCheckpointManager`` through our engine. verl loads them."""


class AsyncckptFSDPManager(AsyncManager, FSDPCheckpointManager):  # type: ignore[misc]  # likewise
    """Saves as verl's ``FSDPCheckpointManager`` does, but through our engine. Loads checkpoints of both managers."""

    _has_weights = True

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load one checkpoint that any number of ranks has saved, and check every byte. verl loads its own checkpoints.

        Args:
            local_path: The checkpoint's folder. If None, do nothing.
            hdfs_path, del_local_after_load: As for verl: whether verl removes its local copies of remote files.

        Raises:
            AssertionError: The model or the optimizer to load into is missing.
            CheckpointError: As ``loading.load`` raises.
            ValueError: The checkpoint has adapters that the model lacks.
        """
        path = None if local_path is None or is_non_local(local_path) else absolute_path(local_path)
        names = None if path is None else ranks_of().from_first(partial(stored_names, path))
        if path is None or names is None:
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        self._check("load", has_model=self.should_load_model, has_optimizer=self.should_load_optimizer)
        wanted = {"with_model": self.should_load_model, "with_optimizer": self.should_load_optimizer}
        load_state(path, names, self.model, self.optimizer, **wanted)
        if self.should_load_extra:
            schedule, rng = read_extra(path, self.rank, self.world_size)
            if rng is None:
                logger.info("the random generators of this rank are not loaded: fewer ranks have saved")
            else:
                self.load_rng_state(rng)
            if schedule is not None and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(schedule)
        torch.distributed.barrier()

    def _check(self, what: str, *, has_model: bool, has_optimizer: bool) -> None:
        for name, is_wanted in (("model", has_model), ("optimizer", has_optimizer)):
            if is_wanted and getattr(self, name) is None:  # the text is verl's
                raise AssertionError(f"{name} must be provided when checkpoint_contents.{what} includes ['{name}']")

    def _why_stock(self, local_path: str, hdfs_path: str | None) -> str | None:
        if self.should_save_optimizer and not isinstance(self.optimizer, torch.optim.Optimizer | None):
            return f"{type(self.optimizer).__qualname__} is no optimizer of torch's"
        return super()._why_stock(local_path, hdfs_path)

    def _capture(self, capture: Capture, step: int) -> None:
        self._check("save", has_model=self.should_save_model, has_optimizer=self.should_save_optimizer)
        folder = str(capture.folder)
        if self.should_save_hf_model:
            # Write these before all ranks gather the weights, because a failed rank would not take part in that.
            ranks_of().on_all(partial(self._have_verl_write_small, folder, step, []))
            self._have_verl_write_small(folder, step, ["hf_model"])
        else:
            self._have_verl_write_small(folder, step, [])
        if state := self._state():
            capture.files.add_dcp_folder("", state)
        if self.should_save_extra:
            data = extra_file(self.lr_scheduler, self.get_rng_state())
            capture.files.add_bytes(extra_name(self.rank, self.world_size), data)

    def _have_verl_write_small(self, folder: str, step: int, contents: list[str]) -> None:
        """Make verl write its other files: configuration, tokenizer, weights for Hugging Face."""
        with replaced(self, "checkpoint_save_contents", contents):
            self.have_verl_write(folder, step)

    def _state(self) -> dict[str, Any]:
        state = {}
        if self.should_save_model:
            # verl 0.8 has no such attribute, because it cannot save adapters alone.
            lora_only = getattr(self, "should_save_lora_only", False)
            state["model"] = model_state(self.model, lora_only=lora_only)
        if self.should_save_optimizer:
            state["optimizer"] = optimizer_state(self.model, self.optimizer)
        return state
