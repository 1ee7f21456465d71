"""Let contestants take turns, so that slow phases of the machine affect all of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from tqdm import tqdm

from bench.contestants import told

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The number of turns, the pauses, and the time limits."""

    rounds: int = 5
    """The number of rounds after a first, cold one."""
    pause: float = 0.5
    """Seconds before each turn, so that the kernel's work for the previous turn does not count."""
    patience: float = 60.0
    """Seconds of turns after which a contestant takes no more, once it has had a cold and a warm one."""
    budget: float = 3600.0
    """Seconds after which no round begins, once there was a cold and a warm one."""


@dataclass
class Turns(Generic[T]):
    """The results of all turns by name, in order, and the reasons for contestants left out."""

    found: dict[str, list[T]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def take(turns: Mapping[str, Callable[[], T]], pace: Pace, what: str) -> Turns[T]:
    """Call each of ``turns`` once in each round, in random order, so that first place and predecessor vary.

    If a call raises, the contestant and its earlier results are left out, with a note.
    """
    taken: Turns[T] = Turns({name: [] for name in turns})
    dice = random.Random(0)
    # Garbage collections from here on skip the objects of torch and the peers.
    gc.collect()
    gc.freeze()
    begun = time.monotonic()
    spent = dict.fromkeys(turns, 0.0)
    for number in tqdm(range(pace.rounds + 1), desc=what, unit="round", leave=False, disable=None):
        if number >= 2 and time.monotonic() - begun > pace.budget:
            break
        for name in dice.sample(list(turns), len(turns)):
            if name not in taken.found or (number >= 2 and spent[name] > pace.patience):
                continue
            gc.collect()  # so that a turn does not pay for the garbage of another one
            time.sleep(pace.pause)
            turn_begun = time.monotonic()
            try:
                taken.found[name].append(turns[name]())
            except (Exception, CheckpointException) as error:  # DCP's exception is a BaseException
                taken.left_out[name] = told(error)
                del taken.found[name]
            spent[name] += time.monotonic() - turn_begun
    gc.unfreeze()
    return taken
