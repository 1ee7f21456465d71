"""Test checkpoints on S3, served by moto. Some tests put a proxy with faults in between."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from s3.proxy import Asked, StoreProxy
from support import ranks
from support.checkpoints import complete_steps, verify
from support.object_stores import keys_below, s3_root, s3_server, set_environment
from support.states import same, small_state, zeros_like

from asyncckpt import Checkpointer
from asyncckpt.cli import main
from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    DamagedCheckpointError,
    StorageError,
    WorkerDiedError,
)
from asyncckpt.extension import Engine
from asyncckpt.storage.objects import objects_at

__all__ = ["s3_root", "s3_server"]

MiB = 1 << 20


def large_state(step: int) -> dict[str, Any]:
    """Return a state that is sent in three parts. The last part is small."""
    return {**small_state(), "large": torch.full((8 * MiB,), float(step)), "step": step}


def test_saves_and_loads(s3_root: str, capsys: pytest.CaptureFixture[str]) -> None:
    states = {step: large_state(step) for step in (1, 2, 3)}
    with Checkpointer(s3_root, Config(keep_last=2)) as checkpointer:
        for step, state in states.items():
            assert checkpointer.save(step, state).result(60) == f"{s3_root}/step-{step:08d}"
        checkpointer.wait(60)
    with Checkpointer(f"{s3_root}/") as checkpointer:
        assert checkpointer.steps() == [2, 3] and checkpointer.latest() == 3
        assert checkpointer.load(into := zeros_like(states[3])) == 3 and same(into, states[3])
        assert checkpointer.load(into, step=2) == 2 and same(into, states[2])
        twice = checkpointer.save(3, states[3])  # the step was abandoned, so its checkpoint is set aside
        assert twice.result(60) and checkpointer.steps() == [2, 3]
    there = ("step-00000002", "step-00000003", "step-00000003.abandoned-1")
    assert {key.split("/")[1] for key in keys_below(s3_root) if "step-00000001/asyncckpt.json" not in key} == {*there}
    assert main(["ls", s3_root]) == main(["inspect", s3_root]) == main(["verify", s3_root]) == 0
    assert "step-00000003: good" in capsys.readouterr().out


def test_a_root_that_is_a_checkpoint_is_refused(s3_root: str) -> None:
    with Checkpointer(s3_root) as checkpointer:
        path = checkpointer.save(100, small_state()).result(60)
    with Checkpointer(path) as checkpointer:  # no request to the store yet
        for call in (checkpointer.latest, lambda: checkpointer.load(small_state())):
            with pytest.raises(CheckpointExistsError, match=f"give it {s3_root};"):
                call()


STOCK = """
import sys, torch
import torch.distributed.checkpoint as dcp
into = {"weight": torch.zeros(3), "large": torch.zeros(5 << 20), "step": 0}
dcp.load(into, checkpoint_id=sys.argv[1], no_dist=True)
assert not [name for name in sys.modules if name.startswith("asyncckpt")]
print(into["weight"].tolist(), into["large"].sum().item(), into["step"])
"""


def loaded_by_stock(path: str) -> str:
    """Load with stock DCP. s3fs finds the store by the same environment variables."""
    return subprocess.run([sys.executable, "-c", STOCK, path], capture_output=True, text=True, timeout=100).stdout


def test_stock_readers(s3_root: str) -> None:
    state = {"weight": torch.arange(3.0), "large": torch.ones(5 * MiB), "step": 4}
    with Checkpointer(s3_root) as checkpointer:
        path = checkpointer.save(1, state).result(60)
    assert loaded_by_stock(path) == f"[0.0, 1.0, 2.0] {5.0 * MiB} 4\n"
    with Engine(alone=True) as engine:
        engine.save(path, {**state, "weight": torch.ones(3)}, existing="replace").result(60)
    assert loaded_by_stock(path) == f"[1.0, 1.0, 1.0] {5.0 * MiB} 4\n"
    assert len([key for key in keys_below(path) if key.endswith(".distcp")]) == 1


def test_what_is_sent(s3_root: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save sends each byte once, with few other requests."""
    with StoreProxy(s3_server) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root) as checkpointer:
            for step in (1, 2):
                proxy.asked.clear()
                checkpointer.save(step, large_state(step)).result(60)
        sent = [each for each in proxy.asked if each.method in ("PUT", "POST")]
        data = [each for each in sent if ".distcp" in each.path]
        image = sum(each.nbytes for each in data if each.method == "PUT")
        assert len(data) == 3 + 2  # begin, three parts of 16 MiB, complete
        assert sum(each.nbytes for each in sent) <= 1.01 * image
        assert len(proxy.asked) <= len(data) + 8, [(each.method, each.path) for each in proxy.asked]


def test_a_damaged_one(s3_root: str) -> None:
    states = {step: large_state(step) for step in (1, 2)}
    with Checkpointer(s3_root) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state).result(60)
        (data,) = [key for key in keys_below(s3_root) if key.endswith(".distcp") and "step-00000002" in key]
        objects = objects_at(s3_root)
        content = bytearray(objects.get(data)[0])  # type: ignore[index]
        content[len(content) // 2] ^= 1
        objects.put(data, bytes(content))
        assert "large" in str(verify(f"{s3_root}/step-00000002").damages[0])
        with pytest.raises(DamagedCheckpointError, match="large"):
            checkpointer.load(zeros_like(states[2]))
        assert checkpointer.load(into := zeros_like(states[1]), fallback=True) == 1 and same(into, states[1])
        assert checkpointer.steps() == [1]
        checkpointer.save(2, states[2]).result(60)
        assert checkpointer.load(into) == 2 and same(into, states[2])
    assert any("step-00000002.damaged-1" in key for key in keys_below(s3_root))


def killing(workers: list[int]) -> Callable[[Asked], str | None]:
    """Return a fault that kills one of ``workers`` once it has begun to send both data and an index."""
    begun: set[str] = set()

    def kill(asked: Asked) -> str | None:
        begun.update(kind for kind in (".distcp", ".index.json") if workers and kind in asked.path)
        if workers and len(begun) == 2:
            os.kill(workers.pop(), signal.SIGKILL)
            return "cut"
        return None

    return kill


def test_a_worker_that_is_killed_while_it_sends(s3_root: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer removes the uploaded parts, and the next save works."""
    workers: list[int] = []

    state = large_state(2)
    with StoreProxy(s3_server, killing(workers)) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root) as checkpointer:
            checkpointer.prepare(state)
            assert checkpointer._engine.worker is not None
            workers.append(checkpointer._engine.worker.pid)
            with pytest.raises(WorkerDiedError):
                checkpointer.save(1, state).result(60)
            assert any(".distcp" in asked.path for asked in proxy.asked)
            assert checkpointer.steps() == [] and not [key for key in keys_below(s3_root) if ".parts-" in key]
            checkpointer.save(2, state).result(60)
            assert checkpointer.steps() == [2]
            assert checkpointer.load(into := zeros_like(state)) == 2 and same(into, state)


TRAINER = """
import os, sys, torch
from asyncckpt import Checkpointer
state = {"weight": torch.arange(6 << 20, dtype=torch.float32), "step": 1}
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, state)
os._exit(1)
"""


@pytest.mark.usefixtures("forkserver")
def test_a_trainer_that_dies(s3_root: str) -> None:
    assert ranks.script(TRAINER, s3_root) == 1
    into: dict[str, Any] = {"weight": torch.zeros(6 * MiB), "step": 0}
    with Checkpointer(s3_root) as checkpointer:
        assert checkpointer.load(into) == 1
        assert torch.equal(into["weight"], torch.arange(6 * MiB, dtype=torch.float32)) and into["step"] == 1
        deadline = time.monotonic() + 60
        while checkpointer.steps() != [1]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def saves_and_loads(root: str, config: Config) -> list[int]:
    rank = dist.get_rank()
    state = {"shared": torch.arange(1000.0), f"own-{rank}": torch.full((3 * MiB,), float(rank)), "step": 0}
    with Checkpointer(root, config) as checkpointer:
        for step in (1, 2, 3):
            state["step"] = step
            checkpointer.save(step, state).result(100)
        into = zeros_like(state)
        assert checkpointer.load(into) == 3 and same(into, state)
        return checkpointer.steps()


@pytest.mark.usefixtures("forkserver")
def test_many_ranks(s3_root: str, tmp_path: Path) -> None:
    assert ranks.run(3, saves_and_loads, s3_root, ranks.CONSTANT, folder=tmp_path) == [[1, 2, 3]] * 3
    assert all(not verify(f"{s3_root}/step-{step:08d}").damages for step in (1, 2, 3))


def test_uploads(s3_root: str, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload from a local folder sends each byte once. Its result equals a direct save."""
    states = {step: {"weight": torch.ones(3), "large": torch.ones(5 * MiB), "step": step} for step in range(1, 5)}
    config = Config(local_root=str(tmp_path), upload_every=2, keep_last=1, link_unchanged=False)
    with StoreProxy(s3_server) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root, config) as checkpointer:
            for step, state in states.items():
                checkpointer.save(step, state).result(60)
                checkpointer.wait_uploads(60)
            local = checkpointer.save(5, states[4]).result(60)
            assert checkpointer.load(zeros_like(states[4])) == 5
        sent = [each for each in proxy.asked if each.method in ("PUT", "POST")]
        image = sum(file.stat().st_size for file in Path(local).iterdir())
        assert sum(each.nbytes for each in sent) <= 2 * 1.01 * image
        assert len([each for each in sent if ".distcp" in each.path]) == 2 * (2 + 2)
    shutil.rmtree(tmp_path)
    assert not verify(f"{s3_root}/step-00000004").damages
    assert loaded_by_stock(f"{s3_root}/step-00000004") == f"[1.0, 1.0, 1.0] {5.0 * MiB} 4\n"
    with Checkpointer(s3_root, config) as checkpointer:
        assert checkpointer.steps() == [4] and checkpointer.load(into := zeros_like(states[4])) == 4
        assert same(into, states[4]) and checkpointer.loaded is not None and checkpointer.loaded.source == "storage"


@pytest.mark.parametrize("where", ["there", "by a local folder"])
def test_what_does_not_change_is_sent_once(
    s3_root: str, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    frozen = {f"base.{number}": torch.randn(MiB) for number in range(3)}  # 12 MiB
    local = str(tmp_path) if where == "by a local folder" else None
    config = Config(local_root=local, keep_last=2, assume_unchanged=["base.*"])
    sent = []
    with StoreProxy(s3_server) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root, config) as checkpointer:
            for step in range(1, 7):
                before = len(proxy.asked)
                state = {**frozen, "adapter": torch.full((1000,), float(step)), "step": step}
                checkpointer.save(step, state).result(60)
                checkpointer.wait_uploads(60)
                sent.append(sum(each.nbytes for each in proxy.asked[before:] if each.method in ("PUT", "POST")) / MiB)
    assert sent[0] > 12 and max(sent[1:]) < 0.2
    assert not verify(f"{s3_root}/step-00000006").damages
    loaded = zeros_like(state)
    with Checkpointer(s3_root) as checkpointer:
        assert checkpointer.load(loaded, memory=False) == 6 and same(loaded, state)


def test_an_upload_whose_worker_is_killed(s3_root: str, s3_server: str, tmp_path: Path) -> None:
    """The next worker uploads the local checkpoint, and no partial upload stays."""
    workers: list[int] = []

    state = large_state(1)
    with StoreProxy(s3_server, killing(workers)) as proxy, pytest.MonkeyPatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root, Config(local_root=str(tmp_path), upload_every=10)) as checkpointer:
            checkpointer.prepare(state)
            assert checkpointer._engine.worker is not None
            workers.append(checkpointer._engine.worker.pid)
            checkpointer.save(10, state).result(60)
            with contextlib.suppress(WorkerDiedError):  # the next worker may have uploaded it already
                checkpointer.wait_uploads(60)
            checkpointer.save(11, state).result(60)
            checkpointer.wait_uploads(60)
            assert checkpointer._engine.worker.pid not in workers
            assert complete_steps(s3_root) == [10] and checkpointer.steps() == [10, 11]


def test_an_upload_that_the_store_refuses(s3_root: str, s3_server: str, tmp_path: Path) -> None:
    """A refused upload fails no save. The next save retries the upload."""
    spoiled = True
    with StoreProxy(s3_server, lambda _: "403" if spoiled else None) as proxy, pytest.MonkeyPatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root, Config(local_root=str(tmp_path), upload_every=10)) as checkpointer:
            checkpointer.save(10, small_state()).result(60)
            for _ in range(2):
                with pytest.raises(StorageError, match="permissions"):
                    checkpointer.wait_uploads(60)
            spoiled = False
            checkpointer.save(11, small_state()).result(60)
            checkpointer.wait_uploads(60)
            assert complete_steps(s3_root) == [10]


@pytest.mark.parametrize("seed", range(2))
def test_uploads_with_faults_at_random(s3_root: str, s3_server: str, tmp_path: Path, seed: int) -> None:
    dice, quiet = random.Random(seed), False
    state = large_state(1)

    def spoil(asked: Asked) -> str | None:
        return None if quiet or dice.random() > 0.12 else dice.choice(asked.faults)

    uploaded = []
    with StoreProxy(s3_server, spoil) as proxy, pytest.MonkeyPatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        config = Config(local_root=str(tmp_path), local_keep_last=20, timeout=100)
        with Checkpointer(s3_root, config) as checkpointer:
            for step in range(1, 9):
                checkpointer.save(step, state).result(100)
                with contextlib.suppress(CheckpointError):
                    checkpointer.wait_uploads(100)
                    uploaded.append(step)
            quiet = True
            assert len(uploaded) > 4 and {*uploaded} <= {*complete_steps(s3_root)}
            assert checkpointer.steps() == [*range(1, 9)]
    assert all(not verify(f"{s3_root}/step-{step:08d}").damages for step in complete_steps(s3_root))


def test_where_one_is_already(s3_root: str) -> None:
    with Checkpointer(s3_root) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
    with Checkpointer(s3_root) as checkpointer, pytest.raises(CheckpointExistsError, match="step 1"):
        checkpointer.save(1, small_state()).result(60)


def test_what_is_not_for_stores(s3_root: str) -> None:
    with pytest.raises(StorageError, match="these are s3://bucket/folder"):
        Checkpointer("ftp://host/run")
    with pytest.raises(StorageError, match="these are s3://"):
        Checkpointer("s3://bucket/../run")
    with Engine(alone=True) as engine, pytest.raises(StorageError, match="not to object stores"):
        engine.save_file(f"{s3_root}/file.pt", {"a": torch.ones(2)})


@pytest.mark.parametrize("trouble", ["no bucket", "no endpoint", "refused"])
def test_a_store_that_is_not_there(s3_root: str, s3_server: str, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing store causes one clear error. The training continues, and saves work again once the store does."""
    spoiled = trouble == "refused"
    root = s3_root.replace("checkpoints", "missing") if trouble == "no bucket" else s3_root
    with StoreProxy(s3_server, lambda asked: "403" if spoiled else None) as proxy:
        set_environment(monkeypatch, "http://127.0.0.1:9" if trouble == "no endpoint" else proxy.endpoint)
        with Checkpointer(root) as checkpointer:
            begun = time.monotonic()
            save = checkpointer.save(1, small_state())
            assert time.monotonic() - begun < 20  # the call did not wait for the store
            said = {"no bucket": "no such bucket", "no endpoint": "network", "refused": "permissions"}[trouble]
            with pytest.raises(StorageError, match=said) as caught:
                save.result(100)
            assert root in str(caught.value) and "Debug" not in str(caught.value)
            spoiled = False
            if trouble == "refused":
                checkpointer.save(2, small_state()).result(60)
                assert checkpointer.steps() == [2]


@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random(s3_root: str, s3_server: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store holds exactly the steps that were reported as saved."""
    dice, spoiled = random.Random(seed), 0
    quiet = False

    def spoil(asked: Asked) -> str | None:
        nonlocal spoiled
        if quiet or dice.random() > 0.12:
            return None
        spoiled += 1
        return dice.choice(asked.faults)

    states, saved = {step: large_state(step) if step % 3 else small_state() for step in range(1, 11)}, []
    with StoreProxy(s3_server, spoil) as proxy, monkeypatch.context() as patch:
        set_environment(patch, proxy.endpoint)
        with Checkpointer(s3_root, Config(timeout=100, commit_timeout=100)) as checkpointer:
            for step, state in states.items():
                with contextlib.suppress(CheckpointError):
                    checkpointer.save(step, state).result(100)
                    saved.append(step)
    assert spoiled > 10 and len(saved) > 5
    set_environment(monkeypatch, s3_server)
    quiet = True
    with Checkpointer(s3_root) as checkpointer:
        assert checkpointer.steps() == saved
        for step in saved:
            assert not verify(f"{s3_root}/step-{step:08d}").damages
            assert checkpointer.load(into := zeros_like(states[step]), step=step) == step and same(into, states[step])
