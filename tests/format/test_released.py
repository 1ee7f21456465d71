"""Test that this version reads the checkpoints of each released version, and names a newer version's format."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from released.make import RANKS, sharded, state
from safetensors.torch import load_file
from support.states import same, stock_load, zeros_like

from asyncckpt import Checkpointer, PerRank
from asyncckpt.cli import main
from asyncckpt.errors import FormatError

RELEASES = sorted(path for path in (Path(__file__).parent / "released").iterdir() if path.name[0].isdigit())
STEP = "step-00000001"

pytestmark = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)


@pytest.fixture
def folder(release: Path, tmp_path: Path) -> Path:
    """Return a copy of the files of a release."""
    return shutil.copytree(release, tmp_path / "released")


def _states() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return for each checkpoint a state to load into, and the state that was saved."""
    whole = {"w": sharded(), "lr": 0.5}
    top = {"step": 3, "seen": torch.arange(3)}
    return {name: (zeros_like(each), each) for name, each in (("state", state()), ("ranks", whole), ("set", top))}


def test_a_checkpointer_loads_it(folder: Path) -> None:
    for name, (into, saved) in _states().items():
        seeds = PerRank(None, missing=list) if name == "ranks" else None
        with Checkpointer(folder / name) as checkpointer:
            assert checkpointer.load(into if seeds is None else into | {"seed": seeds}) == 1
        if seeds is not None:
            assert seeds.value == [7, 8] and len(seeds.value) == RANKS
            into["lr"] = 0.5
        assert same(into, saved)


def test_stock_functions_load_it(folder: Path) -> None:
    for name, (into, saved) in _states().items():
        stock_load(into, folder / name / STEP)
        assert same(into, saved)
    assert same(torch.load(folder / "model.pt"), state())
    assert same(torch.load(folder / "set" / STEP / "optimizer.pt"), {"m": state()["m"]})
    model = load_file(folder / "set" / STEP / "model.safetensors")
    assert same({key: model[key] for key in state()["model"]}, state()["model"])


def test_it_is_good(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(folder / name / STEP) for name in _states()]
    assert main(["verify", "--json", *names]) == 0
    assert [each["ok"] for each in json.loads(capsys.readouterr().out)] == [True] * len(names)


def test_a_newer_format_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (into, _) in _states().items():
        manifest = folder / name / STEP / "asyncckpt.json"
        raised = re.sub(r'"format": \d+', '"format": 1000', manifest.read_text())
        manifest.write_text(re.sub(r'"version": "[^"]*"', '"version": "99.0"', raised))
        before = sorted(os.listdir(folder / name))
        wanted = pytest.raises(FormatError, match=r"in format 1000 by asyncckpt 99\.0")
        with Checkpointer(folder / name) as checkpointer, wanted as caught:
            checkpointer.load(into, fallback=True)
        assert "torch.distributed.checkpoint.load" in caught.value.message
        assert set(before) <= {*os.listdir(folder / name)}
        for command in ("verify", "ls", "inspect"):
            assert main([command, str(folder / name)]) == 2
            said = capsys.readouterr()
            assert "install asyncckpt 99.0" in said.err and "damaged" not in said.out + said.err
