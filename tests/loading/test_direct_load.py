"""Direct loads and loads by DCP give the same values, warnings and errors."""

from __future__ import annotations

import logging
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run
from support.states import same, stock_load, zeros_like
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.extension import Engine, StorageSource
from asyncckpt.format.index import Index
from asyncckpt.loading import dcp_reader
from asyncckpt.loading import direct_load as direct
from asyncckpt.loading import load as reader

Make = Callable[[], dict[str, Any]]


class Kept:
    """A ``Stateful`` value that records its calls."""

    def __init__(self) -> None:
        self.weight = torch.zeros(300)
        self.steps = 0
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"weight": self.weight, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        assert state["weight"] is self.weight
        self.steps = state["steps"]

    def __repr__(self) -> str:
        return f"{self.weight.tolist()} {self.steps} {self.calls}"


class Stranger:
    pass


TIED = torch.randn(500)


def _saved() -> dict[str, Any]:
    kept = Kept()
    kept.weight = torch.arange(300.0)
    kept.steps = 3
    return {
        "model": OrderedDict(
            {
                "small": torch.randn(7, 5),
                "large": torch.randn(700_000),
                "scalar": torch.tensor(3.0),
                "empty": torch.empty(0, 3),
                "bf16": torch.randn(33).bfloat16(),
                "complex": torch.randn(6, 4, dtype=torch.complex64),
                "sparse": torch.eye(3).to_sparse(),
            }
        ),
        "list": [torch.randn(3), {"x": 1}, [2, torch.randn(4)]],
        "optimizer": {"state": {0: {"exp_avg": torch.randn(9), "step": 4}}, "lr": 0.1},
        "tied": TIED,
        "tied too": TIED,
        "kept": kept,
        "plain list": [1, 2],
        "tuple": (1, "a"),
        "none": None,
        "stranger": Stranger(),
        "step": 7,
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "checkpoint"
    with Engine() as engine:
        engine.save(path, _saved()).result(60)
    return path


def model(*names: str) -> dict[str, Any]:
    return {"model": {name: zeros_like(_saved()["model"][name]) for name in names}}


def _untied() -> dict[str, Any]:
    return {"tied": torch.zeros(500), "tied too": torch.zeros(500)}


def _same_memory() -> dict[str, Any]:
    return {"tied": (tensor := torch.zeros(500)), "tied too": tensor}


def _parameters() -> dict[str, Any]:
    return {"model": {"small": torch.nn.Parameter(torch.zeros(7, 5)), "bf16": torch.zeros(33, dtype=torch.bfloat16)}}


def _values() -> dict[str, Any]:
    return {key: None for key in ("plain list", "tuple", "none", "step")} | {"optimizer": {"lr": 9}}


def _forms() -> dict[str, Any]:
    base = torch.zeros(5, 14)
    return {"model": {"small": base.t()[::2], "complex": torch.zeros(6, 4, dtype=torch.complex64).conj()}}


def _numbered() -> dict[str, Any]:
    return {"optimizer": {"state": {0: {"exp_avg": torch.zeros(9), "step": 0}}, "lr": 0}}


DIRECT: dict[str, Make] = {
    "model": lambda: model("small", "large", "scalar", "empty", "bf16", "complex"),
    "parameters": _parameters,
    "forms": _forms,
    "values": _values,
    "lists": lambda: {"list": [torch.zeros(3), {"x": 0}, [0, torch.zeros(4)]]},
    "numbered": _numbered,
    "untied": _untied,
    "tied": _same_memory,
    "stateful": lambda: {"kept": Kept(), "step": 0},
    "part of a list": lambda: {"list": [torch.zeros(3)]},
    "nothing": dict,
    "ordered": lambda: OrderedDict(step=0, none=3),
    "untrusted": lambda: {"step": 0, "stranger": None},
}
BY_DCP: dict[str, Make] = {
    "missing": lambda: {"step": 0, "other": 3, "model": {"more": torch.zeros(3)}},
    "shape": lambda: {"tied": torch.zeros(3)},
    "dtype": lambda: {"tied": torch.zeros(500, dtype=torch.float64)},
    "sparse": lambda: model("sparse"),
    "a tensor for a value": lambda: {"step": torch.zeros(1)},
    "a value for a tensor": lambda: {"tied": 3},
    "another mapping": lambda: {"model": UserDict(small=torch.zeros(7, 5))},
    "twice": lambda: {"optimizer": {"lr": 0}, "optimizer.lr": 1},
}
REFUSED = {"untrusted", "missing", "shape", "a value for a tensor", "another mapping", "twice"}
WARNED = {"model", "parameters", "forms", "values", "part of a list", "sparse"}


def outcome(
    make: Make, path: Path, caplog: pytest.LogCaptureFixture, **options: Any
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Return the state, the error and the log of one load."""
    caplog.clear()
    state = make()
    kept = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    error: list[Any] = []
    try:
        reader.load(state, str(path), **options)
    except BaseException as raised:
        causes = getattr(raised, "failures", {})
        text = "" if causes else str(raised)
        error = [type(raised), text, *(type(cause[0]) for cause in causes.values())]
    assert all(state[key] is value for key, value in kept.items() if key != "step")  # loaded in place
    return (
        state,
        error,
        [(record.levelno, record.getMessage()) for record in caplog.records if record.name.startswith("asyncckpt")],
    )


def both(
    make: Make, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[bool, Any, list[Any], list[Any]]:
    """Load directly and by DCP, and compare. Return whether the first load was direct, and its outcome."""
    went: list[bool] = []

    def draft(*args: Any) -> direct.DirectLoad | None:
        drafted = direct.draft(*args)
        went.append(drafted is not None)
        return drafted

    with monkeypatch.context() as patch:
        patch.setattr(reader, "draft", draft)
        mine = outcome(make, path, caplog, **options)
        patch.setattr(reader, "draft", lambda *_: None)
        dcps = outcome(make, path, caplog, **options)
    assert same(mine[0], dcps[0]), (mine[0], dcps[0])
    assert mine[1:] == dcps[1:]
    return went == [True], *mine


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("case", [*DIRECT, *BY_DCP])
def test_the_same_comes_of_it(
    case: str, verify: bool, checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    directly, state, error, log = both(
        (DIRECT | BY_DCP)[case], checkpoint, caplog, monkeypatch, verify=verify, weights_only=True
    )
    assert directly == (case in DIRECT)
    assert bool(error) == (case in REFUSED)
    assert bool(log) == (case in WARNED)
    if case == "model":
        assert torch.equal(state["model"]["scalar"], torch.tensor(3.0))
        assert "7 values" not in str(log) and "'model.sparse'" in str(log)


def test_what_was_pickled_may_fail_to_unpickle(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(globals(), "Stranger")
    directly, _, error, _ = both(lambda: {"stranger": None}, checkpoint, caplog, monkeypatch, weights_only=False)
    assert directly and error


@pytest.mark.parametrize("name", ["model.large", "model.small", "step"])
def test_damage_is_the_same(
    name: str, checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item,) = [item for index in StorageSource(str(checkpoint)).indexes() for item in index.items if item.name == name]
    whole = (checkpoint / "__0_0.distcp").read_bytes()
    bad = bytearray(whole)
    bad[item.payload_at + item.payload_bytes // 2] ^= 4
    (checkpoint / "__0_0.distcp").write_bytes(bad)

    def make() -> dict[str, Any]:
        return DIRECT["model"]() | {"step": 0}

    try:
        with monkeypatch.context() as patch:
            for draft in (direct.draft, lambda *_: None):
                patch.setattr(reader, "draft", draft)
                state, error, _ = outcome(make, checkpoint, caplog)
                assert error and issubclass(error[0], CheckpointError) and repr(name) in error[1]
                assert state["step"] == 0  # values are replaced only after all bytes around them are checked
    finally:
        (checkpoint / "__0_0.distcp").write_bytes(whole)


def test_a_planner_of_the_users_own_is_asked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "draft", None)
    reader.load(state := {"tied": torch.zeros(500)}, str(checkpoint), planner=DefaultLoadPlanner())
    assert torch.equal(state["tied"], TIED)


def test_metadata_is_not_unpickled(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_reader, "load_metadata", None)
    reader.load(state := DIRECT["model"](), str(checkpoint))
    assert state["model"]["scalar"] == 3


def test_each_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is read once, although the next save takes its plan from these files too."""
    state = {"w": torch.arange(5.0), "step": 1}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result(60)
    read: list[str] = []
    parse, read_small = Index.parse, StorageSource.read

    def parsed(text: bytes, path: str) -> Index:
        read.append("parsed")
        return parse(text, path)

    def noted(source: StorageSource, name: str) -> bytes:
        read.append(name)
        return read_small(source, name)

    monkeypatch.setattr(Index, "parse", parsed)
    monkeypatch.setattr(StorageSource, "read", noted)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(into := zeros_like(state), memory=False)
        assert same(into, state) and checkpointer._engine._plans.stored is not None
    assert sorted(read) == [".metadata", "__0_0.index.json", "parsed"]


def _backward_after_loads(root: str) -> list[str]:
    """Return the messages of backward passes after a direct load, DCP's load, and stock's load."""
    mesh, said = init_device_mesh("cpu", (1,)), []
    whole = torch.arange(1.0, 9.0)
    with Checkpointer(root) as checkpointer:
        path = checkpointer.save(1, {"w": whole}).result(60)
    state_dict_saver.save({"w": whole}, checkpoint_id=f"{root}-stock")
    for place, planner in ((path, None), (path, DefaultLoadPlanner()), (f"{root}-stock", None)):
        for make in (
            torch.zeros_like,
            lambda its: torch.zeros(16)[::2],  # not contiguous
            lambda its: distribute_tensor(torch.zeros_like(its), mesh, [Shard(0)]),
        ):
            weight = make(whole).requires_grad_()
            loss = (weight * weight).sum()
            reader.load({"w": weight}, place, planner=planner)
            try:
                loss.backward()  # type: ignore[no-untyped-call]
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error))
    return said


def test_a_load_is_a_change_for_autograd(tmp_path: Path, forkserver: None) -> None:
    """Autograd raises, as after ``copy_``, because gradients would belong to the old values."""
    (found,) = run(1, _backward_after_loads, str(tmp_path / "root"), folder=tmp_path)
    assert len(found) == 9 and all("modified by an inplace operation" in each for each in found), found


class Watched(dict[str, Any]):
    """A dict that records the keys that are set."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seen: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.seen.append(key)
        super().__setitem__(key, value)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_dict_of_a_class_of_its_own_is_told_of_what_is_set(root: Path, stateful: bool) -> None:
    """A direct load sets the same items as DCP, except for ``Stateful`` values."""
    values = {"foo": {"t": torch.ones(3), "list": [1, 2]}, "step": 3} | ({"kept": Kept()} if stateful else {})
    with Checkpointer(root) as checkpointer:
        path = checkpointer.save(1, values).result(60)
        state = Watched(foo=Watched(t=torch.zeros(3), list=[0, 0]), step=0, **({"kept": Kept()} if stateful else {}))
        checkpointer.load(state)
    assert sorted(state.seen) == ["foo", "step"] and state["foo"].seen == ["list"]
    assert torch.equal(state["foo"]["t"], torch.ones(3)) and state["foo"]["list"] == [1, 2] and state["step"] == 3
    stock = Watched(foo={"t": torch.zeros(3), "list": [0, 0]}, step=0)
    stock_load(stock, path)
    assert sorted(stock.seen) == ["foo", "step"]
