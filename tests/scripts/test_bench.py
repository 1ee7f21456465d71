"""Run a tiny bench suite with all installed contestants, so that the suite cannot rot. Times are not checked."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import (
    contestants,
    exports,
    figures,
    files,
    hosts,
    loads,
    loads_by_ranks,
    models,
    publications,
    report,
    results,
    store,
    tables,
    unchanged,
    vllm_updates,
)
from bench.contestants.contestant import Pending
from bench.contestants.torch_save import TorchSave
from bench.saves import Series
from bench.states import Request, State, make, tensors_of
from bench.trainer import CYCLE, Trainer, are_of, marks_of
from bench.turns import Pace, take
from support import vllm_engine
from support.peers import FOLDER, VLLM, peer

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench"
PNG = b"\x89PNG\r\n\x1a\n"
MODULES = {"torch-checkpointing": "torch_checkpointing", "torchsnapshot": "torchsnapshot"}
MISSING = {name for name, module in MODULES.items() if importlib.util.find_spec(module) is None}
# Older versions of torch lack the parts that make DCP's async_save fast.
MISSING |= set() if hasattr(torch.distributed.checkpoint.staging, "DefaultStager") else {"dcp-thread", "dcp-process"}
MISSING |= set() if (FOLDER / "nvrx-0.7.0").is_dir() else {"nvrx"}


# Run several commands in one process, because such tiny commands spend most of their time importing torch.
SEVERAL = "import json, sys; from bench.cli import main; [main(each) for each in json.loads(sys.argv[1])]"


def run(folder: Path, *commands: str) -> dict[str, results.Result]:
    """Run commands from another folder, and return the results by kind. The commands must leave no other files."""
    where, out = folder / "work", folder / "out"
    lines = [[*command.split(), "--folder", str(where), "--out", str(out)] for command in commands]
    arguments = [str(SCRIPT), *lines[0]] if len(lines) == 1 else ["-c", SEVERAL, json.dumps(lines)]
    path = [str(SCRIPT.parent.parent), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    assert not list(where.iterdir())
    found = results.read(out)
    page = (out / "README.md").read_text()
    for each in found:
        assert report.section(each) in page and report.section(each) in done.stdout
        picture = next(out.glob(f"{each['kind']}-{each['label']}.png"))
        assert picture.read_bytes().startswith(PNG) and f"({picture.name})" in page
    return {each["kind"]: each for each in found}


def takes_part(found: dict[str, Any]) -> None:
    """Check that all installed contestants take part, and that each missing one has a note."""
    assert set(found["results"]) == set(contestants.names_in("all")) - MISSING
    assert found["left_out"].keys() == MISSING


@pytest.mark.slow
@pytest.mark.timeout(600)  # many processes, each with torch
def test_saves_by_all_contestants(tmp_path: Path) -> None:
    found = run(tmp_path, "save --state 10x20kB --values 5 --changing 2 --rounds 1 --pause 0")["save"]
    takes_part(found)
    assert found["checked"] and found["state"]["tensors"] == 10 and found["state"]["bytes"] == 200_000
    assert all(len(seconds) == 1 and min(seconds) > 0 for seconds in found["limits"].values())
    for result in found["results"].values():
        (blocked,), (durable,) = result["blocked_s"], result["durable_s"]
        assert 0 < blocked <= durable and 0 < result["first_blocked_s"] <= result["first_durable_s"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # many processes, each with torch
def test_all_other_measurements(tmp_path: Path) -> None:
    few = "--state 10x400kB --rounds 1 --pause 0 --contestants"
    found = run(
        tmp_path,
        f"loop {few} asyncckpt,asyncckpt-overlap,torch-save --train-threads 1",
        f"load {few} asyncckpt",
        f"cost {few} asyncckpt,torch-save",
        f"memory {few} asyncckpt",
        "scale --gib 0.001 --tensors 10 20 --no-bytes --rounds 1 --pause 0 --contestants asyncckpt,torch-save",
        "ranks --gib 0.004 --tensors 4 --processes 1 --simulate 4 --items 2 --rounds 1",
        "weights --gib 0.001 --tensors 5 --rounds 1 --pause 0",
    )
    assert found["loop"]["train_threads"] == 1 and not found["loop"]["left_out"]
    for result in found["loop"]["results"].values():
        assert len(result["cost_s"]) == 1 and min(result["steps"]) >= 4
    unknown = {name for name in loads.PEERS if "torch_checkpointing" in name and "torch-checkpointing" in MISSING}
    assert found["load"]["results"].keys() == (loads.OURS.keys() | loads.PEERS.keys()) - unknown
    assert found["load"]["left_out"].keys() == unknown
    cost = found["cost"]
    assert not cost["left_out"] and all(min(each) > 0 for each in cost["limits"].values())
    for result in cost["results"].values():
        assert result["cpu_s"][0] > 0 and result["calls"][0] > 0 and result["written"][0] >= 4_000_000
    memory = found["memory"]["results"]["asyncckpt"]
    assert memory["page_cache"] == 0 and memory["steady"]["processes"] == 1
    assert memory["peak"]["total"] >= memory["steady"]["shared"] >= 4_000_000
    assert [point["state"]["tensors"] for point in found["scale"]["points"]] == [10, 20]
    assert found["ranks"]["rows"][0]["processes"] == 1 and found["simulation"]["rows"][0]["ranks"] == 4
    assert not found["publish"]["left_out"]
    assert found["publish"]["results"].keys() > publications.WAYS.keys()


@pytest.mark.slow
@pytest.mark.timeout(300)  # processes, each with torch
def test_loads_of_several_ranks(tmp_path: Path) -> None:
    found = run(tmp_path, "load --ranks 2 --layers 3 --gib 0.001 --rounds 1 --pause 0")["load"]
    assert found["state"]["tensors"] == 3 and found["state"]["bytes"] > 1_000_000
    assert found["results"].keys() == loads_by_ranks.LOADS.keys()
    for result in found["results"].values():
        assert len(result["load_s"]) == 1 and min(*result["load_s"], result["first_load_s"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)  # processes, each with torch
def test_loads_of_replicas(tmp_path: Path) -> None:
    command = "load --ranks 4 --replicas --layers 3 --gib 0.03 --rounds 1 --pause 0"
    found = run(tmp_path, command)["load"]
    assert found["state"]["description"] == "3 layers, 4 replicas"
    (nbytes,) = found["results"]["asyncckpt, storage"]["read_bytes"]
    assert nbytes < 1.2 * found["state"]["bytes"]  # 0 if the folder is in memory
    assert "read / state" in (tmp_path / "out" / "README.md").read_text()


def is_of_unchanged(found: dict[str, Any], all_bytes: float) -> None:
    """Check the results: one save that counts, and all saves before it."""
    assert not found["left_out"]
    assert all(seconds and min(seconds) >= 0 for seconds in found["limits"].values())
    for name, result in found["results"].items():
        assert len(result["first"]) == unchanged.FIRST and 0 < result["call_s"][0] <= result["durable_s"][0]
        assert result["first"][0]["written"] >= all_bytes and result["worker_cpu_s"][0] > 0
        is_linked = name == unchanged.LINKED
        assert (result["written"][0] < all_bytes / 3) == is_linked and result["allocated"][0] >= result["written"][0]
        assert result["memory"][0] < 1.5 * all_bytes


@pytest.mark.slow
def test_unchanged(tmp_path: Path) -> None:
    found = run(tmp_path, "unchanged --gib 0.02 --changing-mib 1 --rounds 1 --pause 0")["unchanged"]
    assert len(found["results"]) == 4
    is_of_unchanged(found, 0.02 * (1 << 30))


@pytest.mark.slow
def test_unchanged_of_ranks(tmp_path: Path) -> None:
    found = run(tmp_path, "unchanged --gib 0.02 --changing-mib 1 --rounds 1 --pause 0 --ranks 2")["unchanged"]
    assert len(found["results"]) == 2 and 0 < found["changing"] < found["nbytes"] / 10
    is_of_unchanged(found, found["nbytes"])


@pytest.mark.slow
@pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing()))
def test_other_hosts(tmp_path: Path) -> None:
    found = run(tmp_path, "hosts --gib 0.01 --tensors 5 --hosts 2 --mbit 1000 --rounds 1")["hosts"]
    assert len(found["results"]) == 4
    # Hosts pass the bytes on to each other, with some overhead.
    assert all(0.9 < nbytes / 0.01 / (1 << 30) < 2.2 for nbytes in found["sent"].values())


@pytest.mark.slow
@pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing()))
def test_other_hosts_with_few_changes(tmp_path: Path) -> None:
    found = run(tmp_path, "hosts --sparse --gib 0.02 --tensors 5 --hosts 2 --mbit 1000 --rounds 1")["sparse"]
    sent = [found["sent"][f"{share:.0%} changed"] / found["nbytes"] for share in hosts.SHARES]
    # Spans with many changes travel whole.
    assert min(sent[:2]) > 0.9 and 0.1 > sent[2] > sent[3] > sent[4]


@vllm_engine.there
@pytest.mark.slow
def test_updates_of_vllm(tmp_path: Path) -> None:
    peer(VLLM)
    found = run(tmp_path, "vllm --gib 0.01 --rounds 1 --pause 0")["vllm"]
    assert not found["left_out"] and tuple(found["results"]) == vllm_updates.WAYS


@pytest.mark.slow
def test_exports(tmp_path: Path) -> None:
    found = run(tmp_path, "export --gib 0.005 --tensors 5 --rounds 1 --pause 0")["export"]
    assert not found["left_out"] and found["results"].keys() == exports.WAYS.keys()
    assert all(len(result["export_s"]) == 1 for result in found["results"].values())


@pytest.mark.slow
def test_telemetry(tmp_path: Path) -> None:
    found = run(tmp_path, "telemetry --state 5 --gib 0.001 --rounds 3 --pause 0")["telemetry"]
    assert (
        not found["left_out"]
        and [len(result[key]) for result in found["results"].values() for key in result] == [3] * 4
    )
    assert len(found["adapters"]) == 4 and all(cpu_s > 0 for cpu_s in found["adapters"].values())


STORE_PEERS = {"DCP save, s3fs": "s3fs", "DCP async_save, s3fs": "s3fs"}
STORE_PEERS |= {f"DCP {name}, S3StorageWriter": "s3torchconnector" for name in ("save", "async_save")}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store(tmp_path: Path) -> None:
    for name in ("moto", "boto3", "obstore"):
        pytest.importorskip(name)
    found = run(tmp_path, "store --gib 0.02 --tensors 5 --rounds 1 --pause 0")["store"]
    missing = {name for name, module in STORE_PEERS.items() if importlib.util.find_spec(module) is None}
    if "dcp-thread" in MISSING:
        missing |= {name for name in STORE_PEERS if "async" in name}
    assert found["results"].keys() == store.CONTESTANTS.keys() - missing and found["left_out"].keys() == missing
    assert found["loads"].keys() == {name for name, saver in store.LOADERS.items() if saver not in missing}
    for result in found["results"].values():
        assert 0 < result["blocked_s"][0] <= result["durable_s"][0]
    assert len(found["read_s"]) == 1 and all(len(seconds) == 1 for seconds in found["limits"].values())
    requests = found["requests"]
    assert requests["kinds"]["parts"] == 2 and requests["count"] == sum(requests["kinds"].values())
    assert requests["image"] < requests["sent"] < 1.1 * requests["image"]


def known() -> dict[str, Any]:
    """Return made-up results of saves: copies of 0.1 s, writes of 0.4 s."""

    def saves(blocked: float, durable: float) -> dict[str, Any]:
        spread = (0.5, 1, 9)
        columns = {"blocked_s": blocked, "free_s": blocked, "durable_s": durable}
        warm = {name: [value * factor for factor in spread] for name, value in columns.items()}
        return warm | {f"first_{name}": 7.0 for name in columns}

    return {
        "kind": "save",
        "label": "400",
        "machine": {"CPU": "one"},
        "settings": {},
        "state": {"name": "400", "description": "400 tensors", "tensors": 400, "bytes": 2**30, "device": "cpu"},
        "limits": {"memcpy": [0.3, 0.2, 0.2], "memcpy, all cores": [0.1, 0.1, 5.0], "direct write": [0.4, 0.4, 0.1]},
        "results": {"asyncckpt": saves(0.11, 0.55), "nvrx": saves(0.3, 1.1), "dcp-thread": saves(0.2, 2.0)},
        "left_out": {"torchsnapshot": "ModuleNotFoundError: No module named 'torchsnapshot'"},
    }


def test_arithmetic_of_saves() -> None:
    found = known()
    limits = figures.SaveLimits.of(found)
    assert limits.copy == 0.1 and limits.durable == pytest.approx(0.5)
    ours = figures.SaveFigures.of(found["results"]["asyncckpt"], limits)
    assert ours.blocked == 0.11 and ours.saves == 3 and ours.first_blocked == 7.0
    assert ours.blocked_ratio == pytest.approx(1.1) and ours.durable_ratio == pytest.approx(1.1)
    ratio, name = figures.sooner_than_peers(found) or (0, "")
    assert ratio == pytest.approx(2.0) and name == "nvrx"
    found["limits"]["pinned copy"] = [0.2]
    assert figures.copy_limit(found) == 0.2
    cold = figures.SaveFigures.of({name: 7.0 for name in found["results"]["nvrx"] if name.startswith("first")}, limits)
    assert cold.blocked is None and cold.durable_ratio is None and cold.saves == 0


def test_arithmetic_of_the_loop() -> None:
    result = {
        "cost_s": [0.2, 0.1, 0.9],
        "with_s": [2.2, 2.1, 2.9],
        "without_s": [2.0, 2.0, 2.0],
        "steps": [40.0, 40.0, 40.0],
        "fitted": [1.0, 0.0, 1.0],
    }
    found = figures.LoopFigures.of(result, 0.1)
    assert found.cost == 0.2 and found.steps == pytest.approx(4) and found.ratio == pytest.approx(2)
    assert found.low == pytest.approx(0.15) and found.high == pytest.approx(0.55) and found.late == 1


def test_arithmetic_of_loads() -> None:
    found = {
        "limits": {"memcpy": [0.1, 0.1], "memcpy, all cores": [0.2], "direct read": [0.3]},
        "results": {"dcp-load": {"load_s": [0.8, 1.2], "first_load_s": 2.0}},
    }
    rows = figures.load_figures(found)
    assert rows[figures.READ_AND_COPY].load == pytest.approx(0.4)
    assert rows["dcp-load"].read_ratio == pytest.approx(2.5) and rows["dcp-load"].copy_ratio == pytest.approx(10)


def test_tables_and_page(tmp_path: Path) -> None:
    results.write(known(), tmp_path)
    page = report.write(tmp_path).read_text()
    assert "| asyncckpt " in page and "110 ms" in page and "1.10x" in page
    assert "Left out: torchsnapshot, async: `ModuleNotFoundError: No module named 'torchsnapshot'`" in page
    assert "2.0 times sooner" in page
    picture = (tmp_path / "save-400.png").read_bytes()
    report.write(tmp_path)
    assert (tmp_path / "save-400.png").read_bytes() == picture, "the same figures make the same picture"
    assert tables.seconds(0.0994) == "99.4 ms" and tables.seconds(1.5) == "1.50 s" and tables.seconds(None) == ""
    assert tables.size(2**30 - 10) == "1 GiB" and tables.times(12.3) == "12x"


def test_one_that_fails_leaves_a_note() -> None:
    calls: list[str] = []

    def fails() -> float:
        calls.append("bad")
        if len(calls) > 1:
            raise RuntimeError("many words\nand the last line")
        return 1.0

    taken = take({"good": lambda: 2.0, "bad": fails}, Pace(rounds=3, pause=0), "test")
    assert taken.found == {"good": [2.0] * 4} and taken.left_out == {"bad": "RuntimeError: and the last line"}
    assert len(calls) == 2


def test_patience_and_budget() -> None:
    taken = take({"all": lambda: 1.0}, Pace(rounds=9, pause=0, budget=0), "test")
    assert len(taken.found["all"]) == 2
    taken = take({"slow": lambda: 1.0}, Pace(rounds=9, pause=0, patience=-1), "test")
    assert len(taken.found["slow"]) == 2


class Torn(TorchSave):
    """A contestant that saves values of two moments."""

    def save(self, number: int, state: State) -> Pending:
        name = next(iter(state["model"]))
        torn = state["model"][name].clone()
        torn[-1] += 1
        return super().save(number, state | {"model": state["model"] | {name: torn}})


def test_a_torn_checkpoint_is_found(tmp_path: Path) -> None:
    made = make(Request(name="20x4kB"))
    for kind in (TorchSave, Torn):
        (tmp_path / kind.__name__).mkdir()
        series = Series(kind(str(tmp_path / kind.__name__)), Trainer(made.state, "cpu"))
        series.save()
        if kind is Torn:
            with pytest.raises(RuntimeError, match="not of step"):
                series.check(made)
        else:
            series.check(made)


def test_steps_change_every_tensor() -> None:
    made = make(Request(name="gpt2", gib=0.005))
    trainer = Trainer(made.state, "cpu")
    tensors = [tensor for tensor in tensors_of(made.state)]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16, torch.float32}
    for number in range(1, CYCLE + 3):
        trainer.change()
        assert are_of(made.state, number) and not are_of(made.state, number + 1)
    trainer.step()
    assert are_of(made.state, CYCLE + 3) and all(mark.item() == 3 for mark in marks_of(made.state))
    assert all(tensor.view(-1)[0] == 3 == tensor.view(-1)[-1] for tensor in tensors)


@pytest.mark.parametrize(
    ("name", "billions", "tensors"),
    [("gpt2", 0.12444, 148), ("llama3-8b", 8.03026, 291), ("olmoe", 6.91916, 3219), ("deepseek-v3", 671.02640, 45395)],
)
def test_shapes_are_those_published(name: str, billions: float, tensors: int) -> None:
    architecture = models.ARCHITECTURES[name]
    shapes = dict(architecture.shapes(range(architecture.layers), range(architecture.experts)))
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(billions, rel=1e-4)
    assert len(shapes) == tensors
    part = architecture.fit(2**30)
    assert 0.85 < sum(map(math.prod, part.shapes.values())) * models.ADAM_BYTES / 2**30 < 1.15, part.description


def test_page_cache_of_files(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(os.urandom(3_000_000))
    assert files.cached_bytes(str(tmp_path)) >= 3_000_000
    files.sync(str(tmp_path))
    files.forget(str(tmp_path))
    assert files.cached_bytes(str(tmp_path)) < 3_000_000


def test_results_are_rounded(tmp_path: Path) -> None:
    found = results.result("save", "400", str(tmp_path), {"rounds": 1}, {"seconds": {"a": [1.23456789]}})
    assert found["seconds"] == {"a": [1.234568]} and found["machine"]["CPU"]
    assert json.loads(results.write(found, tmp_path).read_text()) == found == results.read(tmp_path)[0]
