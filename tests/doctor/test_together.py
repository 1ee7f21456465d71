"""Test the diagnosis of the ranks of a job: each trouble is named on all ranks, with the ranks that have it."""

from __future__ import annotations

import builtins
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.ranks import run

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.doctor import diagnosis, place, together
from asyncckpt.doctor.finding import Finding

pytestmark = pytest.mark.usefixtures("forkserver")


def _replace(module: Any, name: str, value: object) -> None:
    """Replace an attribute for the rest of this process."""
    patch.object(module, name, value).start()


def _refusing(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``open``, which makes no file of a trial."""

    def refusing(path: Any, *args: Any, **named: Any) -> Any:
        if place.PROBE in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *args, **named)

    return refusing


def _diagnosed(root: str, trouble: str) -> str:
    """Plant a trouble on rank 1, and return the diagnosis."""
    for module, name in ((place, "_MOST_S"), (together, "ANSWER_S"), (together, "NOTICE_S")):
        _replace(module, name, 0.2)
    config = Config()
    if dist.get_rank() == 1:
        real = time.time
        match trouble:
            case "root":
                root += "-other"
            case "clocks":
                _replace(time, "time", lambda: real() + 60)
            case "torch":
                _replace(torch, "__version__", "2.7.0")
            case "user":
                _replace(os, "geteuid", lambda: 4711)
            case "network":
                _replace(together, "loopback_scope", lambda: "another host")
                config = Config(address="198.51.100.1")
            case "memory":
                _replace(diagnosis, "examine_host", lambda *_, **__: [Finding("memory", "fails", "none is left")])
            case "unwritable":
                _replace(builtins, "open", _refusing(open))
    with Checkpointer(root, config) as checkpointer:
        return str(checkpointer.check(1000))


def _found(root: Path, trouble: str) -> str:
    first, second = run(2, _diagnosed, str(root), trouble, folder=root.parent)
    assert first == second
    assert not [name for name in os.listdir(root) if name.startswith(place.PROBE)]
    return str(first)


def _lines(said: str, level: str, subject: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(f"{level:5}  {subject} ")]


def test_ranks_that_are_well(root: Path) -> None:
    said = _found(root, "")
    assert not _lines(said, "fails", "")
    assert "see each other's files" in _lines(said, "ok", "files of ranks")[0]
    assert "reach each other" in _lines(said, "ok", "connections")[0]


def test_another_root(root: Path) -> None:
    """A folder that the ranks do not share."""
    said = _found(root, "root")
    assert "rank 0 has" in _lines(said, "fails", "root")[0] and f"rank 1 has {root}-other" in said
    assert "rank 0 does not see the files of ranks [1]" in _lines(said, "fails", "files of ranks")[0]


def test_another_clock(root: Path) -> None:
    assert "the clocks of ranks 0 and 1 are 60 s apart" in _lines(_found(root, "clocks"), "risk", "clocks")[0]


def test_another_version(root: Path) -> None:
    assert "rank 1 has 2.7.0" in _lines(_found(root, "torch"), "risk", "torch")[0]


def test_another_user(root: Path) -> None:
    assert "rank 1 has 4711" in _lines(_found(root, "user"), "fails", "user")[0]


def test_a_network_without_a_way(root: Path) -> None:
    line = _lines(_found(root, "network"), "fails", "connections")[0]
    assert "rank 1 cannot be reached at 198.51.100.1" in line and "(ranks 0)" in line


def test_one_rank_has_trouble(root: Path) -> None:
    (line,) = _lines(_found(root, "memory"), "fails", "memory")
    assert line.endswith("  none is left (ranks 1)")


def test_a_rank_that_cannot_write(root: Path) -> None:
    line = _lines(_found(root, "unwritable"), "fails", "files of ranks")[0]
    assert "Permission denied" in line and "(ranks 1)" in line
