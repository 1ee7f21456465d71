"""Other packages in several versions. ``scripts/peers.sh`` unpacks them. Tests use them in separate processes."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch

from support.ranks import alone

FOLDER = Path(sys.prefix) / "peers"
NVRX = ("nvrx-0.4.1", "nvrx-0.6.0", "nvrx-0.7.0")
MEGATRON = "megatron-core-0.16.1"
TORCHTITAN = (
    "torchtitan-0.3.0",
    "torchdata-0.11.0",
    "spmd-types-0.2.3",
    "tyro-1.0.17",
    "docstring-parser-0.18.0",
    "typeguard-4.6.0",
)
DEEPSPEED = ("deepspeed-0.19.8", "hjson-3.1.0", "py-cpuinfo-9.0.0", "einops-0.8.2", "msgpack-1.2.4")
VLLM = "vllm-0.32.0"
TORCH_CHECKPOINTING = "torch-checkpointing-0.1.1"
VERL = ("verl-0.8.0", "verl-0.9.1")

# Not a group of peers: ``scripts/needed_peers.py`` looks at plain assignments.
needs_torch_checkpointing: pytest.MarkDecorator = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11), reason="torch_checkpointing needs torch 2.11"
)


def peer(name: str) -> str:
    """Return the package's folder, to put on the path. Skip the test if the folder is missing.

    Fail the test if ``scripts/test`` left the package out by mistake.
    """
    folder = FOLDER / name
    if not folder.is_dir():
        if name not in os.environ.get("WANTED_PEERS", name).split():
            pytest.fail(
                f"scripts/needed_peers.py did not see that this test uses {name}: write its name in the test's file"
            )
        pytest.skip(f"{name} is not there; scripts/test unpacks it into {FOLDER}")
    return str(folder)


def python(code: str, *names: str, arguments: tuple[str, ...] = ()) -> str:
    """Run ``code`` with the peers of these ``names`` on the path. Return its output. Fail the test if the code fails.

    The process is a fork of one that has imported torch and asyncckpt, but no integration except DCP's.
    """
    path = [str(Path(__file__).parents[2]), *map(peer, names)]
    with tempfile.NamedTemporaryFile("r") as said:
        try:
            exitcode, _ = alone(_run, code, path, arguments, said.name)
        except TimeoutError as error:
            pytest.fail(f"{error}:\n{said.read()}")
        if exitcode != 0:
            pytest.fail(f"it ended with {exitcode}:\n{said.read()}")
        return said.read()


def _run(code: str, path: list[str], arguments: tuple[str, ...], said: str) -> None:
    fd = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, sys.stdout.fileno())
    os.dup2(fd, sys.stderr.fileno())
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.path[:0] = path
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not call these
