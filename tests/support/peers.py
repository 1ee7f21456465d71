"""Other packages, several versions of them: unpacked by ``scripts/peers.sh``, used in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "peers"
NVRX = ("nvrx-0.4.1", "nvrx-0.6.0", "nvrx-0.7.0")
MEGATRON = "megatron-core-0.16.1"
VERL = ("verl-0.8.0", "verl-0.9.1")


def peer(name: str) -> str:
    """The folder to put on the path. Skips the test where it is not there."""
    folder = FOLDER / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not there; scripts/test unpacks it into {FOLDER}")
    return str(folder)


def python(code: str, *names: str, arguments: tuple[str, ...] = (), limit_s: float = 100) -> str:
    """What a Python that finds the peers of these ``names`` prints when it runs ``code``; it must not fail."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *map(peer, names)])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    if done.returncode != 0:
        pytest.fail(f"it ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr
