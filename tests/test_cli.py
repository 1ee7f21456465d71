"""The command line, and what is chosen on others' command lines."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import small_state

from asyncckpt import cli
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config, add_arguments
from asyncckpt.errors import CheckpointError, SaveTimeoutError, StorageError


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
    assert status == 0 and "step-00000002" in out
    rows = json.loads(_run(capsys, "ls", saved, "--json")[1])
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["bytes"] > 0
    assert _run(capsys, "ls", saved / "none")[0] == 1


def test_inspect(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = _run(capsys, "inspect", saved / "step-00000002")
    assert status == 0 and "model.weight" in out and "64x32" in out and "bfloat16" in out and "step 2" in out
    facts = json.loads(_run(capsys, "inspect", saved / "step-00000002", "--json")[1])
    assert facts["step"] == 2 and "write_s" in facts["timings"]
    assert {item["name"] for item in facts["items"]} >= {"model.weight", "optimizer.lr", "step"}


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved / "step-00000001"
    assert _run(capsys, "verify", path)[0] == 0
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[1000] ^= 1
    (path / "__0_0.distcp").write_bytes(data)
    status, out = _run(capsys, "verify", path)
    assert status == 1 and "__0_0.distcp" in out and "'model.weight'" in out
    status, out = _run(capsys, "verify", path, "--json")
    assert status == 1 and json.loads(out)["damages"][0]["file"].endswith("__0_0.distcp")
    assert _run(capsys, "verify", saved / "none")[0] == 1


def test_help_shows_examples() -> None:
    for command in ("ls", "inspect", "verify", "demo"):
        done = subprocess.run(
            [sys.executable, "-m", "asyncckpt", command, "--help"], capture_output=True, text=True, check=True
        )
        assert f"example: asyncckpt {command}" in done.stdout


def test_choices_from_a_command_line_and_the_environment() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--ckpt-slots", "3", "--ckpt-when-busy", "skip", "--ckpt-direct-io", "no"])
    config = Config.from_args(args, {"ASYNCCKPT_SLOTS": "1", "ASYNCCKPT_KEEP_LAST": "4"})
    assert config == Config(slots=3, when_busy="skip", direct_io=False, keep_last=4)
    assert Config.from_env({}) == Config()
    with pytest.raises(ValueError, match="ASYNCCKPT_SLOTS='many'"):
        Config.from_env({"ASYNCCKPT_SLOTS": "many"})


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
