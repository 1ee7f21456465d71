"""Kinds of state in trainings, saved and then loaded by a fresh process, on one rank and on two.

All values and all keys come back with their types, in a state of the same form with other values.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import QUICK, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from asyncckpt import Checkpointer, PerRank
from asyncckpt.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("forkserver")


class _Mode(enum.Enum):
    WARM = 1
    COLD = 2


class _Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class _Settings:
    rate: float
    names: list[str]


class _Loader:
    def __init__(self, at: int) -> None:
        self.at: dict[Any, Any] = {"at": at, 0: [at, {"seen": torch.tensor([at])}]}

    def state_dict(self) -> dict[Any, Any]:
        return self.at

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.at = state


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Embedding(5, 2))
    net.register_buffer("seen", torch.tensor(seed))
    return net


def _trained(kind: Callable[..., torch.optim.Optimizer], seed: int, **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    net = nn.Linear(4, 3)
    optimizer = kind([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.01 * seed}], lr=0.1 * seed, **options)
    for _ in range(seed):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    return optimizer


def _counted(seed: int) -> torch.optim.Optimizer:
    """Return an optimizer that counts its steps in a number, as many optimizers outside torch do."""
    optimizer = _trained(torch.optim.SGD, seed, momentum=0.9)
    for state in optimizer.state.values():
        state["step"], state["seen"] = 10 * seed, {0: seed, "1": -seed}
    return optimizer


def _scheduler(seed: int) -> Any:
    optimizer = _trained(torch.optim.SGD, 1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(seed):
        optimizer.step()
        scheduler.step()
    return scheduler


def _scaler(seed: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**seed)


def _average(seed: int) -> Any:
    average = torch.optim.swa_utils.AveragedModel(_net(seed))
    for _ in range(seed):
        average.update_parameters(_net(seed + 1))
    return average


def _generators(seed: int) -> dict[str, Any]:
    mine = seed * 10 + dist.get_rank()
    torch.manual_seed(mine)
    source, other, generator = random.Random(mine), np.random.RandomState(mine), torch.Generator().manual_seed(mine)
    states = {"torch": torch.get_rng_state(), "python": source.getstate(), "numpy": other.get_state()}
    return {name: PerRank(each) for name, each in (states | {"own": generator.get_state()}).items()}


def _tied(seed: int) -> dict[str, Any]:
    weight = torch.full((40,), float(seed))
    return {"one": weight, "other": weight, "view": weight[10:20], "list": [weight]}


def _placed(seed: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).reshape(6, 4) * seed
    placements: dict[str, list[Placement]] = {"rows": [Shard(0)], "columns": [Shard(1)], "whole": [Replicate()]}
    return {name: distribute_tensor(whole, mesh, its) for name, its in placements.items()}


# Functions by name, each of which makes a state from a number. The form is the same for each number.
KINDS: dict[str, Callable[[int], dict[Any, Any]]] = {
    "module": lambda n: {"model": _net(n)},
    "state of a module": lambda n: {"model": _net(n).state_dict()},
    "modules in lists and dicts": lambda n: {
        "models": [_net(n), {"deep": _net(n + 5)}],
        "by name": {"a": {0: _net(n)}},
    },
    "Adam": lambda n: {"optimizer": _trained(torch.optim.Adam, n)},
    "AdamW, amsgrad": lambda n: {"optimizer": _trained(torch.optim.AdamW, n, amsgrad=True)},
    "SGD with momentum": lambda n: {"optimizer": _trained(torch.optim.SGD, n, momentum=0.9)},
    "Adagrad": lambda n: {"optimizer": _trained(torch.optim.Adagrad, n)},
    "RMSprop": lambda n: {"optimizer": _trained(torch.optim.RMSprop, n, centered=True, momentum=0.5)},
    "Adafactor": lambda n: {"optimizer": _trained(torch.optim.Adafactor, n)},
    "state of an optimizer, numbers as keys": lambda n: {"optimizer": _trained(torch.optim.Adam, n).state_dict()},
    "optimizer with numbers in its state": lambda n: {"optimizer": _counted(n)},
    "scheduler": lambda n: {"scheduler": _scheduler(n)},
    "gradient scaler": lambda n: {"scaler": _scaler(n)},
    "average of a model": lambda n: {"average": _average(n)},
    "random number generators": _generators,
    "loader": lambda n: {"loader": _Loader(n), "deep": {"loaders": [_Loader(n + 1), _Loader(n + 2)]}},
    "numbers": lambda n: {"int": n, "float": n / 3, "bool": n > 1, "complex": complex(n, 1), "large": n << 200},
    "text and bytes": lambda n: {"text": "ä" * n, "bytes": b"\0" * n, "none": None, "empty": ""},
    "numbers as keys": lambda n: {"rates": {0: n, 1: {2: torch.full((3,), n), "3": "text"}, -1: [n]}},
    "dots and slashes in keys": lambda n: {"a.b": torch.tensor(n), "a": {"c.d": n, "e/f": [torch.tensor(n)]}, "": n},
    "lists and tuples": lambda n: {
        "list": [n, [n, "x"]],
        "tuple": (n, (n,)),
        "mixed": [torch.tensor(n), n, {"k": (n,)}],
    },
    "empty containers": lambda n: {"list": [], "tuple": (), "dict": {}, "n": n, "tensor": torch.zeros(0, 3)},
    "kinds of mappings": lambda n: {
        "ordered": collections.OrderedDict(b=torch.tensor(n), a=n),
        "counter": (collections.Counter({"a": n}),),
        "default": (collections.defaultdict(list, {n: [n]}),),
    },
    "sets and queues": lambda n: {"set": {n, n + 1}, "frozen": frozenset({n}), "deque": collections.deque([n], 3)},
    "objects": lambda n: {"settings": _Settings(n / 2, ["a"] * n), "mode": _Mode(n), "point": _Point(n, n / 2)},
    "objects of Python's library": lambda n: {
        "path": Path("a") / str(n),
        "when": datetime.datetime(2026, 1, n, tzinfo=datetime.timezone.utc),
        "decimal": decimal.Decimal(n) / 7,
        "fraction": fractions.Fraction(n, 7),
        "range": range(n),
    },
    "numpy": lambda n: {
        "array": np.arange(n + 3),
        "scalar": np.float32(n),
        "text": np.array(["a" * n]),
        "b": np.bool_(1),
    },
    "tensors of many dtypes": lambda n: (
        {
            str(dtype): torch.arange(n, n + 4).to(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64)
        }
        | {"float8": torch.arange(n, n + 4.0).to(torch.float8_e4m3fn), "uint16": torch.tensor([n], dtype=torch.uint16)}
    ),
    "tensors of many forms": lambda n: {
        "scalar": torch.tensor(float(n)),
        "transposed": torch.arange(12.0).reshape(3, 4).t() * n,
        "strided": (torch.arange(20.0) * n)[::2],
        "channels last": torch.full((2, 3, 4, 5), float(n)).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([complex(n, 1)]).conj(),
        "parameter": nn.Parameter(torch.full((3,), float(n))),
    },
    "sparse tensor": lambda n: {"sparse": torch.tensor([[0.0, n], [n, 0.0]]).to_sparse()},
    "tied tensors": _tied,
    "DTensors": _placed,
    "dtypes and devices": lambda n: {
        "dtype": torch.float32 if n == 1 else torch.int8,
        "device": torch.device("cpu", 0),
    },
}


def _differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Return where two values differ in containers, keys, key order, types or bytes."""
    if isinstance(one, PerRank) and isinstance(other, PerRank):
        one, other = one.value, other.value
    if hasattr(one, "load_state_dict") and hasattr(other, "load_state_dict"):
        one, other = one.state_dict(), other.state_dict()
    if type(one) is not type(other):
        return [f"{at}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        return [] if _same(one, other) else [f"{at}: {one} and {other}"]
    if isinstance(one, np.ndarray):
        return [] if one.dtype == other.dtype and np.array_equal(one, other) else [f"{at}: {one} and {other}"]
    if isinstance(one, Mapping):
        if [(type(key), key) for key in one] != [(type(key), key) for key in other]:
            return [f"{at}: keys {list(one)} and {list(other)}"]
        return [each for key in one for each in _differences(one[key], other[key], f"{at}/{key!r}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{at}: {len(one)} and {len(other)} values"]
        pairs = enumerate(zip(one, other, strict=True))
        return [each for number, (mine, its) in pairs for each in _differences(mine, its, f"{at}/{number}")]
    return [] if one == other else [f"{at}: {one!r} and {other!r}"]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements and _same(one.to_local(), other.to_local())
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    bits = [each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*bits)


def _save(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        for step, make in enumerate(KINDS.values(), 1):
            with contextlib.suppress(CheckpointError):  # the load fails then, and is reported
                checkpointer.save(step, make(2)).result(30)


def _load(root: str) -> dict[str, list[str]]:
    """Return the differences after a load, by the name of the kind."""
    found = {}
    with Checkpointer(root, QUICK) as checkpointer:
        for step, (name, make) in enumerate(KINDS.items(), 1):
            into = make(1)
            try:
                checkpointer.load(into, step, memory=False, weights_only=False)
                found[name] = _differences(into, make(2))
            except Exception as error:
                found[name] = [f"{type(error).__name__}: {error}"]
    return found


@pytest.fixture(scope="module", params=[1, 2])
def differences(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forkserver: None
) -> list[dict[str, list[str]]]:
    """Return the differences on each rank."""
    folder = tmp_path_factory.mktemp("kinds")
    run(request.param, _save, str(folder / "root"), folder=folder)
    found: list[dict[str, list[str]]] = run(request.param, _load, str(folder / "root"), folder=folder)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_all_comes_back(differences: list[dict[str, list[str]]], kind: str) -> None:
    assert [each[kind] for each in differences] == [[]] * len(differences)
