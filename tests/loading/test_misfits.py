"""A value that does not fit the checkpoint raises one of our errors, an ``Exception`` that names the value."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import script
from support.states import same
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import asyncckpt
from asyncckpt import Checkpointer, PerRank
from asyncckpt.errors import CheckpointError, MismatchError
from asyncckpt.extension import Engine
from asyncckpt.integrations.dcp import load as load_as_dcp
from asyncckpt.loading import load as reader


class Gone:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the same state as ``ours`` and, by DCP, as ``stock``."""
    folder = tmp_path_factory.mktemp("misfits")
    state = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3), "gone": Gone(), "step": 7}
    with Engine() as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save(folder / "ours", state).result(60)
        state_dict_saver.save(state, checkpoint_id=folder / "stock")
    return folder


def _freed() -> torch.Tensor:
    tensor = torch.zeros(3, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


UNFIT: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "int": lambda: 3,
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "expanded": lambda: torch.zeros(3, 1).expand(3, 4),
    "sparse": lambda: torch.eye(3, 4).to_sparse(),
    "freed": _freed,
}


@pytest.mark.parametrize("written", ["ours", "stock"])
@pytest.mark.parametrize("case", UNFIT)
def test_what_a_tensor_cannot_be_loaded_into_is_named(case: str, written: str, folder: Path) -> None:
    rest = torch.zeros(3)
    with pytest.raises(MismatchError, match=r"'w'"):
        reader.load({"b": rest, "w": UNFIT[case]()}, str(folder / written))
    assert not rest.any()  # nothing was loaded


@pytest.mark.parametrize("written", ["ours", "stock"])
def test_of_names_that_are_missing_those_that_are_there_are_told(written: str, tmp_path: Path) -> None:
    """For example, a model is saved within DDP, and evaluated without DDP."""
    place, state = tmp_path / "at", {"model": {"module": {"weight": torch.ones(3)}}, "other": 1}
    with Engine() as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if written == "ours":
            engine.save(place, state).result(60)
        else:
            state_dict_saver.save(state, checkpoint_id=place)
    with pytest.raises(MismatchError, match=r"has no 'model\.weight'.* has 'model\.module\.weight', which were not"):
        reader.load({"model": {"weight": torch.zeros(3)}}, str(place))


class _Grown(torch.nn.Module):
    """A model with one stored layer and one new layer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)


@pytest.fixture(params=["ours", "stock"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Save a model with a layer that the loading model does not have."""
    model = torch.nn.Module()
    model.kept, model.old = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    state = {"model": model, "optimizer": {"lr": 0.1}, "step": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (asyncckpt.save if request.param == "ours" else state_dict_saver.save)(state, checkpoint_id=tmp_path / "at")
    return tmp_path / "at"


def test_a_load_that_is_not_strict_leaves_what_is_missing_as_it_is(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _Grown()
    before = model.head.weight.detach().clone()
    state = {"model": model, "more": {"a": [5]}, "step": 0}
    with pytest.raises(MismatchError, match=r"no 'model\.head\..*strict=False"):
        asyncckpt.load(state, checkpoint_id=trained)
    caplog.clear()
    found = asyncckpt.load(state, checkpoint_id=trained, strict=False)
    assert sorted(found.missing) == ["model.head.bias", "model.head.weight", "more.a"]
    assert found.unexpected == ("model.old.bias", "model.old.weight", "optimizer.lr")
    assert torch.equal(model.kept.weight, torch.full((3, 3), 7.0)) and torch.equal(model.head.weight, before)
    assert state["step"] == 1 and state["more"] == {"a": [5]} and "not loaded" not in caplog.text


def test_a_load_that_is_not_strict_still_wants_shapes_that_fit(trained: Path) -> None:
    with pytest.raises(MismatchError, match=r"'model\.kept\.weight' is"):
        asyncckpt.load({"model": {"kept": {"weight": torch.zeros(2, 3)}, "x": 1}}, checkpoint_id=trained, strict=False)


def test_all_that_is_not_asked_for_is_told(trained: Path) -> None:
    """A strict load reports unexpected names too, if no name is missing."""
    found = asyncckpt.load({"optimizer": {"lr": 0.0}}, checkpoint_id=trained)
    names = [f"model.{layer}.{each}" for layer in ("kept", "old") for each in ("bias", "weight")]
    assert found.missing == () and found.unexpected == (*names, "step")


def test_of_a_name_at_the_top_that_is_missing_the_others_are_told(trained: Path) -> None:
    with pytest.raises(MismatchError, match=r"no 'optim\.lr'.* has 'model', 'optimizer', which were not asked for"):
        asyncckpt.load({"optim": {"lr": 0.0}, "step": 0}, checkpoint_id=trained)


def test_a_planner_decides_what_may_be_missing(trained: Path) -> None:
    with pytest.raises(ValueError, match="allow_partial_load"):
        asyncckpt.load({"step": 0}, checkpoint_id=trained, planner=DefaultLoadPlanner(), strict=False)


def test_a_checkpointer_tells_what_was_missing(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3), "mine": PerRank(1)}).result(60)
        state: dict[str, Any] = {"a": torch.zeros(3), "b": torch.zeros(2), "mine": PerRank(0)}
        assert checkpointer.load(state, strict=False) == 1
        assert _names(checkpointer) == [("b",), ()]
        assert torch.equal(state["a"], torch.ones(3)) and state["mine"].value == 1
        checkpointer.load({"mine": PerRank(0)})
        assert _names(checkpointer) == [(), ("a",)]


def _names(checkpointer: Checkpointer) -> list[tuple[str, ...]]:
    assert checkpointer.loaded is not None
    return [checkpointer.loaded.missing, checkpointer.loaded.unexpected]


@pytest.mark.parametrize("written", ["ours", "stock"])
def test_a_value_that_fails_to_unpickle_is_named(written: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(globals(), "Gone")
    with pytest.raises(CheckpointError, match="'gone'.*AttributeError"):
        reader.load({"gone": None}, str(folder / written), weights_only=False)


class _Broken(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise ValueError("of the planner")


def test_what_a_planner_raises_is_an_exception_of_ours(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ValueError: of the planner.*ours") as raised:
        reader.load({"step": 0}, str(folder / "ours"), planner=_Broken())
    assert isinstance(raised.value.__cause__, CheckpointException)
    with pytest.raises(MismatchError, match="'w' cannot be filled"):
        reader.load({"w": UNFIT["expanded"]()}, str(folder / "ours"), planner=DefaultLoadPlanner())


def test_ctrl_c_is_still_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise CheckpointException("read", {0: _wrap_exception(KeyboardInterrupt())})

    monkeypatch.setattr(reader, "load_by_dcp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.load({"step": 0}, str(folder / "stock"))


NUMBERS = {
    name: torch.arange(6).to(getattr(torch, name))
    for name in ("float32", "float64", "bfloat16", "complex64", "int32", "int64", "uint8", "bool")
}
LOSSY = [
    *(("float32", "int64"), ("bfloat16", "bool"), ("complex64", "float32"), ("complex64", "int32")),
    *(("int64", "int32"), ("int32", "uint8"), ("uint8", "int8"), ("int32", "bool")),
]
FINE = [
    *(("float32", "bfloat16"), ("float64", "float16"), ("float32", "complex64"), ("int64", "float32")),
    *(("int32", "int64"), ("uint8", "int16"), ("bool", "uint8")),
]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    with Engine() as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save(folder / "ours", NUMBERS).result(60)
        state_dict_saver.save(dict(NUMBERS), checkpoint_id=folder / "stock")
    return folder


@pytest.mark.parametrize("written", ["ours", "stock"])
def test_conversions_that_lose_are_refused(written: str, numbers: Path) -> None:
    for stored, wanted in LOSSY:
        into = torch.zeros(6, dtype=getattr(torch, wanted))
        for load in (reader.load, lambda state, path: load_as_dcp(state, checkpoint_id=path)):
            with pytest.raises(MismatchError, match=f"'{stored}' is torch.{wanted} and torch.{stored} is stored"):
                load({stored: into}, str(numbers / written))
        if written == "ours":
            with pytest.raises(MismatchError, match=f"'{stored}' is torch.{wanted}"):
                reader.load({stored: into}, str(numbers / written), planner=DefaultLoadPlanner())
        assert not into.any()


@pytest.mark.parametrize("written", ["ours", "stock"])
def test_other_conversions_are_made_and_counted(written: str, numbers: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncckpt")
    for stored, wanted in FINE:
        into = {stored: torch.zeros(6, dtype=getattr(torch, wanted))}
        reader.load(into, str(numbers / written))
        assert torch.equal(into[stored], NUMBERS[stored].to(into[stored].dtype))
    lines = [record.getMessage() for record in caplog.records if "converted" in record.getMessage()]
    assert len(lines) == len(FINE) and all(line.startswith("1 tensors") for line in lines)
    caplog.clear()
    reader.load({"int32": torch.zeros(6, dtype=torch.int32)}, str(numbers / written))
    assert "converted" not in caplog.text


WIDE = {
    "f64": torch.tensor([1.0, 1e39, -1e300, float("inf"), float("nan")], dtype=torch.float64),
    "f32": torch.tensor([[1e6, -7e4, 65519.0], [65520.0, float("inf"), float("nan")]]),
    "small": torch.tensor([464.0, -450.0, -3.0, 0.0, 2.0]),
    "c64": torch.tensor([1e6 + 1j, 1 - 1e6j, 1 + 1j]),
    "i64": torch.tensor([1 << 40, 7]),
}
OUT_OF_RANGE = [
    *(("f64", "float32", 2), ("f64", "complex64", 2), ("f32", "float16", 3), ("f32", "bfloat16", 0)),
    *(("f32", "float64", 0), ("f32", "float8_e5m2", 4), ("small", "float8_e4m3fn", 1), ("small", "float8_e8m0fnu", 2)),
    *(("c64", "complex32", 2), ("i64", "float16", 1), ("i64", "float32", 0)),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("written", ["ours", "stock"])
def test_values_out_of_range_are_counted(
    written: str, planned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither infinity that stays infinity nor a number that is rounded to the largest value is counted."""
    path = tmp_path / "at"
    with Engine() as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if written == "ours":
            engine.save(path, WIDE).result(60)
        else:
            state_dict_saver.save(dict(WIDE), checkpoint_id=path)
    for name, wanted, count in OUT_OF_RANGE:
        if not hasattr(torch, wanted):  # before torch 2.7
            continue
        caplog.clear()
        into = {name: torch.zeros(WIDE[name].shape, dtype=getattr(torch, wanted))}
        reader.load(into, str(path), planner=DefaultLoadPlanner() if planned else None)
        expected = torch.zeros_like(into[name]).copy_(WIDE[name])
        assert same(into[name], expected), wanted
        said = [record.getMessage() for record in caplog.records if "out of the range" in record.getMessage()]
        assert len(said) == bool(count), wanted
        assert all(f"{count} values of {path}" in each and f"'{name}' ({count})" in each for each in said)


@pytest.mark.usefixtures("forkserver")
def test_what_is_loaded_from_memory_is_no_different(root: Path) -> None:
    code = "import os, sys, torch; from asyncckpt import Checkpointer, Config; c = Checkpointer(sys.argv[1], Config("
    code += "linger=60)); c.save(1, {'w': torch.ones(3)}).result(60); os._exit(1)"
    assert script(code, str(root)) == 1
    into = torch.zeros(3, dtype=torch.int64)
    with Checkpointer(root) as checkpointer:
        with pytest.raises(MismatchError, match=r"'w' is torch.int64 and torch.float32 is stored"):
            checkpointer.load({"w": into})
        checkpointer.load({"w": torch.zeros(3)})
        assert checkpointer.loaded is not None and checkpointer.loaded.source == "memory"
    assert not into.any()
