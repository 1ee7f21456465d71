"""What a checkpoint of verl's FSDP engine holds, in names that do not depend on how many ranks there are.

``model`` and ``optimizer`` stand in one checkpoint of DCP, each parameter by its full name. The schedule and the states
of the generators of random numbers are files of each rank, under the names that verl gives them.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import warnings
from collections.abc import Iterable, Mapping
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

from asyncckpt.errors import MismatchError, UntrustedValueError
from asyncckpt.extension import MANIFEST_NAME, METADATA_NAME, CheckpointReader, StorageSource, load, storage_for

logger = logging.getLogger(__name__)

_LORA = ("lora_", ".adapter_")  # as verl tells them
_STATE = "optimizer.state."


def stored_names(path: str) -> list[str] | None:
    """The names of the values in the checkpoint ``path``; None: asyncckpt has not saved it.

    Raises ``DamagedCheckpointError``, ``StorageError``.
    """
    if not storage_for(path).exists(os.path.join(path, MANIFEST_NAME)):
        return None
    if METADATA_NAME not in StorageSource(path).manifest.files:
        return []
    return list(CheckpointReader(path).read_metadata().state_dict_metadata)


def model_state(model: Any, *, lora_only: bool = False) -> dict[str, Any]:
    """The parameters and buffers by their full names, where they are; this rank's part of those that are sharded.

    Args:
        model: As verl has wrapped it. All ranks have to ask for that of FSDP1.
        lora_only: Only the adapters', if it has any.

    Raises:
        ValueError: As verl raises, for a model with adapters that has no parameters of theirs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as verl does: FSDP1 warns of its own ways
        state = get_model_state_dict(model)
    if lora_only and hasattr(getattr(model, "_fsdp_wrapped_module", model), "peft_config"):
        state = {name: value for name, value in state.items() if _is_lora(name)}
        if not state:
            raise ValueError("save_lora_only is set, and none of the model's parameters is one of an adapter")
    return state


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, by the names of the parameters; that of one which has none yet stays empty."""
    is_fresh = not optimizer.state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if is_fresh and optimizer.state:  # torch makes one by a step, which would count
        optimizer.state.clear()
        state["state"] = {}
    return state


def extra_name(rank: int, ranks: int) -> str:
    """The file of a rank's own."""
    return f"extra_state_world_size_{ranks}_rank_{rank}.pt"


def extra_file(lr_scheduler: Any, rng: Mapping[str, Any]) -> bytes:
    """The file with the schedule and the state of the generators, such that reading it runs no code.

    Args:
        lr_scheduler: torch's, or None.
        rng: What verl's ``get_rng_state`` says.
    """
    kind, keys, *rest = rng["numpy"]
    plain = {**rng, "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)}
    file = io.BytesIO()
    torch.save({"lr_scheduler": lr_scheduler and lr_scheduler.state_dict(), "rng": plain}, file)
    return file.getvalue()


def read_extra(path: str, rank: int, ranks: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The state of the schedule, and that of this rank's generators; None where there is none to take.

    Where another number of ranks has saved, the schedule is that of the first, as it is the same on all, and each rank
    goes on with the generators of the one with its number, if there was one.

    Raises:
        DamagedCheckpointError, StorageError: A file cannot be read, or has other bytes than were written.
        UntrustedValueError: The schedule has objects that could run code.
        MismatchError: No rank has saved any.
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
    """Load a checkpoint, whichever number of ranks has saved it, and check every byte that is read.

    Args:
        path: Its folder.
        names: Of its values.
        model, optimizer: To fill; the optimizer is that of the model.
        with_model, with_optimizer: Which of the two to load.

    Raises:
        CheckpointError: As ``loading.load`` raises.
        ValueError: It has parameters of adapters only, and not all of them are the model's.
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
    """The optimizer's state with places for what the checkpoint has of it.

    A parameter that has never had a gradient has no state there, and options of param groups come and go with releases
    of torch: these stay as they are. What the checkpoint has in part is asked for as a whole, and so refused.
    """
    if not optimizer.state:
        optimizer.zero_grad(set_to_none=True)  # else torch makes no places
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
