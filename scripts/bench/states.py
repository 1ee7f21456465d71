"""States to save: uniform states, and states with the shapes of published models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bench.models import ARCHITECTURES

State = dict[str, Any]
GIB = 1 << 30
_TENSORS_OF_ADAMW = 5
_BYTES_OF_ADAMW = 14
"""Bytes of one element: 2 of the weight, 4 of the master copy and of each moment."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for a state: its ``name``, size, device, and number of small Python values beside the tensors."""

    name: str
    gib: float = 1.0
    device: str = "cpu"
    values: int = 0

    @property
    def label(self) -> str:
        """The name of the state in file names."""
        return self.name + (f"-{self.values}-values" if self.values else "")


@dataclass(frozen=True)
class Made:
    """A state with its description."""

    request: Request
    state: State
    description: str

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(self.state))

    def facts(self) -> dict[str, Any]:
        """Return the facts about the state for a report."""
        return {
            "name": self.request.label,
            "description": self.description,
            "tensors": sum(1 for _ in tensors_of(self.state)),
            "bytes": self.nbytes,
            "device": self.request.device,
        }


def check_name(name: str) -> str:
    """Return ``name``. Raises ``ValueError`` if no such state exists."""
    if name not in ARCHITECTURES and re.fullmatch(r"[1-9]\d*(x[1-9]\d*kB)?|adamw[1-9]\d*", name) is None:
        raise ValueError(
            f"there is no state {name!r}; there are 400, 8000x50kB, adamw2000, any such, {', '.join(ARCHITECTURES)}"
        )
    return name


def make(request: Request, seed: int = 1) -> Made:
    """Create the requested state. Equal seeds give equal states."""
    torch.manual_seed(seed)
    if request.name in ARCHITECTURES:
        part = ARCHITECTURES[request.name].fit(int(request.gib * GIB))
        state, description = _training_state(part.shapes, request.device), part.description
    elif request.name.startswith("adamw"):
        layers = max(1, int(request.name.removeprefix("adamw")) // _TENSORS_OF_ADAMW)
        elements = max(1, int(request.gib * GIB) // layers // _BYTES_OF_ADAMW)
        shapes = {f"layer.{number}": (elements,) for number in range(layers)}
        state = _training_state(shapes, request.device, steps_on="cpu")
        description = f"{layers * _TENSORS_OF_ADAMW:,} tensors as of AdamW, its steps on the host"
    else:
        count, _, kilobytes = request.name.removesuffix("kB").partition("x")
        nbytes = int(kilobytes) * 1000 if kilobytes else int(request.gib * GIB) // int(count)
        elements = max(1, nbytes // 4)
        state = {"model": {f"layer.{number}": _random((elements,), request) for number in range(int(count))}}
        description = f"{int(count):,} tensors of {_size(elements * 4)}"
    if request.values:
        state["values"] = {f"value.{number}": float(number) for number in range(request.values)}
        description += f", {request.values:,} values"
    return Made(request, state | {"step": 0}, description)


def _random(shape: tuple[int, ...], request: Request) -> torch.Tensor:
    return torch.empty(shape, device=request.device).uniform_()


def _training_state(shapes: Mapping[str, tuple[int, ...]], device: str, steps_on: str | None = None) -> State:
    """Return bf16 weights, and the fp32 master copies, moments and step counters of Adam in mixed precision.

    The step counters are on the device ``steps_on``, by default that of the other tensors.
    """

    def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).uniform_()

    moments = {
        name: {
            "master_param": random(shape),
            "exp_avg": random(shape),
            "exp_avg_sq": random(shape),
            "step": torch.zeros((), device=steps_on or device),
        }
        for name, shape in shapes.items()
    }
    return {
        "model": {name: random(shape, torch.bfloat16) for name, shape in shapes.items()},
        "optimizer": {"state": moments, "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}]},
    }


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} bytes"


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)


def with_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same nested structure with ``function`` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: with_tensors(each, function) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(each, function) for each in value)
    return value


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or the whole of another tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def blank(state: State) -> State:
    """Return a state of the same structure to load into, with touched memory."""
    return dict(with_tensors(state, torch.zeros_like))


def same_tensors(left: Any, right: Any) -> bool:
    """Return whether both nested structures have equal tensors under equal names."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right.to(left.device))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_tensors(each, right[name]) for name, each in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_tensors, left, right))
    return True
