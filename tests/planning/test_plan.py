"""Test how a state is planned, and when it is planned again."""

from __future__ import annotations

import enum
import threading
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import same, small_state, zeros_like
from torch.distributed.checkpoint import state_dict_loader

from asyncckpt import Checkpointer
from asyncckpt.errors import UnsavableStateError
from asyncckpt.extension import load
from asyncckpt.planning import dcp_plan
from asyncckpt.planning.draft import make_plans
from asyncckpt.planning.structure import stateful_types


@pytest.fixture
def checkpointer(root: Path) -> Iterator[Checkpointer]:
    with Checkpointer(root) as checkpointer:
        yield checkpointer


def test_a_changed_structure_is_planned_anew(
    root: Path, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []

    def counting(*args: Any) -> None:
        planned.append(1)
        make_plans(*args)

    monkeypatch.setattr("asyncckpt.planning.plan.make_plans", counting)
    base: dict[str, Any] = {"a": torch.ones(4, 6), "b": {"c": torch.zeros(3), "n": 1}, "list": [1, 2]}
    changes: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"a": torch.randn(4, 6)}, False),
        ({"list": [1, 3]}, False),
        ({"b": {"c": torch.ones(3), "n": "text"}}, False),
        ({"a": torch.ones(6, 4)}, True),
        ({"a": torch.ones(24)}, True),
        ({"a": torch.ones(4, 6, dtype=torch.float64)}, True),
        ({"a": torch.ones(4, 6).to_sparse()}, True),
        ({"a": 5}, True),
        ({"list": [1, torch.ones(2)]}, True),
        ({"list": "x" * 5000}, True),
        ({"b": {"c": torch.zeros(3), "n": 1, "more": 2}}, True),
        ({"extra": torch.zeros(0, 3)}, True),
        ({"extra": torch.zeros(0, 4)}, True),
    ]
    for step, (change, anew) in enumerate(changes):
        state = {**base, **change}
        planned.clear()
        checkpointer.save(step, state).result(60)
        assert bool(planned) == anew, change
        into = zeros_like(state)
        load(into, str(root / f"step-{step:08d}"))  # the checkpointer would use the loaded plan
        assert same(into, state), change


def test_a_nested_state_is_saved_under_its_names(root: Path, checkpointer: Checkpointer) -> None:
    """Values may move between containers of equal depth."""
    x, y, z = (torch.full((3,), float(number)) for number in range(3))
    ordered = OrderedDict(x=x, y=y)
    moved = OrderedDict(ordered)
    moved.move_to_end("x")
    states: list[dict[str, Any]] = [
        {"a": {"x": x, "deep": {"y": y, "n": 1}}, "b": z, "c": [x, {"z": z}], "d": {}},
        {"a": {"x": x, "deep": {"y": y, "n": 2}}, "b": z, "c": [z, {"z": x}], "d": {}},
        {"a": {"x": x}, "b": {"y": y, "z": z}},
        {"a": {"x": x, "y": y}, "b": {"z": z}},
        {"a": {"x": x, "z": z}, "b": {"y": y}},
        {"a": {"y": y}, "b": {"x": x, "z": z}},
        {"a": [x, y], "b": [z]},
        {"a": [x], "b": [y, z]},
        {"a": {"0": x}, "b": [y, z]},
        {"a": ordered, "b": z},
        {"a": moved, "b": z},
        {"a": dict(moved), "b": z},
        {"a": {"x": x, "deep": OrderedDict(y=y)}, "b": z},
        {"a": {"x": x, "deep": {"y": y}}, "b": z},
    ]
    for step, state in enumerate([*states, *states[::-1]]):
        checkpointer.save(step, state).result(60)
        load(into := zeros_like(state), str(root / f"step-{step:08d}"))
        assert same(into, state), state


def test_a_list_that_is_changed_in_place_is_saved_as_it_is(root: Path, checkpointer: Checkpointer) -> None:
    names: list[Any] = ["a", 1, 0.0, (2, 0.0)]
    state = {"w": torch.ones(3), "names": names}
    changes: list[tuple[int, Any]] = [(0, "b"), (1, True), (2, -0.0), (3, (2, -0.0)), (3, [2]), (3, None), (3, (2,))]
    for step, (place, value) in enumerate([(0, "a"), *changes]):
        names[place] = value
        checkpointer.save(step, state).result(60)
        load(into := {"w": torch.zeros(3), "names": list[Any]()}, str(root / f"step-{step:08d}"))
        assert repr(into["names"]) == repr(names)


def test_structures_alternate(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{f"{name} weight": torch.randn(50)} for name in ("model", "average")]
    for step in range(2):
        checkpointer.save(step, states[step])
    monkeypatch.setattr("asyncckpt.planning.plan.make_plans", None)  # from here on a new plan would fail
    for step in range(2, 8):
        states[step % 2][next(iter(states[step % 2]))].fill_(step)
        checkpointer.save(step, states[step % 2])
    checkpointer.wait(60)
    for step in range(2, 8):
        into = zeros_like(states[step % 2])
        checkpointer.load(into, step)
        assert next(iter(into.values()))[0] == step


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.full((3,), float(self.count))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["tensor"][0] == state_dict["count"]
        self.count = state_dict["count"]


def test_stateful_values(checkpointer: Checkpointer) -> None:
    counter, model = Counter(), torch.nn.Linear(3, 2)
    for step in (1, 2):
        counter.count = step * 10
        checkpointer.save(step, {"counter": counter, "model": model})
    checkpointer.wait(60)
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    counter.count = 0
    checkpointer.load({"counter": counter, "model": model})
    assert counter.count == 20 and torch.equal(model.weight, weight)


def _nested(value: float) -> tuple[dict[str, Any], list[Any]]:
    """Return a state with ``Stateful`` values in it, and these values."""
    first, second = (torch.nn.Linear(3, 2) for _ in range(2))
    optimizer, counter = torch.optim.SGD(first.parameters(), momentum=0.9), Counter()
    with torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.fill_(value)
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counter.count = int(value)
    state = {
        "train": UserDict(model=first, optimizers=[optimizer], step=value, kind=torch.nn.Linear),
        "models": [second, 5 * value, [{"counter": counter}]],
        "plain": {0: torch.full((3,), value)},
    }
    return state, [first, optimizer, second, counter]


def test_stateful_values_at_any_depth(checkpointer: Checkpointer, root: Path) -> None:
    for step in (1, 2):
        state, saved = _nested(float(step))
        checkpointer.save(step, state)
    checkpointer.wait(60)
    into, values = _nested(7.0)
    train, models = into["train"], into["models"]
    into["train"]["kind"] = None
    checkpointer.load(into, weights_only=False)
    for one, other in zip(values, saved, strict=True):
        assert same(dict(one.state_dict()), dict(other.state_dict()))
    assert into["train"] is train and train["model"] is values[0] and train["optimizers"] == [values[1]]
    assert into["models"] is models and models == [values[2], 10.0, [{"counter": values[3]}]]
    assert train["step"] == 2.0 and train["kind"] is torch.nn.Linear and into["plain"][0][0] == 2.0
    stock: dict[str, Any] = {
        "train": {"model": torch.nn.Linear(3, 2).state_dict()},
        "models": [torch.nn.Linear(3, 2).state_dict()],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(stock, checkpoint_id=root / "step-00000002")
    assert same(dict(stock["train"]["model"]), dict(saved[0].state_dict()))
    assert same(dict(stock["models"][0]), dict(saved[2].state_dict()))


@pytest.mark.parametrize("place", ["leaf", "in a list", "in a list of lists"])
def test_a_value_that_becomes_stateful(checkpointer: Checkpointer, place: str) -> None:
    """The rest of the state is as planned. The value's own state is stored, also by the next save."""
    counter = Counter()
    before, after = {"leaf": (3, counter), "in a list": ([1], [counter]), "in a list of lists": ([[1]], [[counter]])}[
        place
    ]
    for step, value in enumerate((before, after, before, after, after)):
        counter.count = step
        checkpointer.save(step, {"some": [1], "w": torch.zeros(3), "value": value}).result(60)
    into: dict[str, Any] = {"value": after}
    counter.count = -1
    checkpointer.load(into)
    assert counter.count == 4


def test_a_plain_state_is_not_searched(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The types of a planned state show that it has no ``Stateful`` values."""
    state = {**small_state(), "lists": [[1, 2], ["a"]]}
    checkpointer.save(1, state).result(60)

    def search(state: object) -> object:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(dcp_plan, "stateful_to_dict", search)
        checkpointer.save(2, state).result(60)
        with pytest.raises(AssertionError):
            checkpointer.save(3, {**state, "lists": [[1, 2], [Counter()]]})
    with monkeypatch.context() as patch:
        patch.setattr(dcp_plan, "stateful_to_dict", search)
        checkpointer.save(4, state).result(60)


def test_a_state_dict_within_itself_is_no_endless_one() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(RecursionError):
        stateful_types(state)


def test_a_state_that_cannot_be_saved(checkpointer: Checkpointer) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"a": torch.ones(2), "hook": lambda: None}, "'hook'.*cannot be pickled"),
        ({"lock": threading.Lock()}, "'lock'.*cannot be pickled"),
        ({"meta": torch.ones(2, device="meta")}, "'meta' is on the meta device"),
        ({"a": {"b": 1}, "a.b": 2}, "a.b"),
    ]
    for state, text in bad:
        with pytest.raises(UnsavableStateError, match=text):
            checkpointer.save(1, state)
    state = {"a": torch.ones(2), "value": 1}
    checkpointer.save(1, state).result(60)
    with pytest.raises(UnsavableStateError, match="'value'"):
        checkpointer.save(2, {**state, "value": threading.Lock()})
    checkpointer.save(999, small_state()).result(60)
    assert checkpointer.steps() == [1, 999]


class _Name(str, enum.Enum):
    A = "a"


@pytest.mark.parametrize("keys", [(1, True), (1, 1.0), (_Name.A, "a")], ids=str)
def test_keys_that_are_equal_and_have_other_names(checkpointer: Checkpointer, keys: tuple[Any, Any]) -> None:
    for step, key in enumerate(keys):
        checkpointer.save(step, {"s": {key: torch.full((2,), float(step))}}).result(60)
    into = {"s": {keys[1]: torch.zeros(2)}}
    checkpointer.load(into, step=1)
    assert into["s"][keys[1]].tolist() == [1.0, 1.0]
