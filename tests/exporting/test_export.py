"""Test exports of every kind of value, from each source to each format and back."""

from __future__ import annotations

import gc
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import step_folder, verify
from support.shards import kinds_of_values, save_shards
from support.states import same, stock_load, zeros_like

import asyncckpt
from asyncckpt import Checkpointer, export
from asyncckpt.cli import main
from asyncckpt.errors import CheckpointNotFoundError, MismatchError, UnsavableStateError, UntrustedValueError

CUTS: Any = {
    "model.weight": ((7, 20), ()),  # uneven rows
    "model.third": ((1,), (2,), ()),
    "optimizer.state.0.exp_avg": ((), (1, 33)),  # columns
    "model.integers": ((50,),),
    "model.fp8": ((),),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a state, and the paths of its checkpoints: ``root`` by asyncckpt, ``stock`` by stock DCP."""
    torch.manual_seed(0)
    folder, state = tmp_path_factory.mktemp("sources"), kinds_of_values()
    with Checkpointer(folder / "root") as checkpointer:
        checkpointer.save(3, {"model": {"weight": torch.zeros(1)}})
        checkpointer.save(5, state)
    save_shards(state, folder / "stock", CUTS, files=3)
    return {"state": state} | {name: folder / name for name in ("root", "stock")}


@pytest.mark.parametrize("source", ["root", "stock"])
def test_to_safetensors(sources: dict[str, Any], source: str, tmp_path: Path) -> None:
    done = export(sources[source], tmp_path / "out", only="model")
    expected = dict(sources["state"]["model"])
    if source != "stock":  # stock DCP has stored both
        assert done.tied == {"tied": "weight"}
        del expected["tied"]
    save_file({name: tensor.clone() for name, tensor in expected.items()}, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["model.safetensors"] == done.files
    assert done.tensors == len(expected) and done.nbytes == (tmp_path / "expected").stat().st_size


@pytest.mark.parametrize("source", ["root", "stock"])
def test_to_a_file_of_torch(sources: dict[str, Any], source: str, tmp_path: Path) -> None:
    export(sources[source], tmp_path / "out.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None  # the CRCs are right, which torch does not check
    for loaded in (torch.load(tmp_path / "out.pt"), torch.load(tmp_path / "out.pt", mmap=True)):
        assert same(loaded, sources["state"])
    is_one = loaded["model"]["weight"].data_ptr() == loaded["model"]["tied"].data_ptr()
    assert is_one is (source != "stock")


@pytest.mark.parametrize("source", ["root", "stock"])
def test_to_a_checkpoint(sources: dict[str, Any], source: str, tmp_path: Path) -> None:
    """A training resumes from the exported step, stock DCP loads it, and all its bytes have checksums."""
    state = sources["state"]
    export(sources[source], step_folder(str(tmp_path / "root"), 12), to="dcp")
    report = verify(step_folder(str(tmp_path / "root"), 12))
    assert not report.damages and report.nbytes
    with Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.latest() == 12 and checkpointer.load(into := zeros_like(state)) == 12
        assert same(into, state)
        checkpointer.save(13, state)
    stock_load(into := zeros_like(state), step_folder(str(tmp_path / "root"), 12))
    assert same(into, state)
    export(step_folder(str(tmp_path / "root"), 12), tmp_path / "again.pt", to="torch")
    assert same(torch.load(tmp_path / "again.pt"), state)


def test_the_index_says_where_each_tensor_is(sources: dict[str, Any], tmp_path: Path) -> None:
    done = export(sources["root"], tmp_path / "out", only="model", max_shard_size="5KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]
    found: dict[str, torch.Tensor] = {}
    for name in names:
        its = load_file(tmp_path / "out" / name)
        assert len(its) == 1 or sum(each.nbytes for each in its.values()) <= 5000
        assert all(index["weight_map"][each] == name for each in its)
        found |= its
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    expected = {name: each for name, each in sources["state"]["model"].items() if name != "tied"}
    assert {name: found[name] for name in expected}.keys() == found.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    assert sorted(done.files) == sorted(each.name for each in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_floating_point_tensors_are_converted(
    sources: dict[str, Any], tmp_path: Path, to: Any, name: str, dtype: torch.dtype
) -> None:
    export(sources["stock"], tmp_path / "out", to=to, only="model", dtype=name)
    expected = {
        key: value.to(dtype) if value.is_floating_point() and value.itemsize > 1 else value
        for key, value in sources["state"]["model"].items()
    }
    if to == "dcp":
        export(tmp_path / "out", tmp_path / "out.pt", to="torch")
    found = load_file(tmp_path / "out/model.safetensors") if to == "hf" else None
    found = found or torch.load(tmp_path / ("out" if to == "torch" else "out.pt"))
    assert found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)


def test_names(sources: dict[str, Any], tmp_path: Path) -> None:
    export(sources["root"], tmp_path / "1.pt", to="torch", only="optimizer.state.1")
    assert same(torch.load(tmp_path / "1.pt"), {"step": torch.tensor(2.0)})
    export(sources["root"], tmp_path / "2.pt", to="torch", rename=r"^model\.(.*)t$=model.\1_")
    loaded, model = torch.load(tmp_path / "2.pt"), sources["state"]["model"]
    assert same(loaded["model"]["weigh_"], model["weight"]) and same(loaded["model"]["bias"], model["bias"])
    export(sources["root"], tmp_path / "3.pt", to="torch", rename=r"^optimizer\.=o.p.")
    loaded, optimizer = torch.load(tmp_path / "3.pt"), sources["state"]["optimizer"]
    assert loaded.keys() == {"model", "o", "step", "betas"} and loaded["o"]["p"]["groups"]["0"] == {"lr": 1e-3}
    export(sources["root"], tmp_path / "4.pt", to="torch", rename=r"^optimizer\.=optim.")
    assert same(torch.load(tmp_path / "4.pt")["optim"], optimizer)
    (tmp_path / "names.json").write_text(json.dumps({"weight": "a.b", "none": "x"}))
    for rename in (str(tmp_path / "names.json"), {"weight": "a.b"}, lambda name: name.replace("weight", "a.b")):
        export(sources["root"], tmp_path / "out", only="model", rename=rename)
        found = load_file(tmp_path / "out/model.safetensors")
        assert same(found["a.b"], model["weight"]) and "bias" in found and "weight" not in found
        (tmp_path / "out/model.safetensors").unlink()
    with pytest.raises(UnsavableStateError, match=r"'model.bias' both get the name 'weight'"):
        export(sources["root"], tmp_path / "3", only="model", rename="bias=weight")
    with pytest.raises(UnsavableStateError, match="others in it"):
        export(sources["root"], tmp_path / "3", to="torch", rename={"step": "model"})
    with pytest.raises(MismatchError, match="'optimizer'"):
        export(sources["root"], tmp_path / "3", only="none")
    assert not (tmp_path / "3").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"to": "onnx"},
        {"dtype": "int8"},
        {"rename": "no equals sign"},
        {"rename": "(=x"},
        {"rename": "none.json"},
        {"max_shard_size": "five"},
        {"to": "dcp", "max_shard_size": "5GB"},
    ],
)
def test_wrong_arguments(sources: dict[str, Any], tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        export(sources["root"], tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


class Odd:
    """A class that ``torch.load`` refuses with ``weights_only``."""


def test_values_that_could_run_code(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "odd": Odd()}
    with Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(1, state)
    with pytest.raises(UntrustedValueError, match="'odd'"):
        export(tmp_path / "root", tmp_path / "out.pt", to="torch")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["root"]
    done = export(tmp_path / "root", tmp_path / "hf")  # no object is loaded for safetensors
    assert done.objects == ["odd"]
    export(tmp_path / "root", tmp_path / "dcp", to="dcp")  # objects are copied without loading them
    for path in (tmp_path / "root", tmp_path / "dcp"):
        export(path, tmp_path / "out.pt", to="torch", weights_only=False)
        loaded = torch.load(tmp_path / "out.pt", weights_only=False)
        assert isinstance(loaded["odd"], Odd) and same(loaded["w"], state["w"])
        (tmp_path / "out.pt").unlink()


def test_what_is_no_checkpoint_is_refused(sources: dict[str, Any], tmp_path: Path) -> None:
    """The files of an export are not checkpoints either."""
    export(sources["root"], tmp_path / "state.pt", to="torch")
    export(sources["root"], tmp_path / "hf", only="model")
    for path in (tmp_path / "state.pt", tmp_path / "hf/model.safetensors", tmp_path / "none"):
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint here") as raised:
            export(path, tmp_path / "out")
        assert raised.value.path == str(path) and not (tmp_path / "out").exists()


def test_the_command(sources: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*argv: object) -> tuple[int, str, str]:
        status = main(["export", *map(str, argv)])
        return status, *capsys.readouterr()

    status, out, _ = run(sources["root"], tmp_path / "all")
    assert status == 0 and "step-00000005" in out
    assert "model.tied is model.weight" in out and "left out, as no tensors:" in out and "--only model" in out
    status, out, _ = run(
        *(sources["root"], tmp_path / "out", "--only", "model.", "--dtype", "bf16", "--json"),
        *("--rename", "weight=w", "--max-shard-size", "5GB"),
    )
    (facts,) = json.loads(out)
    assert status == 0 and facts["tied"] == {"tied": "w"} and facts["files"][0] == "model.safetensors"
    assert load_file(tmp_path / "out/model.safetensors")["w"].dtype == torch.bfloat16
    status, _, error = run(sources["root"], tmp_path / "out")
    assert status == 2 and "remove it" in error
    assert run(tmp_path / "none", tmp_path / "new")[0] == 2
    assert run(sources["root"], tmp_path / "new", "--rename", "(=")[0] == 2
    assert run(sources["root"], "s3://bucket/new")[0] == 2
    assert asyncckpt.export is export


def test_objects_with_tensors_of_a_gpu_need_none(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object was saved on a machine with more GPUs than this one."""
    state = {"sparse": torch.eye(3).to_sparse(), "w": torch.ones(3)}
    with Checkpointer(root) as checkpointer, monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:77")
        checkpointer.save(1, state)
    assert b"cuda:77" in (root / "step-00000001/__0_0.distcp").read_bytes()
    export(root, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")
    assert same({"sparse": found["sparse"].to_dense(), "w": found["w"]}, {"sparse": torch.eye(3), "w": state["w"]})


@pytest.mark.parametrize("to", ["hf", "torch", "dcp", "torch_checkpointing"])
def test_garbage_is_collected_while_it_is_written(
    sources: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    """Writing may take minutes, so the garbage collector runs then. It is off during the planning."""
    real, answers = os.pwrite, []

    def pwrite(*args: Any) -> int:
        answers.append(("writing", gc.isenabled()))
        return real(*args)

    def rename(name: str) -> str:
        answers.append(("planning", gc.isenabled()))
        return name

    monkeypatch.setattr(os, "pwrite", pwrite)
    export(sources["root"], tmp_path / "out", to=to, rename=rename)
    assert set(answers) == {("planning", False), ("writing", True)} and gc.isenabled()
