"""Test the tutorial: the page shows the scripts as they are, and its commands do what the page says."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import DOCS, HERE, blocks
from support.ranks import fsdp2_on_cpu

PAGE = DOCS / "tutorial.md"
SCRIPTS = sorted((HERE / "examples/tutorial").glob("*.py"))


def test_the_page_shows_the_scripts() -> None:
    shown = {block.text + "\n" for block in blocks(PAGE) if block.language == "python"}
    assert shown == {script.read_text() for script in SCRIPTS}


@pytest.mark.slow
@pytest.mark.timeout(480)
@fsdp2_on_cpu
def test_the_commands_do_what_the_page_says(tmp_path: Path) -> None:
    for module in ("boto3", "moto", "obstore", "transformers"):
        pytest.importorskip(module)
    for script in SCRIPTS:
        shutil.copy(script, tmp_path)
    printed = _run("\n".join(block.text for block in blocks(PAGE) if block.language == "bash" and block.runs), tmp_path)
    whole, killed, resumed = (_lines(tmp_path / f"{name}.txt") for name in ("whole", "killed", "resumed"))
    assert [int(line.split()[1]) for line in whole] == list(range(60))
    # The training was killed on its way. It goes on after a step that it had saved.
    assert killed == whole[: len(killed)] and 20 < len(killed) < 60
    begins = re.fullmatch(r"resumed after step (\d0), from memory", resumed[0])
    assert begins and resumed[1:] == whole[int(begins[1]) + 1 :] and int(begins[1]) >= 20
    assert "no difference in" in printed
    # The two ranks saved the step after which they ended. Four ranks go on, with other dropout.
    two, four = (_lines(tmp_path / f"{name}.txt") for name in ("two", "four"))
    assert four[0] == f"resumed after step {len(two) - 1}, from storage" and len(two) + len(four) - 1 == 60
    assert _mean(four[-20:]) == pytest.approx(_mean(whole[-20:]), abs=0.2)
    assert _mean(four[1:11]) == pytest.approx(_mean(whole[len(two) : len(two) + 10]), abs=0.3)
    assert all(f"s3://bucket/{run}/step-00000059" in printed for run in ("run", "local-first"))
    assert "GPTBigCodeForCausalLM gives the same logits" in printed


def _run(commands: str, folder: Path) -> str:
    """Run the commands in ``folder`` with the environment of this test. Return what they print."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        commands = commands.replace("5555", str(free.getsockname()[1]))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = shell.communicate(timeout=400)
        assert shell.returncode == 0, errors
        return printed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # what a failed command has left


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def _mean(lines: list[str]) -> float:
    return sum(float(line.split()[-1]) for line in lines) / len(lines)
