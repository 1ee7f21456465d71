"""Test how answers are shown: exact names, escaped control characters, and no error that stops other answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from asyncckpt import cli
from asyncckpt.loading.source import stock_kind
from asyncckpt.report import listing
from asyncckpt.report.answers import Answers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def test_names_that_look_like_numbers_stay(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(False)
    for name in ("1.10", "1.1", "1e5", "007"):
        answers.row(("name", "count"), name, 1000)
    answers.row(("name", "count"), "2", 7)
    answers.show()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1.10", "1.1", "1e5", "007", "2"] and rows[-1][1] == "7"


def test_numbers_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(False)
    for step in (5, None, 1000):
        answers.row(("step", "path"), step, "there")
    answers.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "   5  there" and lines[4] == "1000  there"


def test_what_controls_a_terminal_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "w\x1b[2J\x9b\r\n"
    dcp_save({name: torch.ones(3)}, checkpoint_id=(path := tmp_path / "odd\x1b"))
    assert cli.main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "w\\x1b[2J\\x9b\\r\\n" in said and "odd\\x1b" in said and not {"\x1b", "\x9b", "\r"} & set(said)
    assert cli.main(["inspect", str(path), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["values"][0]["name"] == name
    assert cli.main(["ls", str(tmp_path / "no\x1bne")]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_nobody_thought_of_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    for name in ("a", "b"):
        dcp_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / name)

    def odd(path: str) -> Any:
        if path.endswith("a"):
            raise ZeroDivisionError("odd")
        return stock_kind(path)

    monkeypatch.setattr(listing, "stock_kind", odd)
    assert cli.main(["ls", *form, *(str(tmp_path / name) for name in ("a", "b"))]) == 2
    said = capsys.readouterr()
    assert str(tmp_path / "b") in said.out and "ZeroDivisionError" in (said.out if form else said.err)


def test_json_has_no_numbers_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(True)
    answers.add({"a": float("nan"), "b": [(1.5, float("inf"))]})
    answers.show()
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": [[1.5, None]]}]


def test_names_that_have_no_bytes(tmp_path: Path) -> None:
    """A surrogate in a name is escaped. A byte of a path that is not text is written unchanged."""
    path = os.fsencode(tmp_path) + b"/\xff"
    dcp_save({"w\ud800": torch.ones(3)}, checkpoint_id=tmp_path / "it")
    (tmp_path / "it").rename(os.fsdecode(path))
    done = subprocess.run([sys.executable, "-m", "asyncckpt", "inspect", path], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"w\\ud800" in done.stdout and path in done.stdout
