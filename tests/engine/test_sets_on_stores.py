"""Test sets of files on S3, served by moto. Some tests put a proxy with faults in between."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from s3.proxy import Asked, StoreProxy
from safetensors.torch import load_file
from support import ranks
from support.checkpoints import complete_steps, verify
from support.file_sets import LARGE, make, optimizer, weights
from support.object_stores import keys_below, s3_root, s3_server, set_environment
from support.states import same, stock_load, zeros_like

from asyncckpt import Checkpointer, FileSet
from asyncckpt.cli import main
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, MismatchError, UnsavableStateError
from asyncckpt.extension import Engine
from asyncckpt.storage.objects import objects_at, split_address

__all__ = ["s3_root", "s3_server"]

MiB = 1 << 20
NAMED = {
    "dcp/model_0/metadata.json",
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "tokenizer/deep/vocab.txt",
    "trainer_state.json",
}


def state_of(seed: float) -> dict[str, Any]:
    return {"weight": torch.full((50_000,), float(seed)), "step": int(seed)}


def whole(seed: float) -> FileSet:
    """Return a set with all kinds of files, and a state for ``Checkpointer.load``."""
    files = make(seed)
    files.add_dcp_folder("", state_of(seed))
    return files


def downloaded(address: str, folder: Path) -> set[str]:
    """Download like ``aws s3 cp --recursive --exclude '*.parts-*' --include '*.distcp'``.

    Returns:
        The names of the files outside ``.parts-*`` folders.
    """
    objects, key = objects_at(address), split_address(address)[1]
    names = set()
    for each in keys_below(address):
        if ".parts-" not in each or each.endswith(".distcp"):
            path = folder / each.removeprefix(f"{key}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(objects.get(each)[0])  # type: ignore[index]
            names.add(path.relative_to(folder).as_posix())
    return {name for name in names if ".parts-" not in name}


def check(address: str, seed: float, folder: Path, has_state: bool = True) -> None:
    """Check that stock readers find exactly the files of ``whole``, or of ``make`` without ``has_state``."""
    top = {".metadata"} if has_state else set()
    assert downloaded(address, folder) == NAMED | top | {"asyncckpt.json", "dcp/model_0/.metadata"}
    assert same(torch.load(folder / "optimizer.pt"), optimizer(seed)) and torch.load(folder / "scheduler.pt")
    loaded, expected = load_file(folder / "model.safetensors"), weights(seed)
    assert loaded.keys() == expected.keys() and all(same(loaded[name], expected[name]) for name in expected)
    assert json.loads((folder / "trainer_state.json").read_bytes()) == {"history": [seed] * int(seed)}
    inner: dict[str, Any] = {"model": {"w": torch.zeros(100)}, "n": -1.0}
    stock_load(inner, folder / "dcp/model_0")
    assert inner["n"] == seed and torch.equal(inner["model"]["w"], torch.full((100,), float(seed)))
    if has_state:
        stock_load(into := zeros_like(state_of(seed)), folder)
        assert same(into, state_of(seed))
    assert not verify(address).damages


STOCK = """
import sys, torch
import torch.distributed.checkpoint as dcp
into = {"model": {"w": torch.zeros(100)}, "n": 0.0}
dcp.load(into, checkpoint_id=sys.argv[1] + "/dcp/model_0", no_dist=True)
top = {"weight": torch.zeros(50_000), "step": 0}
dcp.load(top, checkpoint_id=sys.argv[1], no_dist=True)
assert not [name for name in sys.modules if name.startswith("asyncckpt")]
print(into["model"]["w"].sum().item(), into["n"], top["weight"].sum().item(), top["step"])
"""


def loaded_by_stock(path: str) -> str:
    """Load with stock DCP. s3fs finds the store by the same environment variables."""
    return subprocess.run([sys.executable, "-c", STOCK, path], capture_output=True, text=True, timeout=100).stdout


def test_saves_and_loads(s3_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(s3_root, Config(keep_last=2)) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, whole(step)).result(60) == f"{s3_root}/step-{step:08d}"
            check(f"{s3_root}/step-{step:08d}", step, tmp_path / str(step))
    with Checkpointer(s3_root) as checkpointer:
        assert checkpointer.steps() == [2, 3]
        assert checkpointer.load(into := zeros_like(state_of(3))) == 3 and same(into, state_of(3))
        checkpointer.save(4, make(4)).result(60)
        with pytest.raises(MismatchError, match="a set of files"):
            checkpointer.load(into)
    check(f"{s3_root}/step-00000004", 4, tmp_path / "4", has_state=False)
    assert {key.split("step-")[1] for key in keys_below(s3_root) if "step-00000001" in key} == {
        "00000001/asyncckpt.json"  # records the revoked attempt
    }
    assert loaded_by_stock(f"{s3_root}/step-00000003") == "300.0 3 150000.0 3\n"
    assert main(["ls", s3_root]) == main(["verify", s3_root]) == main(["inspect", f"{s3_root}/step-00000003"]) == 0
    shown = capsys.readouterr().out
    assert "step-00000004 (file set): good" in shown
    assert "model.safetensors/layer.10" in shown and "dcp/model_0/model.w" in shown and "trainer_state.json" in shown


def large_files(seed: float) -> FileSet:
    files = FileSet()
    files.add_dcp_folder("sharded/all", {"w": torch.full((5 * MiB,), float(seed))})
    files.add_torch_file("large.pt", [torch.full((5 * MiB,), float(seed)), torch.full((3 * MiB,), float(seed))])
    files.add_safetensors("large.safetensors", {"w": torch.full((5 * MiB,), float(seed))})
    files.add_bytes("small.json", b"{}")
    return files


def test_what_is_sent(s3_root: str, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save sends each byte once, asks the store for one copy per name, and makes few other requests."""
    with StoreProxy(s3_server) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root) as checkpointer:
            for step in (1, 2):
                proxy.asked.clear()
                checkpointer.save(step, large_files(step)).result(60)
        sent = [each for each in proxy.asked if each.method in ("PUT", "POST")]
        large = [each for each in sent if ".parts-" in each.path and "large" in each.path]
        assert len(large) == (2 + 2) + (2 + 3)  # begin, parts of 16 MiB, complete
        assert sum(each.nbytes for each in sent) <= 1.01 * (5 + 8 + 5) * 4 * MiB
        copies = [each for each in sent if "/.parts-" not in each.path and "large" in each.path]
        assert len(copies) == 2 and not any(each.nbytes for each in copies)
        # The others: four for DCP's data, three indexes, two for the small file, two for .metadata, eight for the rest.
        assert len(proxy.asked) <= 9 + 2 + 4 + 3 + 2 * 2 + 8, [(each.method, each.path) for each in proxy.asked]
    downloaded(f"{s3_root}/step-00000002", tmp_path)
    assert torch.load(tmp_path / "large.pt")[1].tolist()[-1] == 2.0
    assert load_file(tmp_path / "large.safetensors")["w"][-1] == 2.0
    stock_load(into := {"w": torch.zeros(5 * MiB)}, tmp_path / "sharded" / "all")
    assert into["w"][0] == 2.0 and not verify(f"{s3_root}/step-00000002").damages


@pytest.mark.parametrize("existing", ["replace", "set aside"])
def test_what_stands_there_already(s3_root: str, tmp_path: Path, existing: Any) -> None:
    """No object of the old set stays at a name that the new set does not use."""
    path = f"{s3_root}/it"
    with Engine(alone=True) as engine:
        first = make(1)
        first.add_bytes("of the first/alone.txt", b"1")
        engine.save(path, first).result(60)
        assert any("alone.txt" in key and ".parts-" not in key for key in keys_below(path))
        engine.save(path, whole(2), existing=existing).result(60)
        check(path, 2, tmp_path / "2")
        engine.save(path, make(3), existing=existing).result(60)
        check(path, 3, tmp_path / "3", has_state=False)
        engine.save(path, state_of(4), existing=existing).result(60)
        assert downloaded(path, tmp_path / "4") == {"asyncckpt.json", ".metadata"}
        assert len({key.split(".parts-")[1][:32] for key in keys_below(path) if ".parts-" in key}) == (
            1 if existing == "replace" else 4
        )
        objects_at(path).put(f"{split_address(path)[1]}/tokenizer/mine", b"mine")
        with pytest.raises(CheckpointError, match="not only one"):
            engine.save(path, make(5), existing="replace").result(60)
    if existing == "set aside":
        assert not verify(f"{path}.abandoned-1").damages and not verify(f"{path}.abandoned-2").damages


def is_at_its_name(asked: Asked) -> bool:
    return asked.method == "PUT" and not any(part in asked.path for part in (".parts-", "asyncckpt", "?"))


def test_a_worker_that_is_killed_while_it_copies(
    s3_root: str, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is committed and loads. The next worker makes the missing copies for stock readers."""
    workers: list[int] = []

    def kill(asked: Asked) -> str | None:
        if workers and is_at_its_name(asked) and "scheduler" in asked.path:
            os.kill(workers.pop(), signal.SIGKILL)
            return "cut"
        return None

    path = f"{s3_root}/step-00000001"
    with StoreProxy(s3_server, kill) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root) as checkpointer:
            checkpointer.prepare(whole(1))
            assert checkpointer._engine.worker is not None
            workers.append(checkpointer._engine.worker.pid)
            assert checkpointer.save(1, whole(1)).result(60) == path
            assert ".metadata" not in downloaded(path, tmp_path / "before")
            assert checkpointer.load(into := zeros_like(state_of(1))) == 1 and same(into, state_of(1))
            assert not verify(path).damages
            checkpointer.save(2, whole(2)).result(60)
    for step in (1, 2):
        check(f"{s3_root}/step-{step:08d}", step, tmp_path / str(step))


def test_a_worker_that_is_killed_while_it_sends(
    s3_root: str, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uploaded objects are removed, also in nested folders."""
    workers: list[int] = []

    def kill(asked: Asked) -> str | None:
        if workers and ".distcp" in asked.path:  # the file that is sent last
            os.kill(workers.pop(), signal.SIGKILL)
            return "cut"
        return None

    with StoreProxy(s3_server, kill) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root) as checkpointer:
            checkpointer.prepare(whole(1))
            assert checkpointer._engine.worker is not None
            workers.append(checkpointer._engine.worker.pid)
            with pytest.raises(CheckpointError, match="worker"):
                checkpointer.save(1, whole(1)).result(60)
            assert any("dcp/model_0/.parts-" in asked.path for asked in proxy.asked)
            assert checkpointer.steps() == [] and not [key for key in keys_below(s3_root) if ".parts-" in key]
            checkpointer.save(1, whole(2)).result(60)
    check(f"{s3_root}/step-00000001", 2, tmp_path)


TRAINER = """
import os, sys
from asyncckpt import Checkpointer
from support.file_sets import make
Checkpointer(sys.argv[1]).save(1, make(1))
os._exit(1)
"""


@pytest.mark.usefixtures("forkserver")
def test_a_trainer_that_dies(s3_root: str, tmp_path: Path) -> None:
    assert ranks.script(TRAINER, s3_root) == 1
    deadline = time.monotonic() + 60
    path = f"{s3_root}/step-00000001"
    while complete_steps(s3_root) != [1] or f"{split_address(path)[1]}/dcp/model_0/.metadata" not in keys_below(path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    check(path, 1, tmp_path, has_state=False)


def saves(root: str, config: Config) -> list[int]:
    rank = dist.get_rank()
    with Checkpointer(root, config) as checkpointer:
        for step in (1, 2, 3):
            files = FileSet()
            files.add_dcp_folder("shared", {f"own-{rank}": torch.full((100,), float(step)), "step": step})
            files.add_torch_file(f"rank_{rank}.pt", torch.full((LARGE,), float(step + rank)))
            files.add_bytes(f"rng/state_{rank}", bytes([step, rank]))
            checkpointer.save(step, files).result(100)
        return checkpointer.steps()


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("tiers", [False, True])
def test_many_ranks(s3_root: str, tmp_path: Path, tiers: bool) -> None:
    config = Config(timeout=60, local_root=str(tmp_path / "fast")) if tiers else ranks.CONSTANT
    assert ranks.run(2, saves, s3_root, config, folder=tmp_path) == [[1, 2, 3]] * 2
    for step in (1, 2, 3) if not tiers else complete_steps(s3_root):
        names = downloaded(f"{s3_root}/step-{step:08d}", folder := tmp_path / str(step))
        own = {f"rank_{rank}.pt" for rank in range(2)} | {f"rng/state_{rank}" for rank in range(2)}
        assert names == own | {"shared/.metadata", "asyncckpt.json"}
        assert [torch.load(folder / f"rank_{rank}.pt")[-1] for rank in range(2)] == [step, step + 1]
        into: dict[str, Any] = {"own-0": torch.zeros(100), "own-1": torch.zeros(100), "step": 0}
        stock_load(into, folder / "shared")
        assert into["step"] == step and into["own-1"][5] == into["own-0"][5] == step
        assert not verify(f"{s3_root}/step-{step:08d}").damages
    assert 3 in complete_steps(s3_root)


def test_uploads(s3_root: str, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(local_root=str(tmp_path / "fast"), upload_every=2)
    with StoreProxy(s3_server) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root, config) as checkpointer:
            for step in (1, 2):
                local = checkpointer.save(step, whole(step)).result(60)
            checkpointer.wait_uploads(60)
        image = sum(file.stat().st_size for file in Path(local).rglob("*") if file.is_file())
        assert sum(each.nbytes for each in proxy.asked if each.method in ("PUT", "POST")) <= 1.02 * image
    assert complete_steps(s3_root) == [2]
    check(f"{s3_root}/step-00000002", 2, tmp_path / "2")
    with Checkpointer(s3_root) as checkpointer:
        assert checkpointer.load(into := zeros_like(state_of(2))) == 2 and same(into, state_of(2))


@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random(
    s3_root: str, s3_server: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step that was reported as saved is intact. In the end stock readers find all its files."""
    dice, spoiled, saved = random.Random(seed), 0, []

    def spoil(asked: Asked) -> str | None:
        nonlocal spoiled
        if dice.random() > 0.1:
            return None
        spoiled += 1
        return dice.choice(asked.faults)

    with StoreProxy(s3_server, spoil) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root, Config(timeout=100, commit_timeout=100)) as checkpointer:
            for step in range(1, 9):
                with contextlib.suppress(CheckpointError):
                    checkpointer.save(step, whole(step)).result(100)
                    saved.append(step)
    assert spoiled > 10 and len(saved) > 4
    set_environment(monkeypatch, s3_server)
    with Checkpointer(s3_root) as checkpointer:
        assert checkpointer.steps() == saved
        checkpointer.save(9, whole(9)).result(60)  # the worker of this save sweeps
    for step in (*saved, 9):
        check(f"{s3_root}/step-{step:08d}", step, tmp_path / str(step))


@pytest.mark.parametrize("file", ["optimizer.pt", "__0_0.distcp", "trainer_state.json", "dcp/model_0/.metadata"])
def test_a_bad_byte_is_found(s3_root: str, file: str) -> None:
    with Checkpointer(s3_root) as checkpointer:
        path = checkpointer.save(2, make(2)).result(60)
    objects = objects_at(s3_root)
    (key,) = [key for key in keys_below(path) if key.endswith(file) and ".parts-" in key]
    content = bytearray(objects.get(key)[0])  # type: ignore[index]
    content[len(content) // 2] ^= 1
    objects.put(key, bytes(content))
    (damage,) = verify(path).damages
    assert file in str(damage.path)
    objects.delete([key])
    (damage,) = verify(path).damages  # the copy at the file's own name does not replace it
    assert file in str(damage.path) and "missing" in damage.message


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("name", [".parts-0/a", "deep/a.parts-0", "deep/asyncckpt.json", "deep/a\nb", "\udcff"])
def test_names_that_are_not_for_stores(s3_root: str, tmp_path: Path, name: str, tiers: bool) -> None:
    files = make(1)
    files.add_bytes(name, b"")
    with Checkpointer(s3_root, Config(local_root=str(tmp_path) if tiers else None)) as checkpointer:
        with pytest.raises(UnsavableStateError, match="on an object store"):
            checkpointer.save(1, files)
        checkpointer.save(1, make(1)).result(60)
    check(f"{s3_root}/step-00000001", 1, tmp_path / "1", has_state=False)


def test_a_file_of_a_set_is_verified_alone(s3_root: str) -> None:
    with Checkpointer(s3_root) as checkpointer:
        checkpointer.save(1, whole(1)).result(60)
    address = f"{s3_root}/step-00000001"
    assert main(["verify", f"{address}/model.safetensors"]) == 0
    objects = objects_at(address)
    (where,) = (each for each in keys_below(address) if ".parts-" in each and each.endswith("/model.safetensors"))
    data = bytearray(objects.get(where)[0])  # type: ignore[index]
    data[-1] ^= 1
    objects.put(where, bytes(data))
    assert main(["verify", f"{address}/model.safetensors"]) == 1
