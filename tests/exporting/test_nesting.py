"""How values are nested in what is exported: keys that are no text, empty containers, renamed values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import same

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import UnsavableStateError
from asyncckpt.exporting.export import export


def exported(state: Any, folder: Path, **options: Any) -> Any:
    """From one file of torch to another."""
    torch.save(state, folder / "in.pt")
    export(folder / "in.pt", folder / "out.pt", to="torch", **options)
    return torch.load(folder / "out.pt", weights_only=not options)


def optimizer_state() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def test_the_state_of_an_optimizer(tmp_path: Path) -> None:
    state = optimizer_state()
    assert same(exported(state, tmp_path), state) and list(state["state"]) == [0, 1]
    again = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    again.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert again.state_dict()["state"][0]["exp_avg"].equal(state["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    "state",
    [
        {"m": {7: torch.ones(2)}},
        {"m": {0: torch.ones(2), "x": torch.zeros(3), -1: torch.ones(1)}},
        {0: torch.ones(2), "rest": [torch.ones(1), {"deep": [torch.zeros(2), 3]}]},
        {"o": {"state": {}, "param_groups": [{}, {"lr": torch.tensor(1.0)}], "none": []}},
        {"": torch.ones(2), "b": torch.ones(2) * 5},
    ],
)
def test_what_was_nested_is_nested_so(tmp_path: Path, state: dict[Any, Any]) -> None:
    assert same(exported(state, tmp_path), state)


def test_a_list_of_a_number_and_a_dict(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state := {"a": [1, {"x": torch.ones(2)}]}).result(60)
    export(tmp_path / "run" / "step-00000001", tmp_path / "out.pt", to="torch")
    assert same(torch.load(tmp_path / "out.pt"), state)


def test_a_checkpoint_has_text_for_keys(tmp_path: Path) -> None:
    state = {"m": {7: torch.arange(3.0), (1, 2): torch.ones(2)}, "l": [torch.ones(1)]}
    torch.save(state, tmp_path / "in.pt")
    export(tmp_path / "in.pt", tmp_path / "root/step-00000001", to="dcp")
    into: dict[str, Any] = {"m": {"7": torch.zeros(3), "(1, 2)": torch.zeros(2)}, "l": [torch.zeros(1)]}
    with Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.load(into) == 1 and into["m"]["7"].equal(torch.arange(3.0))
    export(tmp_path / "root", tmp_path / "out.pt", to="torch")
    into["m"]["(1, 2)"] = torch.ones(2)
    assert same(torch.load(tmp_path / "out.pt"), into)


def test_a_part_of_a_list(tmp_path: Path) -> None:
    state = {"layers": [torch.ones(1), torch.zeros(2)]}
    assert same(exported(state, tmp_path, only="layers"), {"0": torch.ones(1), "1": torch.zeros(2)})


def test_a_name_before_all_names(tmp_path: Path) -> None:
    state = {"groups": [{"lr": torch.ones(1)}], "w": torch.zeros(2), "n": {"q": torch.ones(3)}}
    assert same(exported(state, tmp_path, rename="^=model."), {"model": state})


def test_what_cannot_be_nested_is_refused(tmp_path: Path) -> None:
    state = {"layers": [torch.ones(1), torch.zeros(2)]}
    with pytest.raises(UnsavableStateError, match="in a list and in a dict"):
        exported(state, tmp_path, rename=r"layers\.1=layers.b")
    names = {"m.w": "x", "m.y": "x.y"}
    with pytest.raises(UnsavableStateError, match="would be a value"):
        exported({"m": {"w": torch.ones(1), "y": torch.zeros(2)}}, tmp_path, rename=names)
    assert export(tmp_path / "in.pt", tmp_path / "out", rename=names).tensors == 2  # safetensors nests nothing
    with pytest.raises(ValueError, match="no text"):
        exported(state, tmp_path, rename=lambda name: None)
    inner: dict[str, Any] = {"w": torch.ones(1)}
    inner["self"] = inner
    with pytest.raises(UnsavableStateError, match="within itself"):
        exported(inner, tmp_path)
