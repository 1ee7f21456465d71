"""Steps before the parts: unpack the wheels, compile the parts in C, read torch's files from the disk once."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 120.0
_WARM = "import torch; torch.cuda.is_available() and torch.cuda.init(); import torch.distributed.checkpoint"


def prepare(wheels: Path | None, folder: Path) -> list[str]:
    """Do all three at once. Returns a line for each step that failed; the parts run all the same.

    Args:
        wheels: A folder of wheels; None: nothing is missing.
        folder: Where to unpack the wheels; it is added to ``PYTHONPATH``.
    """
    # The first import on a machine that has just been started waits for the disk.
    running = {"import torch": subprocess.Popen([sys.executable, "-c", _WARM], stderr=subprocess.DEVNULL)}
    if not list(_ROOT.glob(f"shm/_copies{EXTENSION_SUFFIXES[0]}")):
        build = [sys.executable, "-W", "ignore", "-c", "import setuptools; setuptools.setup()", "-q", "build_ext"]
        running["compile the parts in C"] = subprocess.Popen([*build, "--inplace"], cwd=_ROOT)
    wrong = []
    if wheels is not None:
        # Not by pip: it refuses wheels of a newer platform, of which only the parts in Python are used.
        found = sorted(wheels.glob("*.whl"))
        for wheel in found:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        if not found:
            wrong.append(f"there are no wheels in {wheels}")
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])
        sys.path.append(str(folder))
    for what, process in running.items():
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        if process.wait():
            wrong.append(f"{what}: it ended with {process.returncode}")
    return wrong
