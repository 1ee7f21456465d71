"""A load gives a state to an optimizer that has made no step, if the checkpoint has one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from asyncckpt import Checkpointer, Config, load
from asyncckpt.errors import MismatchError

_KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.3, "lr": torch.tensor(0.1)},
    "Adagrad": {},
    "Adafactor": {},
    "LBFGS": {},
    "SparseAdam": {},
}


class _Model(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 4, sparse=sparse)
        self.rest = torch.nn.ModuleDict() if sparse else torch.nn.ModuleDict({"used": torch.nn.Linear(4, 2)})
        self.rest["unused"] = torch.nn.Embedding(2, 2)  # it gets no gradient, so torch makes no state for it

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(numbers)
        return self.rest["used"](rows) if "used" in self.rest else rows


def _training(kind: str, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Model(kind == "SparseAdam")
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), **{"lr": 0.1} | _KINDS[kind])

    def backward() -> float:
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 2, 4])).square().sum()
        loss.backward()
        return float(loss.item())

    for _ in range(steps):
        backward()
        optimizer.step(backward)
    return model, optimizer


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", _KINDS)
def test_moments_are_loaded(kind: str, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _training(kind, steps)
    with Checkpointer(tmp_path / "ours", Config(linger=0)) as checkpointer:
        checkpointer.save(1, {"model": model, "all": [{"optimizer": optimizer}]}).result(60)
    new_model, new = _training(kind, 0)
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path / "ours") as checkpointer:
        checkpointer.load({"model": new_model, "all": [{"optimizer": new}]})
    assert _same(new.state_dict(), optimizer.state_dict()) and _same(new_model.state_dict(), model.state_dict())
    assert bool(new.state_dict()["state"]) == bool(steps or kind == "Adagrad") and not caplog.records


def test_gradients_and_hooks_do_not_matter(tmp_path: Path) -> None:
    model, optimizer = _training("Adam", 3)
    with Checkpointer(tmp_path, Config(linger=0)) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer}).result(60)
        new_model, new = _training("Adam", 0)
        new_model(torch.tensor([0])).sum().backward()
        gradients = [parameter.grad for parameter in new_model.parameters()]
        new.register_step_pre_hook(lambda *_: pytest.fail("the load made a step"))
        checkpointer.load({"optimizer": new})
    assert _same(new.state_dict(), optimizer.state_dict()) and optimizer.state_dict()["state"]
    assert all(one is other for one, other in zip(gradients, (p.grad for p in new_model.parameters()), strict=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_moments_of_stock_dcp_are_loaded(tmp_path: Path) -> None:
    model, optimizer = _training("Adam", 2)
    state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "stock", no_dist=True)
    new_model, new = _training("Adam", 0)
    load({"model": new_model, "optimizer": new}, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert _same(new.state_dict(), optimizer.state_dict())


class _Unusual(torch.optim.Optimizer):
    """An optimizer with states of a form that a checkpoint does not tell."""

    def __init__(self, parameters: Any, form: str) -> None:
        super().__init__(parameters, {})
        self._form = form

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if self._form == "numbers":
                self.state[parameter] = {"step": 1, "pre": {0: torch.ones(2)}}
            else:
                self.state[parameter] = torch.ones(2)


@pytest.mark.parametrize("form", ["numbers", "tensor"])
def test_a_state_of_unknown_form_is_left_out_whole(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = _Unusual(model.parameters(), form)
    optimizer.step()
    with Checkpointer(tmp_path, Config(linger=0)) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).result(60)
        new = _Unusual(model.parameters(), form)
        with caplog.at_level(logging.WARNING):
            checkpointer.load({"model": model, "optimizer": new})
    assert not new.state and "were not asked for" in caplog.text


def test_a_failed_load_takes_the_state_back(tmp_path: Path) -> None:
    model, optimizer = _training("Adam", 0)
    with Checkpointer(tmp_path, Config(linger=0)) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer}).result(60)
        _, trained = _training("Adam", 2)
        folder = Path(checkpointer.save(2, {"optimizer": trained}).result(60))
    data = folder / "__0_0.distcp"
    data.write_bytes(bytes(len(data.read_bytes())))
    _, new = _training("Adam", 0)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(MismatchError, match="other"):
            checkpointer.load({"optimizer": new, "other": torch.ones(2)}, step=2)
        assert not new.state
        assert checkpointer.load({"optimizer": new}, fallback=True) == 1
    assert _same(new.state_dict(), optimizer.state_dict())
