"""The documented flags, on trees with a parser that lacks some of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.peers import MEGATRON, peer, python

pytestmark = pytest.mark.usefixtures("forkserver")

# This script parses like ``pretrain_gpt.py`` of core 0.16. ``KNOWS`` names the flags that only some trees have.
_SCRIPT = """
import argparse, inspect, json, os, sys
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
group = parser.add_argument_group(title="checkpointing")
group.add_argument("--async-save", action="store_true")
group.add_argument("--use-persistent-ckpt-worker", action="store_true")
group.add_argument("--save")
for flag in json.loads(os.environ["KNOWS"]):
    group.add_argument(flag, default="its own", const="its own, given", nargs="?")
other = argparse.ArgumentParser()
other.add_argument("--config")
unknown = other.parse_known_args()[1]
arguments = parser.parse_args()
parser.parse_args()
AsyncCallsQueue(persistent=True)
from asyncckpt.integrations.nvrx.filesystem import engine
made = engine(alone=True).config
print(json.dumps({"arguments": vars(arguments), "unknown": unknown, "nice": made.nice, "io": made.io_class}))
"""

_DOCUMENTED = ("--async-save", "--use-persistent-ckpt-worker", "--async-ckpt-use-cpu-shm", "--save", "here")
_PRIORITIES = ("--async-ckpt-cpu-priority", "7", "--async-ckpt-io-priority=2")


# Run the launcher as a module, in a process that has imported torch.
_MODULE = """
import runpy, warnings
warnings.simplefilter("ignore")
runpy.run_module("asyncckpt.integrations.megatron", run_name="__main__", alter_sys=True)
"""


def _script(folder: Path) -> str:
    script = folder / "pretrain.py"
    script.write_text(_SCRIPT)
    return str(script)


def _launch(folder: Path, *arguments: str) -> str:
    return python(_MODULE, MEGATRON, arguments=(_script(folder), *arguments))


def _said(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


@pytest.fixture(autouse=True)
def knows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the flags of the script's own parser."""

    def know(*flags: str) -> None:
        monkeypatch.setenv("KNOWS", json.dumps(flags))

    know()
    return know


def test_a_parser_that_lacks_them(tmp_path: Path) -> None:
    """Run the documented command."""
    command = [sys.executable, "-W", "ignore", "-m", "asyncckpt.integrations.megatron", _script(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), peer(MEGATRON)])
    done = subprocess.run(
        [*command, *_DOCUMENTED, *_PRIORITIES],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = _said(done.stdout)
    arguments = said["arguments"]
    assert arguments["async_save"] and arguments["save"] == "here" and arguments["async_ckpt_use_cpu_shm"] is True
    assert arguments["async_ckpt_cpu_priority"] == said["nice"] == 7 and said["io"] == "best-effort"
    # Parsers other than Megatron-LM's get no flags of ours.
    assert "--async-ckpt-use-cpu-shm" in said["unknown"]


def test_a_parser_that_has_them_is_left_alone(tmp_path: Path, knows: Callable[..., None]) -> None:
    knows("--async-ckpt-use-cpu-shm", "--async-ckpt-cpu-priority", "--async-ckpt-io-priority")
    said = _said(_launch(tmp_path, *_DOCUMENTED, "--async-ckpt-io-priority=2"))
    arguments = said["arguments"]
    assert arguments["async_ckpt_use_cpu_shm"] == "its own, given"
    assert arguments["async_ckpt_cpu_priority"] == "its own" and arguments["async_ckpt_io_priority"] == "2"


def test_what_nobody_knows_is_refused_by_the_parser(tmp_path: Path) -> None:
    refused = r"(?s)ended with 2\b.*unrecognized arguments: --async-ckpt-use-gpu-shm"
    with pytest.raises(pytest.fail.Exception, match=refused):
        _launch(tmp_path, *_DOCUMENTED, "--async-ckpt-use-gpu-shm")


@pytest.mark.parametrize("given", [_DOCUMENTED[:2], ()])
def test_flags_that_are_not_given(tmp_path: Path, given: tuple[str, ...]) -> None:
    """Without flags, the defaults of newer trees and the priorities of ``AsyncCallsQueue`` apply."""
    said = _said(_launch(tmp_path, *given))
    assert said["arguments"]["async_ckpt_use_cpu_shm"] is False and said["nice"] == 10
