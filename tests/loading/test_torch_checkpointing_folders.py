"""Load, inspect, verify and export checkpoints of torch_checkpointing, in processes that do not import it."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.forked_ranks import on_ranks
from support.peers import TORCH_CHECKPOINTING, needs_torch_checkpointing, python
from support.shared_files import flip
from support.states import same

import asyncckpt
from asyncckpt import cli
from asyncckpt.engine import shared as engines
from asyncckpt.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatError,
    MismatchError,
    StorageError,
    UntrustedValueError,
)
from asyncckpt.exporting.export import export
from asyncckpt.loading.rank_files import RankFiles

pytestmark = [pytest.mark.usefixtures("forkserver"), needs_torch_checkpointing]

TESTS = Path(__file__).parents[1]
RANKS = (1, 2, 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints of both managers, ``<ranks>-<ours>``, and the whole states."""
    folder = tmp_path_factory.mktemp("saved")
    _run("save_all", folder, TORCH_CHECKPOINTING)
    return folder


@pytest.fixture
def stock(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint of 4 ranks and the stock manager, for a test to damage."""
    return Path(shutil.copytree(saved / "4-False", tmp_path / "stock"))


def _run(scenario: str, folder: Path, *peers: str) -> None:
    path = [str(TESTS), *(str(TESTS / each) for each in ("integrations", "loading"))]
    python(f"import sys; sys.path[:0] = {path}; import {Path(__file__).stem} as here; here.main()", *peers,
           arguments=(scenario, str(folder)))  # fmt: skip


def main() -> None:
    """Run the scenario in a process of its own."""
    globals()[sys.argv[1]](Path(sys.argv[2]))


# The functions down to ``save_all`` run in a process that can import torch_checkpointing.


def state() -> dict[str, Any]:
    """Return the state of the integration's test, and values of more kinds."""
    from test_torch_checkpointing import state as items

    found: dict[str, Any] = items(2)
    found["more"] = {
        "transposed": torch.arange(24.0).view(4, 6).t(),
        "channels": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "view": torch.arange(10)[2:7:2],
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "float8": torch.randn(6).to(torch.float8_e4m3fn),
        "tuple": (1, torch.arange(3), {"a": b"\0\1"}),
        "text": "text",
        "number": 1 << 3000,
        "tensors": [torch.ones(2), {"deep": torch.zeros(1)}],
        "none": [None, True, 0.5],
    }
    found["large"] = torch.randn(1024, 300)
    if dist.is_initialized() and dist.get_world_size() == 4:
        found["model"]["strided"] = strided()
    return found


def strided() -> Any:
    """Return a tensor that tensor parallelism has divided first, and FSDP then."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = torch.arange(8 * 3.0).view(8, 3)
    grid = init_device_mesh("cpu", (2, 2))
    fsdp, tp = grid.get_coordinate() or (0, 0)
    local = whole[4 * tp + 2 * fsdp :][:2].clone()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(local, grid, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def save_all(folder: Path) -> None:
    from test_torch_checkpointing import manager, whole

    def save(ranks: int) -> None:
        found = state()
        for ours in (True, False):
            saver = manager(ours=ours)
            written = saver.save(str(folder / f"{ranks}-{ours}"), {**found, "rank": {"of": dist.get_rank()}})
            with saver.lock():
                written.result(60)
            saver.close()
        known = whole(found)
        if dist.get_rank() == 0:
            torch.save(known, folder / f"{ranks}.pt")
        dist.barrier()
        engines.shared.close()

    for ranks in RANKS:
        on_ranks(ranks, save, ranks, folder=folder)


# The functions and tests below run without torch_checkpointing.


def known(saved: Path, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(saved / f"{ranks}.pt", weights_only=False)
    return found


def empty(value: Any) -> Any:
    """Return a state of the same structure with other values."""
    if isinstance(value, dict):
        return {key: empty(each) for key, each in value.items()}
    if isinstance(value, list):
        return [empty(each) for each in value]
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else "nothing"


def load(path: Path, into: dict[str, Any], **options: Any) -> dict[str, Any]:
    asyncckpt.load(into, checkpoint_id=str(path), **options)
    return into


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_single_process_loads_every_value(saved: Path, ranks: int, ours: bool) -> None:
    path, expected = saved / f"{ranks}-{ours}", known(saved, ranks)
    into = empty(expected)
    filled = asyncckpt.load(into, checkpoint_id=str(path))
    assert same(into, expected)
    assert filled.unexpected == ("rank.of",)
    assert load(path, {"rank": {"of": 9}}) == {"rank": {"of": 0}}
    assert not any(name.startswith("torch_checkpointing") for name in sys.modules)


def test_other_ranks_load_into_other_placements(saved: Path) -> None:
    _run("load_on_two_ranks", saved)


def load_on_two_ranks(saved: Path) -> None:
    def load_each() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        for ranks in (4, 1):
            expected = known(saved, ranks)
            for ours in (True, False):
                for placement in (Shard(0), Shard(1), Replicate()):
                    path = saved / f"{ranks}-{ours}"
                    model = {
                        name: distribute_tensor(torch.zeros_like(each), mesh, [placement])
                        for name, each in expected["model"].items()
                        if each.ndim == 2
                    }
                    others = empty({key: expected[key] for key in ("more", "optimizer", "step", "large")})
                    into = load(path, {"model": model, **others})
                    assert all(same(each.full_tensor(), expected["model"][name]) for name, each in model.items())
                    assert all(same(into[key], expected[key]) for key in others)
                assert load(path, {"rank": {"of": 9}}) == {"rank": {"of": dist.get_rank() if ranks == 4 else 0}}

    on_ranks(2, load_each, folder=saved)


def test_tensors_are_converted(saved: Path) -> None:
    into = {"large": torch.zeros(1024, 300, dtype=torch.float64)}
    assert same(load(saved / "2-False", into), {"large": known(saved, 2)["large"].double()})


def test_inspect_and_ls(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved / "4-False"
    assert cli.main(["inspect", str(path)]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == f"{path}: a checkpoint of torch_checkpointing, written by 4 ranks, without checksums"
    assert ["model.grid", "float32", "8x12", "384", "B", "4"] in map(str.split, rows)
    assert cli.main(["ls", str(path), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["bytes"]) == (
        "torch_checkpointing",
        sum(each.stat().st_size for each in path.iterdir()),
    )
    for command in (["timeline", str(path)], ["diff", str(path), str(path)]):
        assert cli.main(command) != 0
        assert "torch_checkpointing wrote this" in capsys.readouterr().err


def _verified(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, str]]]:
    status = cli.main(["verify", str(path), "--json"])
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "torch_checkpointing"
    return status, facts["damages"]


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(saved / "4-False")]) == 0
    shown = capsys.readouterr().out
    assert "4-False (torch_checkpointing): good" in shown and "torch_checkpointing has no other checksums" in shown
    assert "the CRC of each record of 24 files" in shown


def test_a_damaged_tensor_is_found(stock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(stock / "large_2.pt") as archive:
        flip(stock / "large_2.pt", archive.getinfo("archive/data/0").header_offset + 500_000)
    status, (damage,) = _verified(stock, capsys)
    assert status == 1 and damage["file"] == str(stock / "large_2.pt") and "archive/data/0" in damage["what"]


def test_a_damaged_pickle_is_no_checkpoint(stock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(stock / "model_1.pt") as archive:
        flip(stock / "model_1.pt", archive.getinfo("archive/data.pkl").header_offset + 300)
    with pytest.raises(DamagedCheckpointError) as raised:
        load(stock, {"step": 0})
    assert raised.value.path == str(stock / "model_1.pt")
    assert _verified(stock, capsys)[1][0]["file"] == str(stock / "model_1.pt")


def test_a_damaged_tensor_of_our_manager_is_not_loaded(saved: Path, tmp_path: Path) -> None:
    for name, ranks in (("large_0.pt", 1), ("model_0.pt", 1)):
        path = Path(shutil.copytree(saved / f"{ranks}-True", tmp_path / name))
        with zipfile.ZipFile(path / name) as archive:
            flip(path / name, archive.getinfo("archive/data/0").header_offset + 130)
        with pytest.raises(DamagedCheckpointError) as raised:
            load(path, empty(known(saved, ranks)))
        assert raised.value.path == str(path / name)


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_file_that_is_no_archive(stock: Path, content: bytes) -> None:
    (stock / "step_3.pt").write_bytes(content)
    with pytest.raises(DamagedCheckpointError) as raised:
        load(stock, {"step": 0})
    assert raised.value.path == str(stock / "step_3.pt")


def write_metadata(folder: Path) -> None:
    """Write the metadata of a checkpoint without items that can be resharded."""
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"version": "2.0", "metadata": {}, "world_size": 4}))


def test_a_missing_file(stock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stock / "model_2.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match="is missing") as raised:
        load(stock, {"step": 0})
    assert raised.value.path == str(stock / "model_2.pt")
    status, (damage,) = _verified(stock, capsys)
    assert status == 1 and damage["file"] == str(stock / "model_2.pt")
    write_metadata(stock)  # then the shards of the others show it
    with pytest.raises(DamagedCheckpointError, match=r"parts of 'model\.\S+' are missing: .*model_1\.pt, model_3\.pt"):
        load(stock, {"step": 0})
    assert "are missing" in _verified(stock, capsys)[1][0]["what"]


def test_a_pipe_is_no_file(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path = RankFiles(str(stock)), str(stock / "model_2.pt")
    stamp = files._storage.stamp(path)
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(DamagedCheckpointError) as raised:
        load(stock, {"step": 0})
    assert raised.value.path == path
    real = files._storage.stamp  # then the pipe takes the place of the file at the last moment
    monkeypatch.setattr(files._storage, "stamp", lambda its: stamp if its == path else real(its))
    with pytest.raises(DamagedCheckpointError, match="the path is no file"):
        files.read()


class Harmful:
    def __init__(self, call: Any, *args: Any) -> None:
        self._call = call, args

    def __reduce__(self) -> Any:
        return self._call


def test_no_pickle_runs_code(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = (os.mkdir, "harm"), (eval, "open('harm', 'w')"), (subprocess.run, ["touch", "harm"])
    for call in (Harmful(*each) for each in calls):
        value = {"bad": call, "good": 5, "list": [call], "tuple": (torch.ones(2), call)}
        torch.save(value, stock / "extra_0.pt")
        for name in ("bad", "list", "tuple"):
            with pytest.raises(UntrustedValueError, match=f"extra.{name}"):
                load(stock, {"extra": {name: 0}})
        assert load(stock, {"extra": {"good": 0}}) == {"extra": {"good": 5}}
        with pytest.raises(UntrustedValueError):
            export(stock, tmp_path / "out.pt", to="torch")
        (stock / "metadata.pkl").write_bytes(pickle.dumps({"version": call}))
        with pytest.raises(UntrustedValueError) as raised:
            load(stock, {"extra": {"good": 0}})
        assert raised.value.path == str(stock / "metadata.pkl")
        write_metadata(stock)
    assert not (tmp_path / "harm").exists()


def test_no_name_of_a_pickle_is_imported(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "payload.py").write_text("open('harm', 'w').close()\nclass Kind: pass\n")
    kind = importlib.import_module("payload").Kind
    torch.save({"bad": kind, "array": np.arange(3), "good": 5}, stock / "extra_0.pt")
    del sys.modules["payload"]
    (tmp_path / "harm").unlink()
    for name in ("bad", "array"):
        with pytest.raises(UntrustedValueError, match=f"extra.{name}"):
            load(stock, {"extra": {name: 0}})
    assert load(stock, {"extra": {"good": 0}}) == {"extra": {"good": 5}}
    # A pickle that changes the module of a note's class.
    changed = b"\x80\x02}X\x03\x00\x00\x00badcsome\nname\nN}X\x0a\x00\x00\x00__module__X\x07\x00\x00\x00payloads\x86bs."
    with zipfile.ZipFile(stock / "extra_0.pt", "w") as archive:
        archive.writestr("extra_0/data.pkl", changed)
        archive.writestr("extra_0/byteorder", sys.byteorder)
    with pytest.raises(DamagedCheckpointError):
        load(stock, {"extra": {"bad": 0}})
    assert not (tmp_path / "harm").exists()


def test_two_values_of_one_name(stock: Path) -> None:
    for value in ({"a.b": 1, "a": {"b": 2}}, {1: 7, "1": 8}):
        torch.save(value, stock / "extra_0.pt")
        with pytest.raises(MismatchError, match="two values have the name"):
            load(stock, {"step": 0})


def test_a_damaged_tensor_that_is_not_contiguous(stock: Path) -> None:
    torch.save({"turned": torch.arange(12.0).view(3, 4).t(), "in": (torch.ones(5),)}, stock / "extra_0.pt")
    data = bytearray((stock / "extra_0.pt").read_bytes())
    for value, flipped in ((7.0, "turned"), (1.0, "in")):
        at = data.index(torch.tensor([value, value + (value > 1)]).numpy().tobytes())
        (stock / "extra_0.pt").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
        with pytest.raises(DamagedCheckpointError, match="another CRC") as raised:
            load(stock, {"extra": {flipped: torch.zeros(4, 3) if flipped == "turned" else 0}})
        assert raised.value.path == str(stock / "extra_0.pt")


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_classes_that_the_user_trusts(stock: Path) -> None:
    torch.save({"point": Point(3)}, stock / "extra_0.pt")
    with pytest.raises(UntrustedValueError, match="Point"):
        load(stock, {"extra": {"point": 0}})
    assert load(stock, {"extra": {"point": 0}}, weights_only=False)["extra"]["point"].x == 3
    with torch.serialization.safe_globals([Point]):
        assert load(stock, {"extra": {"point": 0}})["extra"]["point"].x == 3


@pytest.mark.parametrize(
    "metadata, error",
    [
        (b"no pickle", DamagedCheckpointError),
        (pickle.dumps({"version": "1.0"}), FormatError),
        (pickle.dumps({"version": "2.0", "metadata": 5}), DamagedCheckpointError),
    ],
)
def test_other_metadata(stock: Path, metadata: bytes, error: type[Exception]) -> None:
    (stock / "metadata.pkl").write_bytes(metadata)
    with pytest.raises(error, match=r"metadata\.pkl"):
        load(stock, {"step": 0})


@pytest.mark.parametrize(
    "path, form, error",
    [("../x.pt", "TorchSerialization", "another folder"), ("x.gz", "GzipSerialization", "has the format")],
)
def test_layouts_that_are_refused(stock: Path, path: str, form: str, error: str) -> None:
    layout = {"file_path": path, "serialization_format": {"type": form}}
    metadata = {"step": {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: layout}}}
    (stock / "metadata.pkl").write_bytes(pickle.dumps({"version": "2.0", "metadata": metadata, "world_size": 1}))
    with pytest.raises((DamagedCheckpointError, FormatError), match=error):
        load(stock, {"step": 0})


def test_a_layout_with_other_names(stock: Path) -> None:
    (stock / "own").mkdir()
    (stock / "step_0.pt").rename(stock / "own/step.pt")
    layout = {"file_path": "own/step.pt", "serialization_format": {"type": "TorchSerialization"}}
    metadata = {"counted": {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: layout}}}
    (stock / "metadata.pkl").write_bytes(pickle.dumps({"version": "2.0", "metadata": metadata, "world_size": 4}))
    assert load(stock, {"counted": 0}) == {"counted": 2}


def test_a_fresh_optimizer_gets_its_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    trained, fresh = (torch.optim.AdamW(model.parameters(), lr=lr) for lr in (0.5, 0.1))
    model(torch.ones(3)).sum().backward()
    trained.step()
    torch.save(trained.state_dict(), tmp_path / "optimizer_0.pt")
    write_metadata(tmp_path)
    load(tmp_path, {"optimizer": fresh})
    assert same(fresh.state_dict(), trained.state_dict())


def test_a_file_that_changes_meanwhile(stock: Path) -> None:
    files = RankFiles(str(stock)).read()
    os.utime(stock / "model_0.pt", (1, 1))
    with pytest.raises(StorageError, match="changed or replaced"):
        files.open("model_0.pt")


def test_export(saved: Path, tmp_path: Path) -> None:
    expected = known(saved, 4)
    for ours in (True, False):
        export(saved / f"4-{ours}", tmp_path / f"hf-{ours}", only="model")
        exported = load_file(tmp_path / f"hf-{ours}/model.safetensors")
        assert same({name: exported[name] for name in expected["model"]}, expected["model"])
        export(saved / f"4-{ours}", tmp_path / f"dcp-{ours}", to="dcp")
        assert same(load(tmp_path / f"dcp-{ours}", empty(expected)), expected)


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Path]:
    (folder := tmp_path / "others").mkdir()
    yield folder


@pytest.mark.parametrize("names", [(), ("model.pt",), ("model_0.pt", "model_1.pt"), ("metadata.pkl", "model.pt")])
def test_other_folders_are_no_checkpoints(others: Path, names: tuple[str, ...]) -> None:
    for name in names:
        torch.save(1, others / name)
    with pytest.raises(CheckpointNotFoundError):
        load(others, {"model": 0})
