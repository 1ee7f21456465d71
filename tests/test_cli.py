"""Test the command line, and our options on other programs' command lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Manifest
from support.states import small_state
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import asyncckpt
from asyncckpt import Checkpointer, cli
from asyncckpt.config import _OPTIONS, Config, add_arguments, is_switched_on
from asyncckpt.errors import CheckpointError, SaveTimeoutError, StorageError
from asyncckpt.extension import Engine, storage_for
from asyncckpt.loading.contents import Shard, Value, checkpoints_at, contents
from asyncckpt.report import listing, verification
from asyncckpt.report import listing as inspection


@pytest.fixture
def saved(root: Path) -> Path:
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small_state())
    return root


def _run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str]:
    status = cli.main([str(arg) for arg in argv])
    return status, capsys.readouterr().out


def test_ls(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = _run(capsys, "ls", saved)
    assert status == 0 and "step-00000002" in out and "2 checkpoints" in out
    rows = json.loads(_run(capsys, "ls", saved, "--json")[1])
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["bytes"] > 0
    rows = json.loads(_run(capsys, "ls", saved / "step-00000002", saved / "step-00000001", "--json")[1])
    assert [row["step"] for row in rows] == [2, 1]
    assert _run(capsys, "ls", saved / "none")[0] == 2
    (saved / "step-00000001" / "asyncckpt.json").write_text("{")
    status, out = _run(capsys, "ls", saved)  # one bad manifest makes one bad line
    assert status == 1 and "step-00000002" in out


def test_inspect(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (saved, saved / "step-00000002"):
        status, out = _run(capsys, "inspect", path)
        assert status == 0 and "model.weight" in out and "64x32" in out and "bfloat16" in out and "step 2" in out
    (facts,) = json.loads(_run(capsys, "inspect", saved / "step-00000002", "--json")[1])
    assert facts["step"] == 2 and "write_s" in facts["timings"]
    assert {value["name"] for value in facts["values"]} >= {"model.weight", "optimizer.lr", "step"}


def test_the_newest_is_what_was_created_last(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After going back, the newest step is not the highest one."""
    file = saved / "step-00000001/asyncckpt.json"
    manifest = Manifest.parse(file.read_bytes(), "")
    file.write_bytes(replace(manifest, created=manifest.created + 1000).encode())
    status, out = _run(capsys, "inspect", saved)
    assert status == 0 and "checkpoint of step 1" in out and "newest" in out
    file.write_text("{")
    status, out = _run(capsys, "inspect", saved)
    assert status == 1 and "checkpoint of step 2" in out


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_what_retention_removes_after_it_was_listed_is_passed_over(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def listed(path: str) -> list[str]:
        found = checkpoints_at(path)
        assert storage_for(path).remove_checkpoint(str(saved / "step-00000001"))
        return found

    monkeypatch.setattr(listing if command == "ls" else verification, "checkpoints_at", listed)
    assert _run(capsys, command, saved, "--json")[0] == 0
    monkeypatch.undo()
    assert _run(capsys, command, saved / "step-00000001")[0] == 2  # a named checkpoint must exist


def test_what_is_inspected_is_not_removed_meanwhile(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def while_it_is_removed(path: str) -> list[Value]:
        removed.append(storage_for(path).remove_checkpoint(path))
        return contents(path)

    removed: list[bool] = []
    monkeypatch.setattr(inspection, "contents", while_it_is_removed)
    assert _run(capsys, "inspect", saved)[0] == 0 and removed == [False]


def test_inspect_of_a_sharded_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor has one row. ``--shards`` also shows its shards."""
    value = Value("w", "float32", [Shard("__0_0.distcp", 24, (2 * half, 0), (2, 3)) for half in (0, 1)])
    assert value.shape == (4, 3) and value.nbytes == 48 and Value("x", "float32", [Shard("f", 4)]).shape == ()
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(4, 3), "n": 3}).result(60)
    out = _run(capsys, "inspect", root, "--shards")[1]
    assert "0,0" in out and "4x3" in out and "__0_0.distcp" in out


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_what_stock_dcp_wrote(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"w": torch.zeros(4, 3), "n": 3}, checkpoint_id=str(root))
    status, out = _run(capsys, "inspect", root)
    assert status == 0 and "stock DCP" in out and "4x3" in out and "48 B" in out
    assert _run(capsys, "ls", root)[0] == 0
    status, out = _run(capsys, "verify", root)
    assert status == 0 and "good" in out and "stock DCP has no checksums" in out


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved / "step-00000001"
    assert _run(capsys, "verify", path)[0] == 0 and _run(capsys, "verify", saved)[0] == 0
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[1000] ^= 1
    (path / "__0_0.distcp").write_bytes(data)
    for given in (path, saved):
        status, out = _run(capsys, "verify", given)
        assert status == 1 and "__0_0.distcp" in out and "'model.weight'" in out
    assert "step-00000002: good" in out
    status, out = _run(capsys, "verify", path, "--json")
    assert status == 1 and json.loads(out)[0]["damages"][0]["file"].endswith("__0_0.distcp")
    assert _run(capsys, "verify", saved / "none")[0] == 2


def test_help_shows_examples() -> None:
    for command in ("ls", "inspect", "verify", "timeline", "advise", "workers", "demo"):
        done = subprocess.run(
            [sys.executable, "-m", "asyncckpt", command, "--help"], capture_output=True, text=True, check=True
        )
        assert f": asyncckpt {command}" in done.stdout


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"asyncckpt {asyncckpt.__version__}\n" and asyncckpt.__version__[0].isdigit()
    assert asyncckpt.StorageError is StorageError
    with pytest.raises(AttributeError):
        _ = asyncckpt.NoSuchError


@pytest.mark.parametrize(("stdout", "status"), [("/dev/full", 2), (None, 0)])
def test_a_stdout_that_takes_nothing(saved: Path, stdout: str | None, status: int) -> None:
    command = [sys.executable, "-m", "asyncckpt", "ls", str(saved)]
    into = f">{stdout}" if stdout else ">&-"
    done = subprocess.run(["sh", "-c", f'"$@" {into}', "sh", *command], capture_output=True, text=True)
    assert done.returncode == status and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_choices_from_a_command_line_and_the_environment() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--async-ckpt-slots", "3", "--async-ckpt-when-busy", "skip", "--no-async-ckpt-overlap"]
    args = parser.parse_args([*given, "--ckpt-assume-constant-structure", "--async-ckpt-io-priority", "3"])
    environment = {"ASYNC_CKPT_SLOTS": "1", "ASYNC_CKPT_KEEP_LAST": "4", "ASYNC_CKPT_DIRECT_IO": "no"}
    config = Config.from_args(args, environment)
    chosen: dict[str, Any] = {"assume_constant_structure": True, "direct_io": False, "io_class": "idle"}
    assert config == Config(slots=3, when_busy="skip", keep_last=4, **chosen)
    assert Config.from_env({}) == Config()
    with pytest.raises(ValueError, match="ASYNC_CKPT_SLOTS='many'"):
        Config.from_env({"ASYNC_CKPT_SLOTS": "many"})
    assert not is_switched_on(args, {}) and is_switched_on(args, {"ASYNC_CKPT_USE_CPU_SHM": "1"})
    assert is_switched_on(parser.parse_args(["--async-ckpt-use-cpu-shm"]), {"ASYNC_CKPT_USE_CPU_SHM": "0"})


def test_every_choice_has_a_variable() -> None:
    names = {field.name for field in fields(Config)} - {"keep"}
    values = {"when_busy": "latest", "failure": "warn", "io_class": "idle", "overlap": "yes", "direct_io": "no"}
    values |= {"link_unchanged": "no", "differing_replicas": "raise"}
    values |= {"transport": "nixl", "port_range": "1-3"}
    values |= {"assume_constant_structure": "on", "progress": "no", "on_event": "builtins:print"}
    values |= {"parties": "loader"}
    environment = {option.variable: values.get(name, "3") for name, option in _OPTIONS.items()}
    assert set(_OPTIONS) == names and len(environment) == len(names)
    unread = [name for name in names if getattr(Config.from_env(environment), name) == getattr(Config(), name)]
    assert not unread


def test_what_megatron_has_on_its_command_line_stays_as_it_is() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--async-ckpt-use-cpu-shm", action="store_true")
    parser.add_argument("--async-ckpt-io-priority", type=int, default=3)
    add_arguments(parser)
    args = parser.parse_args(["--async-ckpt-use-cpu-shm"])
    assert args.async_ckpt_use_cpu_shm is True and is_switched_on(args, {})
    assert Config.from_args(args, {}) == Config(io_class="idle")


@pytest.mark.parametrize("wrong", [{"slots": 1.5}, {"timeout": "3"}, {"overlap": "no"}, {"job_id": 7}, {"nice": True}])
def test_what_is_of_another_type_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(TypeError, match=f"Config.{name} is .*, not {wrong[name]!r}"):
        Config(**wrong)


WRONG = [{"slots": 0}, {"when_busy": "never"}, {"timeout": 0}, {"nice": 20}, {"keep_last": 0}]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)


def test_errors_pickle_and_say_where() -> None:
    import pickle

    from asyncckpt import errors

    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, CheckpointError):
            error = kind("what happened", path="/a/b", rank=0, step=7)
            again = pickle.loads(pickle.dumps(error))
            assert type(again) is kind and str(again) == str(error) == "what happened [path /a/b, rank 0, step 7]"
            assert (again.path, again.rank, again.step) == ("/a/b", 0, 7)
    assert issubclass(SaveTimeoutError, TimeoutError) and str(StorageError("x")) == "x"


@pytest.mark.parametrize("command", ["verify", "demo"])
def test_a_pipe_that_is_closed_is_no_good_end(saved: Path, command: str) -> None:
    """With ``verify | head`` and ``pipefail``, the shell must not see success."""
    argv = [sys.executable, "-m", "asyncckpt", command, *([str(saved)] if command == "verify" else [])]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141 and not done.stderr


def test_checkpoints_of_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(Config(linger=0), alone=True) as engine:
        for name in ("b", "a"):
            engine.save(tmp_path / "folder" / name, {"w": torch.ones(3)}).result(60)
    (tmp_path / "folder/notes").mkdir()
    (tmp_path / "file").touch()
    assert cli.main(["ls", "--json", str(tmp_path / "folder")]) == 0
    assert [Path(each["path"]).name for each in json.loads(capsys.readouterr().out)] == ["a", "b"]
    assert cli.main(["inspect", str(tmp_path / "folder/a")]) == 0 and "step None" not in capsys.readouterr().out
    assert cli.main(["ls", str(tmp_path / "file")]) == 2


def test_a_variable_that_nobody_reads_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"ASYNC_CKPT_KEEPLAST": "3", "ASYNC_CKPT_FAILURE": "warn", "ASYNC_CKPT_RUNTIME_DIR": "/tmp/none"}
    assert Config.from_env(environment) == Config.from_env(environment) == Config(failure="warn")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "ASYNC_CKPT_KEEPLAST" in said and "ASYNC_CKPT_KEEP_LAST" in said


def test_every_variable_of_the_package_is_known(caplog: pytest.LogCaptureFixture) -> None:
    package = Path(__file__).parent.parent
    paths = [path for room in ("asyncckpt", "worker", "shm", "docs") for path in package.glob(f"{room}/**/*.[pm][yd]")]
    names = {name for path in paths for name in re.findall(r"\bASYNC_CKPT_[A-Z_]+[A-Z]\b", path.read_text())}
    assert len(names) > 10
    with contextlib.suppress(ValueError):
        Config.from_env(dict.fromkeys(sorted(names), "1"))
    assert [record.getMessage() for record in caplog.records if record.name == "asyncckpt.config"] == []


def test_a_choice_that_there_is_not_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--async-ckpt-when-busy", "drop"])
    assert "choose from" in capsys.readouterr().err
    assert Config.from_args(parser.parse_args(["--async-ckpt-when-busy", "skip"]), {}).when_busy == "skip"
