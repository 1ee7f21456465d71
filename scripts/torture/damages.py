"""Damage and exchange checkpoints in every way. ``verify`` must find all, and no load may return wrong values."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.loading.source import verify
from asyncckpt.storage import step_folder
from torture.tally import CONFIG, LIMIT_S, Tally, is_of, state_of


def damage(tally: Tally, folder: Path, damages: int, choice: random.Random) -> None:
    """Damage checkpoints in every way. ``verify`` must find all, and no load may return wrong values."""
    root = folder / "damages"
    with Checkpointer(root, CONFIG) as checkpointer:
        checkpointer.save(1, state_of(1)).result(LIMIT_S)
    good = Path(step_folder(str(root), 1))
    bad = root / "step-00000002"
    for _ in tqdm(range(damages), desc="damages", unit="damage", disable=None):
        shutil.copytree(good, bad)
        how = choice.choice(["flip", "truncate", "drop", "swap"])
        files = sorted(bad.iterdir())
        file = choice.choice(files)
        size = file.stat().st_size
        if how == "flip":
            with file.open("r+b") as opened:
                opened.seek(place := choice.randrange(size))
                byte = opened.read(1)[0]
                opened.seek(place)
                opened.write(bytes([byte ^ (1 << choice.randrange(8))]))
        elif how == "truncate":
            os.truncate(file, choice.randrange(size))
        elif how == "drop":
            file.unlink()
        else:
            other = choice.choice([each for each in files if each != file])
            file.rename(bad / "aside")
            other.rename(file)
            (bad / "aside").rename(other)
        _check_damaged(tally, bad, f"{how} {file.name}")
        shutil.rmtree(bad)


def _check_damaged(tally: Tally, bad: Path, what: str) -> None:
    try:
        found = bool(verify(str(bad)).damages)
    except CheckpointError:
        found = True
    tally.counts["damages found by verify"] += found
    if not found:
        tally.lose(f"verify has not found: {what}")
    into = state_of(0)
    try:
        with Checkpointer(bad.parent, CONFIG) as checkpointer:
            checkpointer.load(into, 2, memory=False)
    except CheckpointError:
        tally.counts["damages refused by load"] += 1
        return
    if not is_of(into, 1):
        tally.lose(f"loaded silently: {what}")
    tally.counts["damages in bytes that load does not need"] += 1


def exchange(tally: Tally, folder: Path, exchanges: int, choice: random.Random) -> None:
    """Replace a checkpoint, or one of its files, by that of another step. No load may return another step's values."""
    root, good = folder / "exchanges", folder / "exchanges-good"
    with Checkpointer(root, replace(CONFIG, keep_last=None)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step)).result(LIMIT_S)
    root.rename(good)
    for _ in tqdm(range(exchanges), desc="exchanges", unit="exchange", disable=None):
        shutil.copytree(good, root)
        one, other = choice.sample([1, 2, 3], 2)
        first, second = Path(step_folder(str(root), one)), Path(step_folder(str(root), other))
        how = choice.choice(["swap", "copy over", "copy beside", "file"])
        wrong = {one}
        if how == "swap":
            first.rename(root / "aside")
            second.rename(first)
            (root / "aside").rename(second)
            wrong.add(other)
        elif how == "copy over":
            shutil.rmtree(first)
            shutil.copytree(second, first)
        elif how == "copy beside":
            wrong = {4}
            shutil.copytree(second, step_folder(str(root), 4))
        else:
            name = choice.choice(sorted({*os.listdir(first)} & {*os.listdir(second)}))
            how += f" {name}"
            shutil.copyfile(second / name, first / name)
            if (first / name).read_bytes() == (Path(step_folder(str(good), one)) / name).read_bytes():
                wrong = set()
        _check_exchanged(tally, root, wrong, f"{how}, {other} for {one}")
        shutil.rmtree(root)


def _check_exchanged(tally: Tally, root: Path, wrong: set[int], what: str) -> None:
    tally.counts["checkpoints exchanged"] += 1
    for step in sorted(wrong):
        try:
            found = bool(verify(step_folder(str(root), step)).damages)
        except CheckpointError:
            found = True
        if not found:
            tally.lose(f"verify has not found: {what}")
    with Checkpointer(root, replace(CONFIG, keep_last=None)) as checkpointer:
        for step in {1, 2, 3, *wrong}:
            try:
                found_step = checkpointer.load(into := state_of(0), step, memory=False)
            except CheckpointError:
                if step not in wrong:
                    tally.lose(f"step {step} does not load, beside: {what}")
                continue
            if found_step != step or not is_of(into, step):
                tally.lose(f"loaded step {found_step} with other values: {what}")
        try:
            newest = checkpointer.load(into := state_of(0), fallback=True, memory=False)
        except CheckpointError as error:
            tally.lose(f"nothing loads with a fallback ({error}): {what}")
            return
        if newest in wrong or not is_of(into, newest):
            tally.lose(f"with a fallback step {newest} has other values: {what}")
