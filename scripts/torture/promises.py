"""Judge a folder after a crash against the promises in DESIGN, "What must always hold", as far as files show them.

The judge reads with torch alone: stock DCP loads folders, ``torch.load`` loads files. Only ``go_on`` and ``check_root``
use asyncckpt, too, as a restarted training does.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from asyncckpt import Checkpointer
from asyncckpt.loading.source import verify, wait_for_attempts
from asyncckpt.storage import complete_steps
from torture import tally as jobs_of
from torture.scenarios import Files, Pointers, Replaced, Scenario, Sets, Steps, state_of
from torture.tally import CONFIG, LIMIT_S, Tally, value_of

_STEP = re.compile(r"step-(\d{8})")
_GLOBAL = re.compile(r"global_(\d+)")


def judge(scenario: Scenario, root: Path, begun: int, done: int) -> list[str]:
    """Return every broken promise, one sentence each, with the path. Return an empty list if all hold.

    Args:
        scenario: The kind of save.
        root: The folder that was given to ``scenario.saving``.
        begun: The newest step that any rank has begun to save, or 0.
        done: The newest step with a returned ``result()`` on any rank, or 0.
    """
    broken: list[str] = []
    match scenario:
        case Steps():
            durable = scenario.durable_folder(root)
            for folder in {durable, scenario.folder(root)}:
                found = dict(_named(folder, _STEP))
                for step, path in found.items():
                    broken += _wrong_step(scenario, path, step)
                broken += _missing(folder, found, begun, done if folder == durable else 0)
        case Pointers():
            named = _pointed(root / "latest.txt")  # read first, because a living worker may advance the pointer
            found = dict(_named(root, _GLOBAL))
            for step, path in found.items():
                broken += _wrong_folder(path, _states(step, 1), step)
            broken += _missing(root, found, begun, done)
            if named < done or (named and named not in found):
                broken.append(
                    f"{root}/latest.txt names step {named}; step {done} was durable, and {sorted(found)} exist"
                )
        case Replaced():
            broken += _wrong_replaced(root / "latest", begun, done, _step_of_folder, _wrong_folder_of)
        case Files():
            broken += _wrong_replaced(root / "model.pt", begun, done, _step_of_file, _wrong_file)
        case _:
            raise TypeError(f"no promises are known for {scenario.name}")
    return broken


def go_on(scenario: Scenario, root: Path, begun: int, rank: int = 0) -> list[str]:
    """Restart a training of one rank on ``root``: load, save two more steps, judge again, and look for leftovers.

    Returns the broken promises, as ``judge`` does. In a scenario of several ranks only the first rank restarts.
    """
    started = time.monotonic()
    broken: list[str] = []
    alone = Steps(scenario.name) if isinstance(scenario, Steps) and scenario.ranks > 1 else scenario
    if isinstance(alone, Steps):
        broken += _loads_newest(alone, root)
    make_old(root)
    with alone.saving(root, rank) as save:
        for step in (begun + 1, begun + 2):
            save(step)
    if scenario.ranks == 1:
        broken += judge(scenario, root, begun + 2, begun + 2)
    broken += [f"{path} is left over" for path in _hidden(root)]
    if (took := time.monotonic() - started) > LIMIT_S:
        broken.append(f"{root}: the restart took {took:.1f} s")
    return broken


def check_root(tally: Tally, root: str) -> None:
    """Judge a folder of steps of ``tally.to_save``, save once more, and look for leftovers."""
    wait_for_attempts(root, LIMIT_S)  # a dead trainer's worker still removes old steps
    for step, path in _named(Path(root), _STEP):
        tally.counts["checkpoints verified"] += 1
        for broken in [*map(str, verify(str(path)).damages), *_wrong_tortured(path, step)]:
            tally.lose(broken)
    make_old(Path(root))
    with Checkpointer(root, CONFIG) as checkpointer:
        checkpointer.prepare(jobs_of.state_of(0))  # waits for a worker that may still be writing
        last = max(complete_steps(root), default=0) + 1
        checkpointer.save(last, jobs_of.state_of(last)).result(LIMIT_S)
    for left in Path(root).glob(".*"):
        tally.lose(f"left over: {left}")


def _wrong_tortured(path: Path, step: int) -> list[str]:
    """Judge a step of ``tally.to_save`` with stock DCP and ``torch.load``."""
    broken = [wrong for folder in path.rglob(".metadata") for wrong in _wrong_dcp(folder.parent, step)]
    for file in path.glob("large_*.pt"):
        broken += _wrong_value(file, partial(torch.load, file), torch.full((jobs_of.SIZES[0],), float(step)))
    for file in path.glob("small/*.json"):
        broken += _wrong_value(file, file.read_bytes, str(step).encode())
    return broken


def _wrong_dcp(folder: Path, step: int) -> list[str]:
    found = dcp_files.FileSystemReader(folder).read_metadata().state_dict_metadata
    into: dict[str, Any] = {
        name: torch.zeros(of.size, dtype=of.properties.dtype) if isinstance(of, TensorStorageMetadata) else 0
        for name, of in found.items()
    }
    expected = {
        name: torch.full_like(into[name], value_of(name, step)) if torch.is_tensor(into[name]) else step
        for name in into
    }

    def load() -> dict[str, Any]:
        dcp.load(into, checkpoint_id=folder, no_dist=True)
        return into

    return _wrong_value(folder, load, expected)


def _named(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    """Yield the step and path of each final name in ``folder``."""
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(folder)):
            if match := pattern.fullmatch(name):
                yield int(match[1]), folder / name


def _missing(folder: Path, found: dict[int, Path], begun: int, done: int) -> list[str]:
    """Judge which steps exist. A step after ``begun`` was never saved. Step ``done`` or a newer step must exist."""
    broken = [f"{folder} has step {step}, which was never begun (up to {begun})" for step in found if step > begun]
    if done and max(found, default=0) < done:
        broken.append(f"{folder} lost step {done}, which was durable: {sorted(found)}")
    return broken


def _states(step: int, ranks: int, first: int = 0) -> dict[str, Any]:
    """Return the merged states of ``ranks`` ranks from ``first`` on, with flat names like those of DCP."""
    merged: dict[str, Any] = {}
    for rank in range(first, first + ranks):
        for name, value in state_of(step, rank).items():
            if isinstance(value, dict):
                merged.update({f"{name}.{key}": each for key, each in value.items()})
            else:
                merged[name] = value
    return merged


def blank(value: Any) -> Any:
    """Return a value of the same structure to load into."""
    if isinstance(value, dict):
        return {name: blank(each) for name, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


def _wrong_step(scenario: Steps, path: Path, step: int) -> list[str]:
    broken = _wrong_folder(path, _states(step, scenario.ranks), step)
    if isinstance(scenario, Sets):
        broken += _wrong_folder(path / "deep/down", _states(step, 1, first=1), step)
        broken += _wrong_value(path / "large_0.pt", lambda: torch.load(path / "large_0.pt"), state_of(step, 2))
        broken += _wrong_value(path / "small/0.json", lambda: (path / "small/0.json").read_bytes(), str(step).encode())
    return broken


def _wrong_folder(path: Path, expected: dict[str, Any], step: int) -> list[str]:
    """Judge a folder with stock DCP."""

    def load() -> dict[str, Any]:
        into: dict[str, Any] = blank(expected)
        dcp.load(into, checkpoint_id=str(path), no_dist=True)
        return into

    return _wrong_value(path, load, expected)


def _wrong_value(path: Path, load: Callable[[], Any], expected: Any) -> list[str]:
    try:
        value = load()
    except (Exception, CheckpointException) as error:
        # Retention may have removed the path meanwhile.
        return [_unreadable(path, error)] if path.exists() else []
    return [] if equal(value, expected) else [f"{path} has other values than were saved"]


def _unreadable(path: Path, error: BaseException) -> str:
    """Return the broken promise, without the stack that DCP puts before the error text."""
    text = str(error).strip().rpartition("\n")[2]
    return f"{path} has its final name and cannot be read: {type(error).__name__}: {text}"


def equal(value: Any, expected: Any) -> bool:
    """Return whether two states have the same structure and the same bits."""
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(equal(value[key], expected[key]) for key in expected)
    if isinstance(expected, torch.Tensor):
        return torch.equal(value, expected)
    return bool(value == expected)


def _wrong_replaced(
    path: Path, begun: int, done: int, step_of: Callable[[Path], int], wrong: Callable[[Path, int], list[str]]
) -> list[str]:
    """Judge a path that each save replaces: it must hold one whole step, from ``done`` to ``begun``."""
    if not path.exists():
        return [f"{path} is gone; step {done} was durable"] if done else []
    try:
        step = step_of(path)
    except (Exception, CheckpointException) as error:
        return [_unreadable(path, error)]
    if not done <= step <= begun:
        return [f"{path} has step {step}; step {done} was durable and {begun} was the newest begun"]
    broken = wrong(path, step)
    if broken and step < begun and wrong(path, begun) == []:  # a living worker has just replaced the file
        return []
    return broken


def _step_of_folder(path: Path) -> int:
    into = {"step": 0}
    dcp.load(into, checkpoint_id=str(path), no_dist=True)
    return into["step"]


def _wrong_folder_of(path: Path, step: int) -> list[str]:
    return _wrong_folder(path, _states(step, 1), step)


def _step_of_file(path: Path) -> int:
    return int(torch.load(path)["step"])


def _wrong_file(path: Path, step: int) -> list[str]:
    return _wrong_value(path, lambda: torch.load(path), state_of(step))


def _pointed(path: Path) -> int:
    """Return the step that a pointer names; 0 if there is no pointer; -1 if the pointer is torn."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return 0
    return int(text) if text.isdecimal() else -1


def _loads_newest(scenario: Steps, root: Path) -> list[str]:
    """Load as a restarted training does, from storage."""
    folders = {scenario.folder(root), scenario.durable_folder(root)}
    newest = max((step for folder in folders for step, _ in _named(folder, _STEP)), default=0)
    if not newest or isinstance(scenario, Sets):
        return []
    with Checkpointer(scenario.folder(root), scenario.config_in(root)) as checkpointer:
        into = blank(state_of(newest))
        found = checkpointer.load(into, memory=False)
    if found != newest or not equal(into, state_of(newest)):
        return [f"{root}: a restart loaded step {found}, not {newest}, or other values"]
    return []


def make_old(root: Path) -> None:
    """Make all unfinished work old, so the next save may remove it."""
    hour_ago = time.time() - 3600
    for path in _hidden(root):
        for each in (path, *path.rglob("*")):
            os.utime(each, (hour_ago, hour_ago), follow_symlinks=False)


def _hidden(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.name != ".metadata" and not _in_checkpoint(path, root)]


def _in_checkpoint(path: Path, root: Path) -> bool:
    """Return whether ``path`` belongs to a checkpoint with its final name."""
    parts = path.relative_to(root).parts[:-1]
    return any(_STEP.fullmatch(part) or _GLOBAL.fullmatch(part) or part == "latest" for part in parts)
