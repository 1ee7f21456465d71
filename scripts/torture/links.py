"""Remove, damage and exchange checkpoints while the next save links their files. No save may take the damage over."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from asyncckpt import Checkpointer
from asyncckpt.loading.source import verify
from asyncckpt.storage import step_folder
from torture.jobs import count_rounds
from torture.tally import CONFIG, LIMIT_S, Tally, is_of, state_of

_DEEDS = ("remove", "rename", "exchange", "flip", "flip", "cut", "replace", "touch", "nothing")
_LATEST_S = 0.02
_KEPT = 6


def break_links(tally: Tally, folder: Path, rounds: int, choice: random.Random) -> None:
    """Change the newest checkpoint, or another one, before or during a save, ``rounds`` times."""
    count_rounds(tally, str(folder / "links"), rounds, _train, choice)


def _train(pipe: Connection, rank: int, root: str, rounds: int, seed: int) -> None:
    choice = random.Random(seed)
    good: list[int] = []
    config = replace(CONFIG, keep_last=None, rewrite_unchanged_every=choice.choice([5, 100]))
    with Checkpointer(root, config) as checkpointer:
        for step in range(1, rounds + 1):
            begun = time.monotonic()
            what, losses = _round(checkpointer, root, step, good, choice)
            pipe.send(("round", what, time.monotonic() - begun, losses))
    for step in good:
        if verify(step_folder(root, step)).damages:
            pipe.send(("round", "steps checked", 0.0, [f"step {step} was good, and nobody has touched it since"]))
    for step in range(1, rounds + 1):  # remove the damaged steps, which were found
        if step not in good:
            shutil.rmtree(step_folder(root, step), ignore_errors=True)
    pipe.send(("ended",))


def _round(
    checkpointer: Checkpointer, root: str, step: int, good: list[int], choice: random.Random
) -> tuple[str, list[str]]:
    deed = choice.choice(_DEEDS) if len(good) > 2 else "nothing"
    victim = good[-1] if good and choice.random() < 0.7 else choice.choice(good or [0])
    file = None if deed == "nothing" else _most_shared(root, victim)
    inode = 0 if file is None else file.stat().st_ino
    sharing = [victim]
    if deed in ("flip", "cut"):
        sharing = [each for each in good if inode in _inodes(root, each)]
    late = choice.choice([0.0, choice.uniform(0, _LATEST_S)])
    doer = threading.Thread(target=_do, args=(deed, root, victim, file, late))
    is_before = choice.random() < 0.5
    doer.start()
    if is_before:
        doer.join()
    checkpointer.save(step, state_of(step)).result(LIMIT_S)
    doer.join()
    losses = []
    if deed != "nothing":
        good[:] = [each for each in good if each not in sharing]
    for each in sharing if deed in ("flip", "cut") else ():
        if os.path.exists(step_folder(root, each)) and not verify(step_folder(root, each)).damages:
            losses.append(f"verify has not found: {deed} of step {victim}, in step {each}")
    shares = deed in ("flip", "cut") and inode in _inodes(root, step)
    if shares and is_before:
        losses.append(f"step {step} was linked to step {victim} after a {deed}")
    if not shares:  # otherwise the file was linked just before the damage
        if verify(step_folder(root, step)).damages:
            losses.append(f"step {step} is damaged, beside a {deed} of step {victim}")
        checkpointer.load(into := state_of(0), step, memory=False)
        if not is_of(into, step):
            losses.append(f"step {step} has other values, beside a {deed} of step {victim}")
        good.append(step)
    for each in good[:-_KEPT]:
        shutil.rmtree(step_folder(root, each))
    del good[:-_KEPT]
    return f"links: {deed}", losses


def _inodes(root: str, step: int) -> set[int]:
    return {each.stat().st_ino for each in Path(step_folder(root, step)).glob("*.distcp")}


def _most_shared(root: str, step: int) -> Path:
    return max(Path(step_folder(root, step)).glob("*.distcp"), key=lambda file: file.stat().st_nlink)


def _do(deed: str, root: str, victim: int, file: Path | None, after_s: float) -> None:
    time.sleep(after_s)
    folder = Path(step_folder(root, victim))
    if file is None:
        return
    match deed:
        case "remove":
            shutil.rmtree(folder)
        case "rename":
            folder.rename(f"{root}/renamed")
            shutil.rmtree(f"{root}/renamed")
        case "exchange":
            shutil.copytree(folder, f"{root}/copied")
            folder.rename(f"{root}/renamed")
            Path(f"{root}/copied").rename(folder)
            shutil.rmtree(f"{root}/renamed")
        case "flip":
            with file.open("r+b") as opened:
                opened.seek(place := file.stat().st_size // 2)
                byte = opened.read(1)[0]
                opened.seek(place)
                opened.write(bytes([byte ^ 1]))
        case "cut":
            os.truncate(file, file.stat().st_size - 1)
        case "replace":
            shutil.copyfile(file, f"{file}.new")
            os.replace(f"{file}.new", file)
        case "touch":
            os.utime(file)
