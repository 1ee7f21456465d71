"""Check the folder of a training with dead ranks: read each checkpoint by the framework and by ``verify``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from asyncckpt.loading.source import verify, wait_for_attempts
from torture.frameworks.kind import Kind
from torture.frameworks.log import digest
from torture.tally import LIMIT_S


@dataclass
class Findings:
    """The findings in the folder of a training."""

    newest: int = 0
    """The step of the newest checkpoint that the framework may resume from, or 0."""
    read: int = 0
    """The number of checkpoints that the framework's own reader has read."""
    digests: dict[int, str] = field(default_factory=dict)
    """The digests of the contents, by step."""
    losses: list[str] = field(default_factory=list)


def read_dcp(path: str) -> dict[str, Any]:
    """Return all values of a DCP checkpoint, read by stock DCP."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, FileSystemReader(path), planner=planner, no_dist=True)
    return state


def read_all(kind: Kind, folder: Path, is_ours: bool, expected: dict[int, str]) -> Findings:
    """Read each checkpoint in ``folder``.

    Args:
        kind: The kind of the training.
        folder: The folder of the training.
        is_ours: Whether the training saves through asyncckpt.
        expected: The required digests of the contents, by step. Empty: no digest is required.
    """
    found = Findings()
    candidates = kind.candidates(folder)
    for path, named in {**dict.fromkeys(candidates), **kind.checkpoints(folder)}.items():
        _read_one(kind, found, path, named, path in candidates, is_ours and kind.verifies, expected)
    return found


def _read_one(
    kind: Kind,
    found: Findings,
    path: str,
    named: int | None,
    is_candidate: bool,
    verifies: bool,
    expected: dict[int, str],
) -> None:
    for _ in range(5):
        before = _inode(path)
        try:
            step, content = kind.read(path)
            damages = verify(path).damages if verifies else []
        except Exception as error:
            if before != _inode(path):
                continue  # a running worker replaced or removed the checkpoint
            found.losses.append(f"{path} is not whole: {type(error).__name__}: {error}")
            return
        break
    else:
        found.losses.append(f"{path} changes all the time")
        return
    found.read += 1
    found.digests[step] = digest(content)
    if is_candidate:
        found.newest = max(found.newest, step)
    if named not in (None, step):
        found.losses.append(f"{path} has step {step}")
    if expected and expected.get(step) != found.digests[step]:
        found.losses.append(f"{path} has not the values that step {step} has in an unbroken run")
    found.losses += [f"{path}: {damage}" for damage in damages]


def _inode(path: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def wait_for_step(kind: Kind, folder: Path, step: int) -> list[str]:
    """Wait for the checkpoint of a ``step`` that all ranks staged, or for a later one. Return the losses."""
    deadline = time.monotonic() + LIMIT_S
    while max((each or 0 for each in kind.checkpoints(folder).values()), default=0) < step:
        if time.monotonic() > deadline:
            return [f"step {step} was staged on all ranks, and is not in {folder} after {LIMIT_S:g} s"]
        time.sleep(0.02)
    return []


def settle(kind: Kind, folder: Path) -> None:
    """Wait until no worker writes in the folder of a training. Then age leftover attempts so that they are removed."""
    hour_ago = time.time() - 3600
    for root in kind.roots(folder):
        wait_for_attempts(str(root), LIMIT_S)
        for path in root.glob(".*"):
            for file in [*path.rglob("*"), path]:
                os.utime(file, (hour_ago, hour_ago), follow_symlinks=False)
