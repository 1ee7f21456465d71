"""Test saves to a local folder, and uploads to the root. The root is another folder, as on a shared disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.checkpoints import complete_steps, read_manifest, verify
from support.states import same, small_state, zeros_like
from support.workers import FAULTY, Faulty, wait_for, wait_reached

from asyncckpt import Checkpointer, FileSet
from asyncckpt.config import Config
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError, WorkerDiedError
from asyncckpt.link import endpoint


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    """Return the path of the local folder's disk."""
    return tmp_path / "nvme"


def local_of(checkpointer: Checkpointer) -> str:
    assert checkpointer._tiers.local is not None
    return checkpointer._tiers.local


def source_of(checkpointer: Checkpointer) -> str:
    assert checkpointer.loaded is not None
    return checkpointer.loaded.source


def flip_a_byte(path: str) -> None:
    (file,) = Path(path).glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DYING = """
import os, sys, torch
from asyncckpt import Checkpointer, Config
checkpointer = Checkpointer(sys.argv[1], Config(local_root=sys.argv[2], upload_every=2))
step = int(sys.argv[3])
checkpointer.save(step, {"weight": torch.arange(100.0), "step": step}).result(60)
os._exit(1)
"""


def test_each_save_is_local_and_some_are_uploaded(root: Path, fast: Path) -> None:
    states = {step: small_state() for step in range(1, 8)}
    config = Config(local_root=str(fast), local_keep_last=2, upload_every=2, keep_last=2, keep_every=4)
    with Checkpointer(root, config) as checkpointer:
        for step, state in states.items():
            path = checkpointer.save(step, state, upload=True if step == 7 else None).result(60)
            assert path == f"{local_of(checkpointer)}/step-{step:08d}"
            checkpointer.wait_uploads(60)
        local = local_of(checkpointer)
        assert complete_steps(local) == [6, 7] and complete_steps(str(root)) == [4, 6, 7]
        assert checkpointer.steps() == [4, 6, 7] and checkpointer.latest() == 7
        assert checkpointer.load(into := zeros_like(states[7])) == 7 and source_of(checkpointer) == "local"
        assert same(into, states[7])
        assert checkpointer.load(into, step=4) == 4 and source_of(checkpointer) == "storage" and same(into, states[4])
    assert all(not verify(str(root / f"step-{step:08d}")).damages for step in (4, 6, 7))
    kept = read_manifest(str(root / "step-00000004")), read_manifest(f"{local}/step-00000006")
    assert kept[0].keep and not kept[1].keep
    assert sorted(os.listdir(root)) == ["asyncckpt.lock", *(f"step-{step:08d}" for step in (4, 6, 7))]
    # Another host does not see the local folder.
    shutil.rmtree(fast)
    with Checkpointer(root, config) as checkpointer:
        assert checkpointer.load(into) == 7 and source_of(checkpointer) == "storage" and same(into, states[7])


def test_a_copy_that_is_damaged(root: Path, fast: Path) -> None:
    state = small_state()
    with Checkpointer(root, Config(local_root=str(fast))) as checkpointer:
        for step in (1, 2):
            path = checkpointer.save(step, state).result(60)
            checkpointer.wait_uploads(60)
        flip_a_byte(path)
        assert checkpointer.load(into := zeros_like(state)) == 2 and source_of(checkpointer) == "storage"
        assert same(into, state) and os.path.exists(path)
        assert checkpointer.load(into, fallback=True) == 2 and source_of(checkpointer) == "storage"
        assert not os.path.exists(path) and os.path.exists(f"{path}.damaged-1")
        flip_a_byte(str(root / "step-00000002"))
        assert checkpointer.load(into, fallback=True) == 1 and source_of(checkpointer) == "local"
        assert checkpointer.steps() == [1]


@pytest.mark.usefixtures("forkserver")
def test_the_newest_wins_wherever_it_is(root: Path, fast: Path, tmp_path: Path) -> None:
    """A newer step of another host wins, also against the memory of a dead trainer's worker."""
    state = {"weight": torch.arange(100.0), "step": 0}
    config = Config(local_root=str(fast), upload_every=2)

    def save_and_die(step: int, local_root: Path, **environment: str) -> None:
        places = [str(root), str(local_root), str(step)]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            ranks.script(DYING, *places)

    save_and_die(1, fast)
    with Checkpointer(root, config) as checkpointer:
        assert checkpointer.load(into := zeros_like(state)) == 1 and source_of(checkpointer) == "memory"
        assert into["step"] == 1
    save_and_die(3, fast)
    save_and_die(4, tmp_path / "nvme of another host", **{endpoint.FOLDER_VARIABLE: str(tmp_path / "other")})
    while complete_steps(str(root)) != [4]:
        time.sleep(0.05)
    with Checkpointer(root, config) as checkpointer:
        assert checkpointer.load(into) == 4 and into["step"] == 4 and source_of(checkpointer) == "storage"
        checkpointer.save(5, {**state, "step": 5}).result(60)
        assert checkpointer.latest() == 5


def test_an_upload_that_fails_fails_no_save(root: Path, fast: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = small_state()
    with Checkpointer(root, Config(local_root=str(fast))) as checkpointer:
        (root / "step-00000001").mkdir()
        (root / "step-00000001" / "somebody's").touch()
        checkpointer.save(1, state).result(60)
        with pytest.raises(CheckpointExistsError, match="something here already") as caught:
            checkpointer.wait_uploads(60)
        assert (caught.value.path, caught.value.step) == (str(root / "step-00000001"), 1)
        checkpointer.wait_uploads(60)  # each failure is raised once
        checkpointer.save(2, state).result(60)
        checkpointer.wait_uploads(60)
        assert complete_steps(str(root)) == [2] and checkpointer.load(zeros_like(state), step=1) == 1
    assert "uploading" in caplog.text


# The second begin, write or finalize of an attempt is the upload.
@pytest.mark.parametrize("fault", ["begin:kill:2", "finalize:kill:2", "sync:kill:6"])
def test_what_a_worker_dies_with_is_uploaded_by_the_next(
    root: Path, fast: Path, faulty_worker: Faulty, fault: str
) -> None:
    state = small_state()
    faulty_worker(fault)
    with Checkpointer(root, Config(local_root=str(fast), upload_every=10, local_keep_last=1)) as checkpointer:
        checkpointer.prepare(state)
        faulty_worker("")
        path = checkpointer.save(10, state).result(60)
        with contextlib.suppress(WorkerDiedError):  # the next worker may have uploaded it already
            checkpointer.wait_uploads(60)
        for step in (11, 12):
            checkpointer.save(step, state).result(60)
        checkpointer.wait_uploads(60)
        assert complete_steps(str(root)) == [10]
        checkpointer.save(13, state).result(60)
    assert complete_steps(os.path.dirname(path)) == [13]


@pytest.mark.usefixtures("forkserver")
def test_what_a_trainer_dies_with_is_uploaded_by_the_next(
    root: Path, fast: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The old worker may still be uploading. It continues, no trainer waits for it, and no byte is sent twice."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate))
    fault = "from asyncckpt.link import process; real = process.command()\n"
    fault += f"process.command = lambda: [real[0], {FAULTY!r}, 'begin:hold:2']\n"
    ranks.script(fault + DYING, str(root), str(fast), "10")
    wait_reached(gate)
    config = Config(local_root=str(fast), upload_every=10, local_keep_last=1)
    state = {"weight": torch.arange(100.0), "step": 10}
    with Checkpointer(root, config) as checkpointer:
        assert checkpointer.load(into := zeros_like(state)) == 10 and same(into, state)
        begun = time.monotonic()
        for step in (11, 12):
            checkpointer.save(step, state).result(60)
        assert time.monotonic() - begun < 20 and complete_steps(str(root)) == []
        wait_for(lambda: checkpointer.steps() == [10, 12])  # a step with a pending upload is not removed
        gate.touch()
        checkpointer.wait_uploads(60)
        assert complete_steps(str(root)) == [10]
        checkpointer.save(20, state).result(60)
        checkpointer.wait_uploads(60)
        assert complete_steps(str(root)) == [10, 20]
        assert not [name for name in os.listdir(root) if "abandoned" in name or name.startswith(".")]


def test_what_fails_at_the_end_is_told_and_tried_once_more(
    root: Path, fast: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_worker("begin:enospc:2")
    with Checkpointer(root, Config(local_root=str(fast))) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        wait_for(lambda: "uploading" in caplog.text)  # otherwise the first attempt is at the end
    assert "No space left" in caplog.text and complete_steps(str(root)) == [1]


def test_what_fails_stays_until_it_is_uploaded(root: Path, fast: Path, faulty_worker: Faulty) -> None:
    """Later saves and removals do not affect the pending upload."""
    faulty_worker("begin:eio:2")
    with Checkpointer(root, Config(local_root=str(fast), upload_every=10, local_keep_last=1)) as checkpointer:
        checkpointer.save(10, small_state()).result(60)
        for _ in range(2):
            with pytest.raises(StorageError, match="as the test wants"):
                checkpointer.wait_uploads(60)
        assert complete_steps(str(root)) == []
        for step in (11, 12, 13):
            checkpointer.save(step, small_state()).result(60)
        checkpointer.wait_uploads(60)
        assert complete_steps(str(root)) == [10]


def test_going_back(root: Path, fast: Path) -> None:
    """The abandoned checkpoint stays in both folders, under another name."""
    state = small_state()
    config = Config(local_root=str(fast))
    with Checkpointer(root, config) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state).result(60)
            checkpointer.wait_uploads(60)
    with Checkpointer(root, config) as checkpointer:
        assert checkpointer.load(zeros_like(state), step=1) == 1 and source_of(checkpointer) == "storage"
        checkpointer.save(2, {**state, "step": 8}).result(60)
        checkpointer.wait_uploads(60)
        assert checkpointer.latest() == 2
        for folder in (str(root), local_of(checkpointer)):
            assert os.path.exists(f"{folder}/step-00000002.abandoned-1")
        shutil.rmtree(local_of(checkpointer))
        assert checkpointer.load(into := zeros_like(state)) == 2 and into["step"] == 8


def test_a_set_of_files(root: Path, fast: Path) -> None:
    files = FileSet()
    files.add_bytes("config.json", b"{}")
    files.add_torch_file("below/rng.pt", {"state": torch.arange(100_000)})
    with Checkpointer(root, Config(local_root=str(fast))) as checkpointer:
        checkpointer.save(1, files).result(60)
        checkpointer.wait_uploads(60)
    folder = root / "step-00000001"
    assert torch.equal(torch.load(folder / "below" / "rng.pt")["state"], torch.arange(100_000))
    assert (folder / "config.json").read_bytes() == b"{}" and not verify(str(folder)).damages


@pytest.mark.usefixtures("forkserver")
def test_a_trainer_that_dies_is_uploaded(root: Path, fast: Path) -> None:
    """The worker writes and uploads the staged image without its trainer."""
    ranks.script(DYING.replace(".result(60)", ""), str(root), str(fast), "2")
    deadline = time.monotonic() + 60
    while complete_steps(str(root)) != [2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not verify(str(root / "step-00000002")).damages


def test_the_last_save_of_a_job_that_is_asked_to_end(root: Path, fast: Path) -> None:
    with Checkpointer(root, Config(local_root=str(fast), upload_every=100)) as checkpointer:
        checkpointer.watch_signals()
        checkpointer.save(7, small_state()).result(60)
        assert not checkpointer.terminating()
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpointer.terminating()
        checkpointer.save(8, small_state()).result(60)
    assert complete_steps(str(root)) == [8]


def test_a_local_folder_belongs_to_one_root(root: Path, fast: Path) -> None:
    config = Config(local_root=str(fast), upload_every=100)
    with Checkpointer(root / "one", config) as one, Checkpointer(root / "two", config) as two:
        one.save(1, small_state()).result(60)
        assert two.latest() is None and one.latest() == 1
        with pytest.raises(CheckpointNotFoundError):
            two.load({})


def test_a_run_that_was_removed_does_not_come_back(root: Path, fast: Path) -> None:
    state, config = small_state(), Config(local_root=str(fast), upload_every=2)
    with Checkpointer(root, config) as checkpointer:
        checkpointer.save(1, state).result(60)
        assert checkpointer.load(zeros_like(state)) == 1  # nothing is uploaded yet, so the root may be empty
        for step in (2, 3):
            checkpointer.save(step, state).result(60)
        checkpointer.wait_uploads(60)
    shutil.rmtree(root)
    with Checkpointer(root, config) as checkpointer:
        for look in (checkpointer.latest, lambda: checkpointer.load(zeros_like(state))):
            with pytest.raises(StorageError, match="see that this is mounted"):
                look()
        shutil.rmtree(local_of(checkpointer))
    with Checkpointer(root, config) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load(zeros_like(state))


def test_what_makes_no_sense(root: Path, fast: Path) -> None:
    with pytest.raises(ValueError, match="local_root"):
        Config(local_root="s3://bucket/run")
    with pytest.raises(ValueError, match="upload_every"):
        Config(upload_every=2)
    fast.touch()
    with pytest.raises(StorageError, match="making the folder"):
        Checkpointer(root, Config(local_root=str(fast)))


def saves_and_loads(root: str, fast: str) -> tuple[list[int], list[str]]:
    rank = dist.get_rank()
    state: dict[str, Any] = {"shared": torch.arange(1000.0), f"own-{rank}": torch.full((300_000,), float(rank))}
    sources = []
    with Checkpointer(root, Config(local_root=fast, upload_every=2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state).result(100)
            checkpointer.wait_uploads(100)
        for step in (3, 2):
            assert checkpointer.load(into := zeros_like(state), step=step) == step and same(into, state)
            sources.append(source_of(checkpointer))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(local_of(checkpointer), ignore_errors=True)
            dist.barrier()
        return checkpointer.steps(), sources


@pytest.mark.usefixtures("forkserver")
def test_many_ranks(root: Path, fast: Path, tmp_path: Path) -> None:
    assert ranks.run(2, saves_and_loads, str(root), str(fast), folder=tmp_path) == [([2], ["local", "storage"])] * 2
