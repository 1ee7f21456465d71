"""How answers are shown: names as they are, nothing that controls a terminal, and no error that stops the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncckpt import cli
from asyncckpt.report import listing, places
from asyncckpt.report.answers import Answers


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
    assert lines[2].startswith("     5  there") and lines[4].startswith("  1000  there")


def test_what_controls_a_terminal_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "w\x1b[2J\x9b\r\n"
    save_file({name: torch.ones(3)}, path := tmp_path / "odd\x1b.safetensors")
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
        save_file({"w": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    before = places.kind_of_others

    def odd(path: str) -> Any:
        if path.endswith("a.safetensors"):
            raise ZeroDivisionError("odd")
        return before(path)

    monkeypatch.setattr(listing, "kind_of_others", odd)
    assert cli.main(["ls", *form, *(str(tmp_path / f"{name}.safetensors") for name in ("a", "b"))]) == 2
    said = capsys.readouterr()
    assert "b.safetensors" in said.out and "ZeroDivisionError" in (said.out if form else said.err)


def test_json_has_no_numbers_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(True)
    answers.add({"a": float("nan"), "b": [(1.5, float("inf"))]})
    answers.show()
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": [[1.5, None]]}]


def test_names_that_have_no_bytes(tmp_path: Path) -> None:
    """A surrogate of a name is escaped; a byte of a path that is no text is written as it is."""
    path = os.fsencode(tmp_path) + b"/\xff.safetensors"
    header = b'{"w\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + b"\1")
    done = subprocess.run([sys.executable, "-m", "asyncckpt", "inspect", path], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"w\\ud800" in done.stdout and path in done.stdout
