"""Test ``asyncckpt diff`` of tensors that two checkpoints store in different parts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.ranks import QUICK, run
from support.shards import Cuts, ShardPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from asyncckpt import cli, export
from asyncckpt.extension import Engine
from asyncckpt.report import diff


def _diff(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    status = cli.main(["diff", *map(str, argv), "--json"])
    facts: dict[str, Any]
    (facts,) = json.loads(capsys.readouterr().out)
    assert status == int(not facts["is_same"])
    return facts


def _changes(facts: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: ", ".join(each["changes"]) for each in facts["differences"]}


def _save_shards(state: dict[str, Any], path: Path, cuts: Mapping[str, Cuts]) -> None:
    with Engine(alone=True) as engine:
        engine.save(path, state, planner=ShardPlanner(cuts)).result(60)


@st.composite
def _shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], Cuts, Cuts]:
    """Draw the shape of a tensor, and its cuts in each of two checkpoints."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    if draw(st.booleans()):
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(10, 60))

    def cut() -> Cuts:
        return tuple(tuple(draw(st.lists(st.integers(0, n), max_size=2))) for n in shape)

    return tuple(shape), cut(), cut()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_shapes(), min_size=1, max_size=4), st.data())
def test_any_shards_of_any_tensor(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    forms: list[tuple[tuple[int, ...], Cuts, Cuts]],
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(diff, "_CONVERTED", 7)
    tensors = {f"w{number}": torch.randn(shape, dtype=torch.float64) for number, (shape, *_) in enumerate(forms)}
    with tempfile.TemporaryDirectory() as folder:
        for side in (1, 2):
            cuts = {name: forms[number][1:][side - 1] for number, name in enumerate(tensors)}
            _save_shards(tensors, Path(folder) / str(side), cuts)
        facts = _diff(capsys, f"{folder}/1", f"{folder}/2")
        assert {*_changes(facts).values()} <= {"stored otherwise"}
        assert facts["same"] + facts["undecided"] == len(tensors)
        assert _diff(capsys, f"{folder}/1", f"{folder}/2", "--values")["same"] == len(tensors)
        filled = [name for name, tensor in tensors.items() if tensor.numel()]
        changed = data.draw(st.sets(st.sampled_from(filled))) if filled else set()
        other = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in changed:
            at = data.draw(st.integers(0, other[name].numel() - 1))
            other[name].view(-1)[at] += data.draw(st.sampled_from([1e-3, 4.0]))
        _save_shards(other, Path(folder) / "3", {name: forms[number][2] for number, name in enumerate(tensors)})
        found = _diff(capsys, f"{folder}/1", f"{folder}/3", "--values")["differences"]
        assert {each["name"] for each in found} == changed
        for each in found:
            differences = (tensors[each["name"]] - other[each["name"]]).abs()
            assert each["values"]["max_abs"] == pytest.approx(float(differences.max()))
            assert each["values"]["elements"] == int((differences != 0).sum())


def test_another_default_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.arange(60.0).view(6, 10)
    for name, value, cuts in (("a", whole, ((3,), (5,))), ("b", whole + 2, ((2,), (7,)))):
        _save_shards({"w": value, "same": whole}, tmp_path / name, {"w": cuts, "same": cuts})
    with torch.device("meta"):
        (found,) = _diff(capsys, tmp_path / "a", tmp_path / "b", "--values")["differences"]
        export(tmp_path / "a", tmp_path / "model")
    assert found["name"] == "w" and found["values"]["max_abs"] == 2.0
    assert torch.equal(load_file(tmp_path / "model/model.safetensors")["w"], whole)


def _save(root: str) -> None:
    """Save a tensor in rows, in columns, and in columns with another value."""
    mesh = init_device_mesh("cpu", (2,))
    for name, dim, value in (("rows", 0, 1.0), ("columns", 1, 1.0), ("others", 1, 3.0)):
        whole = torch.arange(600_000.0).view(600, 1000)
        whole[599, 999] = value
        state = {"w": distribute_tensor(whole, mesh, [Shard(dim)]), "same": torch.ones(1000)}
        with Engine(QUICK) as engine:
            engine.save(f"{root}/{name}", state).result(60)


@pytest.mark.usefixtures("forkserver")
def test_ranks_that_have_other_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(2, _save, str(tmp_path), folder=tmp_path)
    rows, columns, others = (tmp_path / each for each in ("rows", "columns", "others"))
    facts = _diff(capsys, rows, columns)
    assert _changes(facts) == {"w": "stored otherwise"} and facts["same"] == facts["undecided"] == 1
    assert _diff(capsys, columns, columns)["is_same"] and _diff(capsys, rows, columns, "--values")["is_same"]
    assert _changes(_diff(capsys, columns, others)) == {"w": "value"}
    for one in (rows, columns):
        (each,) = _diff(capsys, one, others, "--values")["differences"]
        assert each["name"] == "w" and each["values"]["max_abs"] == 2.0
        assert each["values"]["elements"] == 1
