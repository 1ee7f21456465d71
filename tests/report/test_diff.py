"""``asyncckpt diff``: what was added, removed or changed, of checkpoints of ours, of stock DCP, and of files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.file_sets import make
from support.shards import kinds_of_values
from support.shared_files import flip, share
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from asyncckpt import cli
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
from asyncckpt.loading.data_file import ChecksummedFile
from asyncckpt.report.indexed import IndexedCheckpoint
from asyncckpt.report.stored_item import doubtful
from asyncckpt.worker.index import SPAN_BYTES, Index
from asyncckpt.worker.manifest import Manifest, checksum

DATA = "__0_0.distcp"
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
    """Another shape in front moves what stands behind it in the file."""
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


def _dcp(path: Path, state: dict[str, Any]) -> Path:
    dcp_save(state, checkpoint_id=str(path))
    return path


def _torch_file(path: Path, state: dict[str, Any]) -> Path:
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "kinds", [(_save, _save), (_dcp, _dcp), (_torch_file, _torch_file)], ids=["ours", "dcp", "torch"]
)
def test_what_was_added_removed_or_changed(tmp_path: Path, diff: Diff, kinds: tuple[Any, Any]) -> None:
    a, b = kinds[0](tmp_path / "a", _before()), kinds[1](tmp_path / "b", _after())
    facts = diff(a, b)
    assert _changes(facts) == CHANGES and facts["same"] == 4 and facts["a"] == str(a) and facts["b"] == str(b)
    sizes = [max(each[side]["bytes"] for side in "ab" if each[side]) for each in facts["differences"]]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3
    (shape,) = (each for each in facts["differences"] if each["name"] == "shape")
    assert shape["a"] == {"dtype": "float32", "shape": [10, 4], "bytes": 160} and shape["b"]["shape"] == [4, 10]
    assert diff(a, a)["same"] == 9 and diff(b, b)["is_same"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_of_other_kinds_are_read(tmp_path: Path, diff: Diff) -> None:
    tensors = {name: value for name, value in _before().items() if isinstance(value, torch.Tensor)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "folder").mkdir()
    save_file(tensors, tmp_path / "folder/model.safetensors")
    ours, stock, file = (
        _save(tmp_path / "a", tensors),
        _dcp(tmp_path / "b", tensors),
        _torch_file(tmp_path / "c", tensors),
    )
    for other in (stock, file, tmp_path / "model.safetensors", tmp_path / "folder"):
        for pair in ((ours, other), (other, ours)):
            facts = diff(*pair)
            assert facts["is_same"] and facts["same"] == facts["read"] == 7
    changed = _save(tmp_path / "d", {**tensors, "moved": -tensors["moved"]})
    assert _changes(diff(stock, changed)) == {"moved": "value"} == _changes(diff(changed, file))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_kinds_of_values(tmp_path: Path, diff: Diff) -> None:
    """Also tied ones; and objects, which we pickle in another form than DCP and ``torch.save`` do."""
    state = kinds_of_values()
    made = [make_one(tmp_path / name, state) for make_one, name in ((_save, "a"), (_dcp, "b"), (_torch_file, "c"))]
    for one in made:
        for other in made:
            assert diff(one, other)["is_same"]
    model = {
        name: value + value if value.dtype != torch.bool else ~value
        for name, value in state["model"].items()
        if name != "fp8"
    }
    changed = _save(tmp_path / "d", {**state, "model": {**state["model"], **model, "tied": model["weight"]}, "step": 8})
    facts = [diff(one, changed, "--values") for one in made]
    expected = {f"model.{name}" for name, value in model.items() if value.numel()} | {"step"}
    assert [{*_changes(each)} for each in facts] == [expected] * 3
    values = [sorted((each["name"], each["values"] or {}) for each in found["differences"]) for found in facts]
    assert values[0] == values[1] == values[2] and dict(values[0])["model.integers"]["max_abs"] == 99
    assert dict(values[0])["model.tied"] == dict(values[0])["model.weight"]


def test_bytes_of_two_of_ours_are_not_read(root: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(root, Config(link_unchanged=False)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _before()).result(60)
    monkeypatch.setattr(IndexedCheckpoint, "read", None)
    monkeypatch.setattr(ChecksummedFile, "read", None)
    facts = diff(root / "step-00000001", root / "step-00000002")
    assert facts["is_same"] and facts["read"] == 0
    share(root / "step-00000002", root / "step-00000001")
    monkeypatch.setattr("asyncckpt.report.differences.doubtful", None)  # nor is the file looked at that is the same
    assert diff(root / "step-00000001", root / "step-00000002")["same"] == 9


def test_what_stands_elsewhere_in_the_file_is_the_same(tmp_path: Path, diff: Diff) -> None:
    """A tensor of a page or more stands behind another padding then."""
    tensors = {f"t{number}": torch.randn(number * 40_001 + 1) for number in range(12)}
    a = _save(tmp_path / "a", tensors)
    b = _save(tmp_path / "b", {"first": torch.zeros(777), **tensors})
    facts = diff(a, b)
    assert _changes(facts) == {"first": "added"} and facts["same"] == 12
    assert _changes(diff(b, a)) == {"first": "removed"}


@pytest.mark.parametrize("at", [0, 1, SPAN_BYTES // 4, SPAN_BYTES // 2, 3 * SPAN_BYTES // 4 - 1])
def test_each_span_counts(tmp_path: Path, diff: Diff, at: int) -> None:
    """Only of the first and the last is something to be read: all other bytes between are of the tensor."""
    large = torch.zeros(3 * SPAN_BYTES // 4)
    a = _save(tmp_path / "a", {"large": large, "b": torch.zeros(3)})
    large[at] = 1
    b = _save(tmp_path / "b", {"large": large, "b": torch.zeros(3)})
    facts = diff(a, b)
    assert _changes(facts) == {"large": "value"} and facts["read"] == int(at not in (SPAN_BYTES // 4, SPAN_BYTES // 2))


def test_padding_and_headers_are_not_compared(tmp_path: Path, diff: Diff) -> None:
    """Other bytes there, as of another torch, with checksums that say so: the values are the same."""
    state = {"w": torch.randn(3 * SPAN_BYTES // 4), "small": torch.randn(10), "lr": 0.5}
    a, b = _save(tmp_path / "a", state), _save(tmp_path / "b", state)
    with ExitStack() as held:
        its = {name: stored.item for name, (stored,) in IndexedCheckpoint(str(b), held).items.items()}
    for at in (its["w"].at + 2, its["w"].payload_at + its["w"].payload_bytes, its["small"].at + 5):
        flip(b / DATA, at)
    _sign(b)
    facts = diff(a, b)
    assert facts["is_same"] and facts["read"] == 2
    flip(b / DATA, its["small"].payload_at)
    _sign(b)
    assert _changes(diff(a, b)) == {"small": "value"}


def _sign(folder: Path) -> None:
    """Have the checksums be those of the bytes that are there."""
    name = "__0_0.index.json"
    index = Index.parse((folder / name).read_bytes(), name)
    data = (folder / DATA).read_bytes()
    sums = array("Q", [checksum(data[begin:end]) for begin, end in pairwise(index.bounds)])
    text = Index.head(index.data, index.items, index.asked) + Index.tail(index.nbytes, sums)
    (folder / name).write_bytes(text)
    manifest = Manifest.parse((folder / "asyncckpt.json").read_bytes(), "")
    files = {**manifest.files, name: {"bytes": len(text), "xxh3": f"{checksum(text):016x}"}}
    (folder / "asyncckpt.json").write_bytes(replace(manifest, files=files).encode())


def test_doubts_are_what_checksums_do_not_say(tmp_path: Path) -> None:
    large = torch.zeros(5 * SPAN_BYTES // 8 + 1)  # it does not end with a page: there is padding behind it
    a = _save(tmp_path / "a", {"large": large})
    large[0] = large[-1] = 1
    b = _save(tmp_path / "b", {"large": large})
    large[SPAN_BYTES // 4] = 1
    c = _save(tmp_path / "c", {"large": large})
    with ExitStack() as held:
        one, two, three = (IndexedCheckpoint(str(path), held).items["large"][0] for path in (a, b, c))
        lead, nbytes = one.item.payload_at - one.item.at, large.nbytes
        assert doubtful(one, one) == [] and doubtful(one, three) is None
        assert doubtful(one, two) == [(0, SPAN_BYTES - lead), (2 * SPAN_BYTES - lead, nbytes)]


def test_objects_with_tensors_are_compared_without_that_space_too(tmp_path: Path, diff: Diff) -> None:
    large, small = ({"held": (torch.arange(count), 1)} for count in (10_000, 100))
    with Engine() as engine:
        for name, state in (("large", large), ("in large", small)):
            engine.save(tmp_path / name, state).result(60)
    _save(tmp_path / "small", small)
    assert diff(tmp_path / "in large", tmp_path / "small")["is_same"]
    assert _changes(diff(tmp_path / "in large", tmp_path / "large")) == {"held": "value"}


def test_objects_are_compared_without_the_space_to_grow(tmp_path: Path, diff: Diff) -> None:
    with Engine() as engine:
        engine.save(tmp_path / "a", {"w": torch.zeros(3), "text": "a" * 5000}).result(60)
        engine.save(tmp_path / "b", {"w": torch.zeros(3), "text": "b"}).result(60)  # where more is reserved
    c = _save(tmp_path / "c", {"w": torch.zeros(3), "text": "b"})
    assert diff(tmp_path / "b", c)["is_same"] and diff(c, tmp_path / "b")["same"] == 2
    assert _changes(diff(tmp_path / "a", c)) == {"text": "value"}
    assert _changes(diff(c, _save(tmp_path / "d", {"w": 3, "text": "b"}))) == {"w": "dtype, shape"}


def test_sets_of_files(tmp_path: Path, diff: Diff) -> None:
    """Their tensors, the records of their archives, and their small files."""
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
    assert diff(tmp_path / "a/model.safetensors", tmp_path / "b/model.safetensors")["is_same"]
    assert _changes(diff(tmp_path / "a/dcp/model_0", tmp_path / "c/dcp/model_0"))["model.w"] == "value"


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
    # Which is the newest is not known where one cannot be read.
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
    state["h"] = torch.full((10,), 1.5, dtype=torch.float32)
    state["q"] = torch.full((10,), 2.0).to(torch.float8_e4m3fn)
    state["z"] += 1
    b = _save(tmp_path / "b", state)
    found = {each["name"]: each["values"] for each in diff(a, b, "--values")["differences"]}

    def expected(greatest: float | None, mean: float | None, *counts: list[int]) -> dict[str, Any]:
        nan, infinite = counts or ([0, 0], [0, 0])
        return {"max_abs": greatest, "mean_abs": mean and pytest.approx(mean), "nan": nan, "infinite": infinite}

    assert found == {
        "f": expected(3, 4 / 1000),
        "odd": expected(0.5, 0.25, [1, 1], [2, 2]),
        "gone": expected(None, None, [2, 1], [0, 0]),
        "i": expected(7, 7 / 3),
        "b": expected(1, 1 / 4),
        "c": expected(5, 2.5),
        "h": expected(0.5, 0.5),
        "q": expected(1, 1),
        "z": expected(1, 1),
        "lr": None,
    }


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = _after()
    state["changed"][0, 0] = math.nan
    argv = ["diff", str(_save(tmp_path / "a", _before())), str(_save(tmp_path / "b", state))]
    assert cli.main(argv) == 1
    headers, _, *rows = capsys.readouterr().out.splitlines()
    assert headers.split() == ["name", "change", "in", "A", "in", "B", "size"] and len(rows) == 8
    assert rows[0].split() == ["added", "added", "float32", "12345", "48.2", "KiB"]
    assert rows[-1].startswith("6 differences; the same: 4 values, 1.8 MiB")
    assert cli.main([*argv, "--values"]) == 1
    headers, _, *rows = capsys.readouterr().out.splitlines()
    assert "greatest difference" in headers
    assert " ".join(rows[1].split()) == "changed value float32 50x7 float32 50x7 1.4 KiB 0.001 2.865e-06 0 / 1"


@pytest.mark.parametrize("way", ["data", "index", "manifest", "missing", "value"])
def test_trouble_is_no_difference(tmp_path: Path, diff: Diff, capsys: pytest.CaptureFixture[str], way: str) -> None:
    """Who asks a script whether two differ has to know that from what could not be compared."""
    a, b = _save(tmp_path / "a", {"w": torch.zeros(1000)}), _save(tmp_path / "b", {"w": torch.ones(1000)})
    if way == "missing":
        b = tmp_path / "none"
    elif way == "data":
        os.truncate(b / DATA, 100)
    elif way == "value":
        flip(b / DATA, 2000)
    else:
        flip(b / {"index": "__0_0.index.json", "manifest": "asyncckpt.json"}[way], 50)
    assert cli.main(["diff", str(a), str(b), *(["--values"] if way == "value" else [])]) == 2
    assert str(b) in capsys.readouterr().err


def test_torch_is_not_loaded_for_two_of_ours(tmp_path: Path) -> None:
    a, b = _save(tmp_path / "a", _before()), _save(tmp_path / "b", _after())
    argv = ["diff", str(a), str(b)]
    code = f"import sys; from asyncckpt.cli import main; assert main({argv}) == 1; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "changed" in done.stdout and " torch " not in done.stdout.splitlines()[-1]


def test_a_part_that_was_exported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"w": torch.ones(3), "b": torch.zeros(2)}
    path = _save(tmp_path / "a", {"model": model, "step": 1})
    save_file(model, tmp_path / "model.safetensors")
    assert cli.main(["diff", str(path), str(tmp_path / "model.safetensors")]) == 1
    assert "export --only model" in capsys.readouterr().out
    save_file({"w": torch.ones(3), "c": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert cli.main(["diff", str(path), str(tmp_path / "model.safetensors")]) == 1
    assert "--only" not in capsys.readouterr().out
