"""Interrupt saves anywhere by signals. The signal handler raises an exception, or saves, too.

After any interruption, the next save works at once and holds the right values. No memory is left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from asyncckpt import Checkpointer, Save
from asyncckpt.errors import CheckpointError
from torture.jobs import count_rounds
from torture.tally import CONFIG, LIMIT_S, PATIENCE_S, Tally, is_of, state_of

# The structure changes now and then, so that signals also hit planning and allocation.
_STRUCTURES = 3


class _Interrupted(Exception):
    """Raised by the signal handler."""


def interrupt(tally: Tally, folder: Path, rounds: int, choice: random.Random) -> None:
    """Interrupt ``rounds`` saves."""
    count_rounds(tally, str(folder / "interruptions"), rounds, _train, choice)


def _train(pipe: Connection, rank: int, root: str, rounds: int, seed: int) -> None:
    choice = random.Random(seed)
    # An interrupted save is not lost: its handle reports the outcome, or the save never began.
    with Checkpointer(root, CONFIG) as checkpointer:
        steps = itertools.count(1)
        checkpointer.save(next(steps), _state(0, 0)).result(LIMIT_S)
        for number in range(rounds):
            pipe.send(("round", *_round(checkpointer, steps, number // 20, choice)))
    pipe.send(("ended",))


def _state(step: int, structure: int) -> dict[str, Any]:
    state = state_of(step)
    return state | {f"more{structure % _STRUCTURES}": state["both"][: 100 + structure % _STRUCTURES].clone()}


def _round(
    checkpointer: Checkpointer, steps: itertools.count[int], structure: int, choice: random.Random
) -> tuple[str, float, list[str]]:
    """Run one save with a signal, and one without."""
    step, inner = next(steps), next(steps)
    saves: list[Save] = []

    def raises(*_: object) -> None:
        raise (KeyboardInterrupt if choice.random() < 0.5 else _Interrupted)

    def saves_inside(*_: object) -> None:
        with contextlib.suppress(CheckpointError):
            saves.append(checkpointer.save(inner, _state(inner, structure)))

    handler: Callable[..., None] = choice.choice([raises, saves_inside])
    signal.signal(signal.SIGALRM, handler)
    how = "the signal came too late"
    state = _state(step, structure)
    try:
        signal.setitimer(signal.ITIMER_REAL, 10 ** choice.uniform(-4.5, -2.0))
        saves.append(checkpointer.save(step, state))
        time.sleep(0.001)
    except (KeyboardInterrupt, _Interrupted):
        how = "saves interrupted by an exception"
        if choice.random() < 0.3:  # some users save where they catch the exception
            saves.append(checkpointer.save(inner, _state(inner, structure)))
    except CheckpointError:
        how = "saves refused beside one in a handler"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if handler is saves_inside and len(saves) == 2:
        how = "saves in a handler"
    return how, *_check(checkpointer, saves, next(steps), structure)


def _check(checkpointer: Checkpointer, saves: list[Save], step: int, structure: int) -> tuple[float, list[str]]:
    begun = time.monotonic()
    losses = []
    for save in saves:
        try:
            save.result(LIMIT_S)
        except CheckpointError as error:
            losses.append(f"a save that was not interrupted failed: {error}")
    try:
        checkpointer.save(step, _state(step, structure)).result(LIMIT_S)
        found = checkpointer.load(into := _state(0, structure), memory=False)
        if found != step or not is_of(into, step):
            losses.append(f"after a signal step {found} was loaded, with wrong values or in the place of {step}")
        for save in saves:
            number = save.step or 0
            if number in checkpointer.steps():
                checkpointer.load(into := _state(0, structure), number, memory=False)
                if not is_of(into, number):
                    losses.append(f"step {number} has other values than were saved")
    except CheckpointError as error:
        losses.append(f"the save after a signal failed: {error}")
    took = time.monotonic() - begun
    if took > PATIENCE_S:
        losses.append(f"after a signal saving took {took:.1f} s")
    images = sum("memfd:asyncckpt" in each.path for each in psutil.Process(os.getpid()).memory_maps())
    if images > 2 * _STRUCTURES + 2:
        losses.append(f"{images} segments are mapped")
    return took, losses
