"""Test saves and loads as in a training loop."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.abilities import need_lasting_inodes, need_locks, need_permissions
from support.checkpoints import complete_steps
from support.states import same, small_state, zeros_like
from support.workers import Faulty
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import asyncckpt
from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    FormatError,
    MismatchError,
    OutOfMemoryError,
    StorageError,
    UntrustedValueError,
)
from asyncckpt.extension import Engine, storage_for


@pytest.fixture
def checkpointer(root: Path) -> Iterator[Checkpointer]:
    with Checkpointer(root) as checkpointer:
        yield checkpointer


def test_a_run(checkpointer: Checkpointer, root: Path) -> None:
    state = small_state()
    checkpointer.prepare(state)
    assert checkpointer.latest() is None and checkpointer.steps() == []
    for step in (5, 10):
        state["step"] = step
        state["model"]["weight"].fill_(step)
        save = checkpointer.save(step, state)
        assert save.staged() and save.step == step and save.path == str(root / f"step-{step:08d}")
        assert save.result(60) == save.path and save.done() and save.failure is None
        assert {"plan_s", "copy_s", "stall_s", "write_s", "commit_s", "durable_s"} <= set(save.timings)
    assert checkpointer.steps() == [5, 10] and checkpointer.latest() == 10
    into = zeros_like(state)
    assert checkpointer.load(into) == 10
    assert same(into, state)
    assert checkpointer.load(into, step=5) == 5
    assert into["step"] == 5 and into["model"]["weight"][0, 0] == 5


def test_the_values_are_those_of_one_moment(root: Path) -> None:
    """The caller changes all values right after each save() returns."""
    small = {f"small {number}": torch.zeros(100) for number in range(300)}
    large = {"large": torch.zeros(5_000_000), "strided": torch.zeros(600, 500).t()}
    state: dict[str, Any] = {**small, **large, "step": 0}
    with Checkpointer(root) as checkpointer:
        for step in range(1, 13):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(step)
            state["step"] = step
            checkpointer.save(step, state)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-1)
            state["step"] = -1
        checkpointer.wait(60)
        for step in checkpointer.steps():
            checkpointer.load(state, step)
            assert state["step"] == step
            assert all(
                torch.equal(value, torch.full_like(value, step)) for value in state.values() if value is not step
            )


def test_a_dict_of_an_optimizer_without_a_state_is_warned_about(
    checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpointer.save(1, {"model": model, "optimizer": optimizer}).result(60)
    checkpointer.load({"model": model})  # leaves the optimizer out on purpose
    assert "not asked for" not in caplog.text
    checkpointer.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters()).state_dict()})
    assert "'optimizer.state.0.exp_avg'" in caplog.text and "were not asked for" in caplog.text


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("is_stock", [False, True])
def test_a_dict_without_the_keys_that_are_stored_is_warned_about(
    is_stock: bool, checkpointer: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new process may have empty metrics. The load asks for none of the stored metrics, and they stay empty."""
    state = {"model": torch.ones(3), "seen": {"metrics": {"loss": 0.5}}, "rank": asyncckpt.PerRank({"a": 1})}
    path = str(checkpointer.save(1, state).result(60))
    if is_stock:
        dcp_save(state, checkpoint_id=(path := str(tmp_path / "stock")))
    asyncckpt.load({"model": torch.zeros(3)}, checkpoint_id=path)  # leaves them out on purpose
    assert "not asked for" not in caplog.text
    fresh = {"model": torch.zeros(3), "seen": {"metrics": {}}, "rank": asyncckpt.PerRank({})}
    asyncckpt.load(fresh, checkpoint_id=path)
    assert "2 values of" in caplog.text and "'rank.rank-0-of-1.a', 'seen.metrics.loss'" in caplog.text


# Refused and failed saves.


def _next_save_works(checkpointer: Checkpointer) -> None:
    state = small_state()
    checkpointer.save(999, state).result(60)
    assert checkpointer.load(into := zeros_like(state)) == 999
    assert same(into, state)


def test_a_step_saved_twice(checkpointer: Checkpointer, gate: Path) -> None:
    checkpointer.save(1, small_state())
    with pytest.raises(CheckpointExistsError, match="being saved"):
        checkpointer.save(1, small_state())
    gate.touch()
    checkpointer.wait(60)
    with pytest.raises(CheckpointExistsError, match="step 1"):
        checkpointer.save(1, small_state())
    _next_save_works(checkpointer)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        Checkpointer(tmp_path / "file")
    with pytest.raises(StorageError, match="file"):
        Checkpointer(tmp_path / "file" / "below")


def test_a_root_that_is_a_checkpoint_is_refused(root: Path) -> None:
    """Otherwise a training would begin at step 0 inside the checkpoint, and retention would remove both."""
    with Checkpointer(root) as checkpointer:
        path = checkpointer.save(100, small_state()).result(60)
    before = sorted(os.listdir(path))
    for place in (Path(path), Path(f"{path}/")):
        with pytest.raises(CheckpointExistsError, match=rf"give it {root};") as caught:
            Checkpointer(place)
        assert caught.value.path == path
    with pytest.raises(CheckpointExistsError, match="this is a checkpoint"):
        Checkpointer(root, Config(local_root=path))
    assert sorted(os.listdir(path)) == before
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest() == 100


@pytest.mark.parametrize("kind", ["stock", "async_save", "transformers"])
def test_a_root_that_holds_only_checkpoints_of_others_is_refused(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "checkpoint-120"
    match kind:
        case "stock":
            with pytest.warns(UserWarning, match="single process"):
                dcp_save({"w": torch.ones(3)}, checkpoint_id=other)
        case "async_save":
            asyncckpt.save({"w": torch.ones(3)}, checkpoint_id=other)
        case "transformers":
            other.mkdir()
            (other / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointExistsError, match=r"such as checkpoint-120, and it would load none"):
        Checkpointer(tmp_path)
    with pytest.raises(CheckpointExistsError, match="this is a checkpoint"):
        Checkpointer(other)


def test_a_root_may_hold_checkpoints_of_others_too(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        path = checkpointer.save(1, small_state()).result(60)
    asyncckpt.save({"w": torch.ones(3)}, checkpoint_id=root / "best")
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest() == 1
    shutil.rmtree(path)  # by hand; the lock of the folder still names its owner
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest() is None


def test_a_root_that_becomes_a_file(checkpointer: Checkpointer, root: Path) -> None:
    root.rmdir()
    root.touch()
    with pytest.raises(StorageError) as caught:
        checkpointer.save(3, small_state()).result(60)
    assert caught.value.step == 3 and caught.value.rank == 0 and "it is a file" in str(caught.value)
    root.unlink()
    _next_save_works(checkpointer)


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to become nobody")
def test_a_read_only_folder(root: Path, faulty_worker: Faulty) -> None:
    need_permissions(root.parent)
    faulty_worker("start:nobody")
    with Checkpointer(root) as checkpointer:
        for folder in (root, *root.parents):
            if folder.is_relative_to(tempfile.gettempdir()) and str(folder) != tempfile.gettempdir():
                folder.chmod(0o755)
        with pytest.raises(StorageError, match="making a folder failed: Permission denied; check the permissions"):
            checkpointer.save(1, small_state()).result(60)
        root.chmod(0o777)
        checkpointer.save(2, small_state()).result(60)
        assert checkpointer.steps() == [2]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a file system that is mounted read-only."""
    place = tmp_path / "mounted"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (place / "run").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        yield place / "run"
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_read_only_file_system_is_found_out_at_once(read_only: Path) -> None:
    with Checkpointer(read_only) as checkpointer:
        assert checkpointer.latest() is None  # a reader may open it
        with pytest.raises(StorageError, match="mounted read-only") as caught:
            checkpointer.prepare(small_state())
        for step in (1, 2):
            with pytest.raises(StorageError, match="mounted read-only") as caught:
                checkpointer.save(step, small_state())
            assert caught.value.path == str(read_only) and caught.value.step == step
    for path in (read_only / "file", read_only / "missing" / "file"):
        with pytest.raises(StorageError, match="mounted read-only|No such file"):
            asyncckpt.torch_save({"w": torch.ones(3)}, path)
    with pytest.raises(StorageError, match="mounted read-only"):
        asyncckpt.async_save({"w": torch.ones(3)}, checkpoint_id=read_only / "deep" / "in")


@pytest.mark.parametrize("point", ["begin", "create", "write", "sync"])
@pytest.mark.parametrize(("action", "text"), [("enospc", "No space left .* free space"), ("eio", "Input/output error")])
def test_a_bad_disk(root: Path, faulty_worker: Faulty, point: str, action: str, text: str) -> None:
    faulty_worker(f"{point}:{action}:2")
    with Checkpointer(root) as checkpointer:
        state = small_state()
        with pytest.raises(StorageError, match=text) as caught:
            for step in (1, 2):
                checkpointer.save(step, state).result(60)
        assert caught.value.rank == 0 and caught.value.step in (1, 2)
        assert not list(root.glob(".*"))  # no partial checkpoint stays
        steps = checkpointer.steps()
        assert caught.value.step not in steps
        _next_save_works(checkpointer)
        assert checkpointer.steps() == [*steps, 999]


def test_a_disk_that_fills_in_the_middle_of_a_write(root: Path) -> None:
    """The kernel ends the write at a limit, here the worker's limit for the size of a file."""
    large = {"large": torch.ones(12 << 20)}
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(large)
        checkpointer.save(1, small_state()).result(60)
        worker = checkpointer._engine.worker
        assert worker is not None
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (24 << 20, resource.RLIM_INFINITY))
        with pytest.raises(StorageError, match="writing failed: File too large.*step 2"):
            checkpointer.save(2, large).result(60)
        assert not list(root.glob(".*"))
        checkpointer.save(3, small_state()).result(60)
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        checkpointer.save(4, large).result(60)
        assert checkpointer.steps() == [1, 3, 4]


def test_loading_what_is_not_there(checkpointer: Checkpointer, root: Path) -> None:
    state = small_state()
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint here yet"):
        checkpointer.load(state)
    checkpointer.save(3, state).result(60)
    with pytest.raises(CheckpointNotFoundError, match="the newest are: 3"):
        checkpointer.load(state, 4)
    (root / "step-00000008").mkdir()  # no manifest, so no checkpoint
    assert checkpointer.latest() == 3
    with pytest.raises(MismatchError, match="has no 'model.more'"):
        checkpointer.load({"model": {"more": torch.ones(1)}})
    with pytest.raises(MismatchError, match=r"'model.bias' is \(33,\) and \(32,\) is stored"):
        checkpointer.load({"model": {"bias": torch.ones(33)}})
    assert checkpointer.load({"model": {"bias": torch.ones(32)}}) == 3  # a part of the checkpoint


def test_after_close(root: Path) -> None:
    checkpointer = Checkpointer(root)
    checkpointer.save(1, small_state())
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == [1]
    for use in (checkpointer.save, lambda step, state: checkpointer.load(state, step)):
        with pytest.raises(ClosedError):
            use(1, small_state())


def test_a_failure_nobody_asked_about_is_raised_by_wait(
    root: Path, faulty_worker: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_worker("write:eio")
    with Checkpointer(root) as checkpointer:
        with caplog.at_level(logging.ERROR):
            checkpointer.save(1, small_state())
            with pytest.raises(StorageError, match="step 1"):
                checkpointer.wait(60)
        assert [record.levelname for record in caplog.records] == ["ERROR"] and "saving failed" in caplog.text
        checkpointer.wait(60)  # the failure is raised once
        checkpointer.save(2, small_state())
        checkpointer.wait(60)


def test_too_little_memory(root: Path) -> None:
    state = {"huge": torch.ones(1).expand(1 << 41)}  # 8 TiB in shape, without memory behind it
    with Checkpointer(root) as checkpointer:
        with pytest.raises(OutOfMemoryError, match="fewer slots"):
            checkpointer.save(1, state)
        _next_save_works(checkpointer)


# Retention.


def test_keep_last(root: Path) -> None:
    with Checkpointer(root, Config(keep_last=2)) as checkpointer:
        for step in (10, 20, 30, 40):
            checkpointer.save(step, small_state())
        checkpointer.close()
        assert checkpointer.steps() == [30, 40]
        assert not list(root.glob(".*"))


def test_one_being_read_is_kept(root: Path) -> None:
    need_locks(root.parent)
    with Checkpointer(root, Config(keep_last=1)) as checkpointer:
        checkpointer.save(1, small_state()).result(60)
        with storage_for(str(root)).reading(str(root / "step-00000001")):
            checkpointer.save(2, small_state())
            checkpointer.close()
            assert checkpointer.steps() == [1, 2]
    with Checkpointer(root, Config(keep_last=1)) as checkpointer:
        checkpointer.load(small_state())
        checkpointer.save(3, small_state())
    assert checkpointer.steps() == [3]


def test_the_one_just_written_is_the_newest_whatever_its_number(root: Path) -> None:
    with Checkpointer(root, Config(keep_last=1)) as checkpointer:
        checkpointer.save(50, small_state()).result(60)
        checkpointer.save(7, small_state())
    assert checkpointer.steps() == [7]


# Arguments of the calls.


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), True + 6])
def test_a_step_may_be_any_integer(checkpointer: Checkpointer, step: Any) -> None:
    save = checkpointer.save(step, {"w": torch.ones(3)})
    assert type(save.step) is int
    save.result(60)
    assert checkpointer.steps() == [7] and checkpointer.load({"w": torch.zeros(3)}, step=step) == 7


@pytest.mark.parametrize("step", [1.5, "7", -1, None, True, torch.tensor(1.5)])
def test_what_is_no_step_is_refused(checkpointer: Checkpointer, step: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="step"):
        checkpointer.save(step, {"w": torch.ones(3)})


@pytest.mark.parametrize("state", [None, torch.nn.Linear(2, 2), [torch.ones(2)], torch.ones(2)])
def test_what_is_no_state_dict_is_refused(checkpointer: Checkpointer, state: Any) -> None:
    for call in (lambda: checkpointer.save(1, state), lambda: checkpointer.prepare(state)):
        with pytest.raises(TypeError, match="a state dict maps names to values, and this is a"):
            call()
    checkpointer.save(1, {"w": torch.ones(3)}).result(60)
    with pytest.raises(TypeError, match="a state dict"):
        checkpointer.load(state)


def test_places(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root))
    with Checkpointer("~/run") as checkpointer:
        assert checkpointer.root == str(root / "run") and (root / "run").is_dir()
    for address in ("s3://", "ftp://host/run", "file:///tmp/x"):
        with pytest.raises(StorageError, match="is no address that checkpoints are saved to"):
            Checkpointer(address)
    with pytest.raises(StorageError, match="begins with the home of an unknown user"):
        Checkpointer("~nobody-here/run")
    with pytest.raises(StorageError, match="has a zero byte in it"):
        Checkpointer("run\0")
    wrong: Any = {"keep_last": 3}
    with pytest.raises(TypeError, match=r"a Config, not a dict"):
        Checkpointer(root, wrong)
    with pytest.raises(TypeError, match=r"a Config, not a dict"):
        Engine(wrong)


def test_a_name_that_the_locale_has_no_bytes_for(tmp_path: Path) -> None:
    script = "from asyncckpt import Checkpointer; Checkpointer('l\\u00e4uft')"
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert "asyncckpt.errors.StorageError: this process cannot use the path 'l\\xe4uft'" in ended.stderr


def test_publish_takes_a_handle_and_a_version(checkpointer: Checkpointer) -> None:
    save: Any = checkpointer.save(1, {"w": torch.ones(3)})
    wrong: Any
    for wrong in (1, save.path, None):
        with pytest.raises(TypeError, match="publish takes the handle that save has returned, not a"):
            checkpointer.publish(wrong)
    for wrong in (1.5, True, "1"):
        with pytest.raises(TypeError, match="a version is a whole number"):
            checkpointer.publish(save, wrong)


def test_a_save_while_the_interpreter_ends_is_made(root: Path) -> None:
    need_locks(root.parent)  # otherwise a warning is logged
    need_lasting_inodes(root.parent)
    script = (
        "import atexit, sys, torch; from asyncckpt import Checkpointer, Config;"
        f"checkpointer = Checkpointer({str(root)!r}, Config(linger=0, overlap=sys.argv[1] == 'overlap'));"
        "state = {'w': torch.ones(3_000_000), 'v': torch.ones(5)}; checkpointer.save(1, state).result(60);"
        "atexit.register(lambda: (checkpointer.save(2, state).result(60), checkpointer.close()))"
    )
    for how in ("plain", "overlap"):
        ended = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, timeout=120)
        assert not ended.returncode and not ended.stderr, ended.stderr
        assert complete_steps(str(root)) == [1, 2]
        shutil.rmtree(root)


def test_who_forgot_to_load_is_warned_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = "this training has loaded no checkpoint"
    for step, loads, warns in ((1, False, False), (2, True, False), (3, False, True)):
        caplog.clear()
        with Checkpointer(root) as checkpointer:
            if loads:
                checkpointer.load(small_state())
            for number in (step * 10, step * 10 + 1):
                checkpointer.save(number, small_state()).result(60)
        assert caplog.text.count(words) == warns
    assert "the newest of step 21" in caplog.text


@pytest.mark.parametrize(
    ("said", "which"),
    [
        ({"format": 99, "version": "9.0"}, "in format 99 by asyncckpt 9.0, .* install asyncckpt 9.0 to read it"),
        ({"format": 99}, "in format 99 by a newer asyncckpt"),
        ({"format": 4}, "in format 4 by an older asyncckpt, .* install the version that wrote it"),
    ],
)
def test_what_another_version_wrote_is_not_damaged(root: Path, said: dict[str, Any], which: str) -> None:
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            path = checkpointer.save(step, small_state()).result(60)
    (Path(path) / "asyncckpt.json").write_text(json.dumps(said))
    before = sorted(os.listdir(root))
    with Checkpointer(root, Config(keep_last=1)) as checkpointer:
        for fallback in (False, True):
            with pytest.raises(FormatError, match=which) as caught:
                checkpointer.load(small_state(), fallback=fallback)
            assert caught.value.path == os.path.join(path, "asyncckpt.json")
        assert sorted(os.listdir(root)) == before and checkpointer.latest() == 2
        assert checkpointer.load(small_state(), 1) == 1
        checkpointer.save(3, small_state()).result(60)
        checkpointer.wait(60)
    assert checkpointer.steps() == [2, 3]  # retention keeps step 2, too


@pytest.mark.parametrize("place", ["", "file"])
def test_what_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="this is a file" if place else "the path is empty"):
        Checkpointer(place)


def test_values_that_a_load_refuses_are_named_when_they_are_saved(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.ones(3), "rng": np.random.get_state(), "best": np.float64(0.5), "lr": 0.1, "names": ["a", {}]}
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).result(60)
        (said,) = [record.message for record in caplog.records if "weights_only=False" in record.message]
        assert "'names'" not in said and "'rng'" in said and "'best'" in said
        with pytest.raises(UntrustedValueError):
            checkpointer.load(dict(state))
        checkpointer.load(dict(state), weights_only=False)
