"""Test ``asyncckpt diff``: values that were added, removed or changed, in checkpoints and in sets of files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Manifest, checksum
from support.file_sets import make
from support.shards import kinds_of_values
from support.shared_files import flip
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from asyncckpt import Checkpointer, cli, export
from asyncckpt.config import Config
from asyncckpt.extension import Engine
from asyncckpt.format.index import SPAN_BYTES, Index
from asyncckpt.loading.data_file import ChecksummedFile

DATA, INDEX = "__0_0.distcp", "__0_0.index.json"
Diff = Callable[..., dict[str, Any]]


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Diff:
    def run(a: Path, b: Path, *options: str, status: int | None = None) -> dict[str, Any]:
        found = cli.main(["diff", str(a), str(b), "--json", *options])
        out = capsys.readouterr().out
        facts: dict[str, Any]
        (facts,) = json.loads(out)
        assert found == (2 if "error" in facts else int(not facts["is_same"])) if status is None else status
        return facts

    return run


def _save(path: Path, state: dict[str, Any]) -> Path:
    with Engine() as engine:
        engine.save(path, state).result(60)
    return path


def _changes(facts: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: ", ".join(each["changes"]) for each in facts["differences"]}


def _before() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "same": torch.randn(300, 200, generator=generator),
        "empty": torch.zeros(0, 3),
        "moved": torch.randn(400_000, generator=generator),
        "changed": torch.zeros(50, 7),
        "shape": torch.zeros(10, 4),
        "dtype": torch.zeros(10, 4),
        "removed": torch.zeros(5),
        "lr": 0.1,
        "names": ["a", "b"],
    }


def _after() -> dict[str, Any]:
    """Return a changed state. The added tensor in front moves all later tensors in the file."""
    state = {"added": torch.zeros(12345), **_before()}
    del state["removed"]
    state["changed"][3, 4] = 1e-3
    state |= {"shape": torch.zeros(4, 10), "dtype": torch.zeros(10, 4, dtype=torch.bfloat16), "lr": 0.2}
    return state


CHANGES = {
    "added": "added",
    "changed": "value",
    "shape": "shape",
    "dtype": "dtype",
    "removed": "removed",
    "lr": "value",
}


def test_what_was_added_removed_or_changed(tmp_path: Path, diff: Diff) -> None:
    a, b = _save(tmp_path / "a", _before()), _save(tmp_path / "b", _after())
    facts = diff(a, b, "--values")
    assert _changes(facts) == CHANGES and facts["same"] == 4 and facts["a"] == str(a) and facts["b"] == str(b)
    sizes = [max(each[side]["bytes"] for side in "ab" if each[side]) for each in facts["differences"]]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3
    (shape,) = (each for each in facts["differences"] if each["name"] == "shape")
    assert shape["a"] == {"dtype": "float32", "shape": [10, 4], "bytes": 160} and shape["b"]["shape"] == [4, 10]
    assert diff(a, a)["same"] == 9 and diff(b, b)["is_same"]


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_what_others_stored_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stock checkpoints have no checksums, but their exports do."""
    state = {"w": torch.ones(3)}
    ours = _save(tmp_path / "a", state)
    dcp_save(state, checkpoint_id=str(tmp_path / "b"))
    assert cli.main(["diff", str(ours), str(tmp_path / "b")]) == 2
    assert "asyncckpt export" in capsys.readouterr().err
    export(tmp_path / "b", tmp_path / "c", to="dcp")
    assert cli.main(["diff", str(ours), str(tmp_path / "c")]) == 0


def test_all_kinds_of_values(tmp_path: Path, diff: Diff) -> None:
    """Tied tensors are compared too."""
    state = kinds_of_values()
    one = _save(tmp_path / "a", state)
    assert diff(one, one)["is_same"]
    model = {
        name: value + value if value.dtype != torch.bool else ~value
        for name, value in state["model"].items()
        if name != "fp8"
    }
    changed = _save(tmp_path / "d", {**state, "model": {**state["model"], **model, "tied": model["weight"]}, "step": 8})
    facts = diff(one, changed, "--values")
    assert {*_changes(facts)} == {f"model.{name}" for name, value in model.items() if value.numel()} | {"step"}
    values = {each["name"]: each["values"] for each in facts["differences"]}
    assert values["model.integers"] == {"elements": 99, "max_abs": 99}
    assert values["model.tied"] == values["model.weight"] and values["step"] is None


def test_without_values_no_bytes_are_read(root: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root, Config(link_unchanged=False)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _before()).result(60)
    monkeypatch.setattr(ChecksummedFile, "read", None)
    assert diff(root / "step-00000001", root / "step-00000002")["is_same"]


def test_values_decide_what_indexes_do_not(tmp_path: Path, diff: Diff, capsys: pytest.CaptureFixture[str]) -> None:
    """An added tensor changes the padding in front of each later tensor of a page or more."""
    tensors = {f"t{number}": torch.randn(number * 40_001 + 1) for number in range(12)}
    a = _save(tmp_path / "a", tensors)
    b = _save(tmp_path / "b", {"first": torch.zeros(777), **tensors})
    facts = diff(a, b)
    others = [name for name, change in _changes(facts).items() if change == "stored otherwise"]
    assert 0 < len(others) == facts["undecided"] == len(facts["differences"]) - 1
    assert cli.main(["diff", str(a), str(b)]) == 1 and "--values reads" in capsys.readouterr().out
    facts = diff(a, b, "--values")
    assert _changes(facts) == {"first": "added"} and facts["same"] == 12 and not facts["undecided"]
    assert _changes(diff(b, a, "--values")) == {"first": "removed"}


@pytest.mark.parametrize("at", [0, SPAN_BYTES // 4, 3 * SPAN_BYTES // 4 - 1])
def test_each_span_counts(tmp_path: Path, diff: Diff, at: int) -> None:
    large = torch.zeros(3 * SPAN_BYTES // 4)
    a = _save(tmp_path / "a", {"large": large, "b": torch.zeros(3)})
    large[at] = 1
    b = _save(tmp_path / "b", {"large": large, "b": torch.zeros(3)})
    assert _changes(diff(a, b)) == {"large": "value"}


def test_a_header_is_no_value(tmp_path: Path, diff: Diff) -> None:
    """The bytes around the tensors differ, with matching checksums. The elements show that the tensors are equal."""
    state = {"w": torch.randn(3 * SPAN_BYTES // 4), "small": torch.randn(10), "lr": 0.5}
    a, b = _save(tmp_path / "a", state), _save(tmp_path / "b", state)
    its = {item.name: item for item in Index.parse((b / INDEX).read_bytes(), INDEX).items}
    for at in (its["w"].at + 2, its["w"].payload_at + its["w"].payload_bytes, its["small"].at + 5):
        flip(b / DATA, at)
    _sign(b)
    assert _changes(diff(a, b)) == {"w": "value", "small": "value"}
    assert diff(a, b, "--values")["is_same"]
    flip(b / DATA, its["small"].payload_at)
    _sign(b)
    assert _changes(diff(a, b, "--values")) == {"small": "value"}


def _sign(folder: Path) -> None:
    """Write checksums that match the bytes in the data file."""
    index = Index.parse((folder / INDEX).read_bytes(), INDEX)
    data = (folder / DATA).read_bytes()
    sums = array("Q", [checksum(data[begin:end]) for begin, end in pairwise(index.bounds)])
    text = Index.head(index.data, index.items, index.asked) + Index.tail(index.nbytes, sums)
    (folder / INDEX).write_bytes(text)
    manifest = Manifest.parse((folder / "asyncckpt.json").read_bytes(), "")
    files = {**manifest.files, INDEX: {"bytes": len(text), "xxh3": f"{checksum(text):016x}"}}
    (folder / "asyncckpt.json").write_bytes(replace(manifest, files=files).encode())


def test_objects_are_compared_without_the_space_to_grow(tmp_path: Path, diff: Diff) -> None:
    large, small = ({"held": (torch.arange(count), 1), "text": "a" * count} for count in (10_000, 100))
    with Engine() as engine:
        for name, state in (("large", large), ("in large", small)):  # with more reserved space
            engine.save(tmp_path / name, state).result(60)
    _save(tmp_path / "small", small)
    assert {*_changes(diff(tmp_path / "in large", tmp_path / "small")).values()} == {"stored otherwise"}
    assert diff(tmp_path / "in large", tmp_path / "small", "--values")["is_same"]
    facts = diff(tmp_path / "small", tmp_path / "large", "--values")
    assert _changes(facts) == {"held": "value", "text": "value"}


def test_sets_of_files(tmp_path: Path, diff: Diff) -> None:
    """A set is compared by its tensors, the records of its archives, and its small files."""
    with Engine() as engine:
        for name, seed in (("a", 3), ("b", 3), ("c", 4)):
            engine.save(tmp_path / name, make(seed)).result(60)
    facts = diff(tmp_path / "a", tmp_path / "b")
    assert facts["is_same"] and facts["same"] > 20
    changes = _changes(diff(tmp_path / "a", tmp_path / "c", "--values"))
    assert {"trainer_state.json", "optimizer.pt/data/1", "model.safetensors/layer.10", "dcp/model_0/model.w"} <= {
        *changes
    }
    assert "tokenizer/deep/vocab.txt" not in changes and set(changes.values()) == {"value"}


def test_a_root_stands_for_its_newest(
    root: Path, tmp_path: Path, diff: Diff, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((3,), float(step))}).result(60)
    facts = diff(root, root / "step-00000001")
    assert facts["a"] == str(root / "step-00000002") and _changes(facts) == {"w": "value"}
    assert cli.main(["diff", str(root), str(root)]) == 0
    out = capsys.readouterr().out
    assert f"{root}: 2 checkpoints; {root / 'step-00000002'} is the newest" in out and "no difference in 1 value" in out
    # The newest checkpoint is unknown if one of them cannot be read.
    (root / "step-00000001/asyncckpt.json").write_text("{")
    assert cli.main(["diff", str(root), str(root)]) == 2


def test_how_values_differ(tmp_path: Path, diff: Diff) -> None:
    odd = torch.tensor([1.0, 2.0, math.nan, math.inf, -math.inf, 5.0])
    state: dict[str, Any] = {
        "f": torch.zeros(1000),
        "odd": odd,
        "gone": torch.tensor([math.nan, math.nan]),
        "i": torch.tensor([1, -5, 1 << 40]),
        "b": torch.tensor([True, False, True, True]),
        "c": torch.tensor([3 + 4j, 0]),
        "h": torch.ones(10, dtype=torch.bfloat16),
        "q": torch.ones(10).to(torch.float8_e4m3fn),
        "same": torch.ones(3),
        "z": torch.tensor(2.5),
        "lr": 0.1,
    }
    a = _save(tmp_path / "a", state)
    state = {name: value.clone() if isinstance(value, torch.Tensor) else 0.2 for name, value in state.items()}
    state["f"][10], state["f"][20] = -3, 1
    state["odd"][:4] = torch.tensor([math.nan, 2.5, 3.0, math.inf])
    state["gone"][0] = 1.0
    state["i"][2] += 7
    state["b"][0] = False
    state["c"] = torch.tensor([0j, 0])
    state["h"] = torch.full((10,), 1.5, dtype=torch.bfloat16)
    state["q"] = torch.full((10,), 2.0).to(torch.float8_e4m3fn)
    state["z"] += 1
    b = _save(tmp_path / "b", state)
    found = {each["name"]: each["values"] for each in diff(a, b, "--values")["differences"]}

    assert found == {
        "f": {"elements": 2, "max_abs": 3},
        "odd": {"elements": 3, "max_abs": 0.5},
        "gone": {"elements": 1, "max_abs": None},
        "i": {"elements": 1, "max_abs": 7},
        "b": {"elements": 1, "max_abs": 1},
        "c": {"elements": 1, "max_abs": 5},
        "h": {"elements": 10, "max_abs": 0.5},
        "q": {"elements": 10, "max_abs": 1},
        "z": {"elements": 1, "max_abs": 1},
        "lr": None,
    }


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = _after()
    state["changed"][0, 0] = math.nan
    argv = ["diff", str(_save(tmp_path / "a", _before())), str(_save(tmp_path / "b", state))]
    assert cli.main(argv) == 1
    headers, _, *rows = capsys.readouterr().out.splitlines()
    assert headers.split() == ["name", "change", "in", "A", "in", "B", "size"]
    assert ["added", "added", "float32", "12345", "48.2", "KiB"] in [row.split() for row in rows]
    assert cli.main([*argv, "--values"]) == 1
    headers, _, *rows = capsys.readouterr().out.splitlines()
    assert headers.split()[-5:] == ["elements", "that", "differ", "largest", "difference"] and len(rows) == 8
    assert rows[-1].startswith("6 differences; the same: 4 values, 1.8 MiB")
    assert " ".join(rows[1].split()) == "changed value float32 50x7 float32 50x7 1.4 KiB 2 0.001"


@pytest.mark.parametrize("way", ["data", "index", "manifest", "missing", "value"])
def test_trouble_is_no_difference(tmp_path: Path, diff: Diff, capsys: pytest.CaptureFixture[str], way: str) -> None:
    """A script must be able to tell a difference from a comparison that failed."""
    a, b = _save(tmp_path / "a", {"w": torch.zeros(1000)}), _save(tmp_path / "b", {"w": torch.ones(1000)})
    if way == "missing":
        b = tmp_path / "none"
    elif way == "data":
        os.truncate(b / DATA, 100)
    elif way == "value":
        flip(b / DATA, 2000)
    else:
        flip(b / {"index": INDEX, "manifest": "asyncckpt.json"}[way], 50)
    assert cli.main(["diff", str(a), str(b), *(["--values"] if way in ("data", "value") else [])]) == 2
    assert str(b) in capsys.readouterr().err


def test_torch_is_not_loaded_for_indexes(tmp_path: Path) -> None:
    a, b = _save(tmp_path / "a", _before()), _save(tmp_path / "b", {**_before(), "changed": torch.ones(50, 7)})
    argv = ["diff", str(a), str(b)]
    code = f"import sys; from asyncckpt.cli import main; assert main({argv}) == 1; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "changed" in done.stdout and " torch " not in done.stdout.splitlines()[-1]
