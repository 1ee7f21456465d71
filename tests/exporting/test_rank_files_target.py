"""Test exports to torch_checkpointing: its stock manager and our readers load every value of the folder."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked_ranks import on_ranks
from support.peers import TORCH_CHECKPOINTING, needs_torch_checkpointing, python
from support.shards import kinds_of_values, save_shards
from support.states import same, zeros_like

import asyncckpt
from asyncckpt import Checkpointer, cli, export
from asyncckpt.errors import UnsavableStateError, UntrustedValueError

HERE = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
TO: Any = {"to": "torch_checkpointing"}


def state() -> dict[str, Any]:
    """Return items of all kinds: dicts, a list, tensors, and other values. Some have the same bytes."""
    torch.manual_seed(0)
    found = kinds_of_values()
    found["tensors"] = {
        "grid": torch.randn(12, 20),
        "uneven": torch.randn(5, 3).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "large": torch.randn(1500, 2000),
        "vector": torch.arange(7).to(torch.complex64),
    }
    found["alone"] = found["model"]["weight"]
    found["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    found["nothing"] = torch.zeros(0, 3)
    found["list"] = [torch.ones(2), {"deep": torch.zeros(1)}]
    found["groups"] = {
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        "note": "text",
        "none": None,
    }
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a state, and the paths of its checkpoints, each exported to the path with ``-out`` behind it."""
    folder, known = tmp_path_factory.mktemp("sources"), state()
    with Checkpointer(folder / "root") as checkpointer:
        checkpointer.save(5, known)
    save_shards(known, folder / "stock", {"tensors.grid": ((), (7,)), "tensors.large": ((100, 800), ())})
    for name, out in (("root", "root-out"), ("stock", "stock-out"), ("root-out", "ranks-out")):
        export(folder / name, folder / out, **TO)
    return {"state": known} | {name: folder / f"{name}-out" for name in ("root", "stock", "ranks")}


@pytest.mark.parametrize("source", ["root", "stock", "ranks"])
def test_asyncckpt_reads_it(sources: dict[str, Any], source: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, known = sources[source], sources["state"]
    assert {each.name for each in path.iterdir()} == {"metadata.pkl", *(f"{item}_0.pt" for item in known)}
    for item, value in known.items():
        assert same(torch.load(path / f"{item}_0.pt"), value)
    filled = asyncckpt.load(into := zeros_like(known), checkpoint_id=str(path))
    assert same(into, known) and not filled.unexpected
    assert cli.main(["verify", str(path)]) == 0 and "(torch_checkpointing): good" in capsys.readouterr().out
    assert cli.main(["inspect", str(path)]) == 0
    assert "a checkpoint of torch_checkpointing, written by 1 rank" in capsys.readouterr().out


def test_tensors_are_tied_in_each_file(sources: dict[str, Any]) -> None:
    for name, is_tied in (("root", True), ("stock", False)):
        model = torch.load(sources[name] / "model_0.pt")
        assert (model["weight"].data_ptr() == model["tied"].data_ptr()) is is_tied
    assert same(torch.load(sources["root"] / "alone_0.pt"), sources["state"]["model"]["weight"])


def test_only_a_part_renamed_and_converted(sources: dict[str, Any], tmp_path: Path) -> None:
    arguments = ["--to", "torch_checkpointing", "--only", "tensors", "--rename", "^=model.", "--dtype", "bf16"]
    assert cli.main(["export", str(sources["stock"]), str(tmp_path / "out"), *arguments]) == 0
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"metadata.pkl", "model_0.pt"}
    expected = {
        name: each.bfloat16() if each.is_floating_point() else each
        for name, each in sources["state"]["tensors"].items()
    }
    assert same(torch.load(tmp_path / "out/model_0.pt"), expected)
    about = pickle.loads((tmp_path / "out/metadata.pkl").read_bytes())["metadata"]["model"]["nested_path_to_metadata"]
    assert about['["grid"]'][0]["sharding_metadata"]["data"]["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize("name", ["a/b", "", "a\0b"])
def test_names_that_no_file_can_have(sources: dict[str, Any], tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsavableStateError, match="cannot be the name of a file"):
        export(sources["root"], tmp_path / "out", rename={"scalar": name}, **TO)
    assert not list(tmp_path.iterdir())


class Odd:
    """A class that ``torch.load`` refuses with ``weights_only``."""


def test_values_that_could_run_code_in_an_item(root: Path, tmp_path: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(2), "odd": {"value": Odd()}})
    with pytest.raises(UntrustedValueError, match=r"'odd\.value'"):
        export(root, tmp_path / "out", **TO)
    export(root, tmp_path / "out", weights_only=False, **TO)
    assert isinstance(torch.load(tmp_path / "out/odd_0.pt", weights_only=False)["value"], Odd)
    assert same(torch.load(tmp_path / "out/w_0.pt"), torch.ones(2))


@pytest.mark.usefixtures("forkserver")
@needs_torch_checkpointing
@pytest.mark.parametrize("source", ["root", "stock"])
def test_the_stock_manager_reads_it(sources: dict[str, Any], source: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = {HERE!r}; import {Path(__file__).stem} as here; here.main()"
    python(code, TORCH_CHECKPOINTING, arguments=(str(sources[source]), str(tmp_path)))


# All code below runs in a process that can import torch_checkpointing.


def main() -> None:
    path, folder = map(Path, sys.argv[1:])
    load_alone(path, ())
    load_alone(path, ("model", "tensors", "alone", "scalar", "nothing", "list", "groups"))
    for ranks in (1, 2):
        on_ranks(ranks, load_on_ranks, path, folder=folder)


def loaded(path: Path, into: dict[str, Any], resharded: Any, **options: Any) -> dict[str, Any]:
    """Load with the stock manager, which has a resharder for the items ``resharded``."""
    import torch_checkpointing
    from support.torch_checkpointing_training import manager
    from torch_checkpointing.default_resharder import DefaultResharder

    items = {item: torch_checkpointing.ItemSpec(resharder=DefaultResharder()) for item in resharded}
    loader = manager(ours=False, items=items | options)
    found = dict(loader.load(str(path), into=into, strict=True))
    loader.close()
    return found


def load_alone(path: Path, resharded: tuple[str, ...]) -> None:
    """Load all values, into tensors and into nothing."""
    known = state()
    into = zeros_like(known)
    kept = copy.copy(into["model"])
    found = loaded(path, into, resharded)
    assert same({item: found[item] for item in known}, known)
    assert all(each is kept[name] for name, each in into["model"].items() if isinstance(each, torch.Tensor))
    others = [item for item in known if item not in resharded]
    assert same(loaded(path, dict.fromkeys(others), ()), {item: known[item] for item in others})


def load_on_ranks(path: Path) -> None:
    """Load into tensors of several placements, and into plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch_checkpointing import ItemSpec
    from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization

    known, mesh = state(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    plain = {name: each for name, each in known["model"].items() if isinstance(each, torch.Tensor)}
    for placement in (Shard(0), Shard(1), Replicate()):
        sharded = {
            name: distribute_tensor(torch.zeros_like(each), mesh, [placement])
            for name, each in known["tensors"].items()
            if each.ndim == 2 or placement != Shard(1)
        }
        into = {"tensors": sharded, "alone": torch.zeros_like(known["alone"]), "model": zeros_like(plain), "step": None}
        step = ItemSpec(layout=LayoutInfo("step_0.pt", TorchSerialization()))
        found = loaded(path, into, ("tensors", "alone", "model"), step=step)
        assert found["step"] == known["step"] and same(found["alone"], known["alone"]) and same(found["model"], plain)
        assert all(same(each.full_tensor(), known["tensors"][name]) for name, each in sharded.items())
