"""The state of an optimizer that has made no step, for a load to fill."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class _UnknownStateError(Exception):
    """It is unknown which state the optimizer had."""


def stored_state(optimizer: Optimizer, name: str, metadata: Metadata) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the state that a checkpoint has for a new optimizer: zeros for tensors, None for other values.

    Only the stored state is made, because torch makes none for a parameter that never had a gradient. The optimizer
    makes no step: a step may communicate, and needs gradients.

    Args:
        optimizer: An optimizer without a state.
        name: The name of the optimizer in the state dict.
        metadata: The metadata of the checkpoint.

    Returns:
        The state, by the parameters. It is empty if the checkpoint has none, or if its form is unknown: a part of a
        state would be worse than none.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    prefix, made = f"{name}.state.", dict[torch.Tensor, dict[str, Any]]()
    try:
        for stored, path in (metadata.planner_data or {}).items():  # in the order in which the state was saved
            if stored.startswith(prefix) and stored in metadata.state_dict_metadata:
                number, keys = _owner(stored.removeprefix(prefix), path)
                known = metadata.state_dict_metadata[stored]
                if number < len(parameters):  # else the model has other parameters, and the load says so
                    value = _like(parameters[number], known) if isinstance(known, TensorStorageMetadata) else None
                    set_element(made.setdefault(parameters[number], {}), keys, value)
    except _UnknownStateError:
        return {}
    return made


def _owner(below: str, path: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
    """Return the number of the parameter of a stored value, and the keys in the parameter's state.

    DCP notes the keys of dicts as text. A key that looks like a number may have been one.

    Args:
        below: The name of the stored value below "state."
        path: All keys that lead to the stored value, as DCP noted them.

    Raises:
        _UnknownStateError: The keys are unknown.
    """
    number, *keys = next((path[at:] for at in range(len(path)) if ".".join(map(str, path[at:])) == below), ("",))
    if not keys or not str(number).isdecimal() or any(isinstance(key, str) and key.isdecimal() for key in keys):
        raise _UnknownStateError
    return int(number), tuple(keys)


def _like(parameter: torch.Tensor, stored: TensorStorageMetadata) -> torch.Tensor:
    """Return zeros of the stored size, sharded as ``parameter``. Raises ``_UnknownStateError``."""
    dtype = stored.properties.dtype
    if not stored.size:  # a count of steps: ``Optimizer.load_state_dict`` brings it to the device if it belongs there
        return torch.zeros((), dtype=dtype)
    if stored.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor):
        raise _UnknownStateError  # its shards
    return torch.zeros(stored.size, dtype=dtype, device=parameter.device)
