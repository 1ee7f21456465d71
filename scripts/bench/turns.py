"""Taking turns, so that a machine that is now fast and now slow is so for all."""

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
    """How many turns, how fast, and when it is enough."""

    rounds: int = 5
    """After a first one, that is cold."""
    pause: float = 0.5
    """Seconds before each turn, so that none pays for what the one before left the kernel to do."""
    patience: float = 60.0
    """Seconds after which a contestant takes no further turns, once it has had a cold and a warm one."""
    budget: float = 3600.0
    """Seconds after which no further round begins, once there was a cold and a warm one."""


@dataclass
class Turns(Generic[T]):
    """What came of them, by name, in order; and why some did not go on."""

    found: dict[str, list[T]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def take(turns: Mapping[str, Callable[[], T]], pace: Pace, what: str) -> Turns[T]:
    """Each round every one of ``turns`` is called once, in any order: what comes first is not always the same, nor who
    comes after whom. One that raises is left out with a note, and so is all that it had."""
    taken: Turns[T] = Turns({name: [] for name in turns})
    dice = random.Random(0)
    # From here on a collection looks at what is new, and not each time at all that torch and the peers are made of.
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
            gc.collect()  # what one leaves behind is not to be cleared up on another's time
            time.sleep(pace.pause)
            turn_begun = time.monotonic()
            try:
                taken.found[name].append(turns[name]())
            except (Exception, CheckpointException) as error:  # DCP's is no Exception
                taken.left_out[name] = told(error)
                del taken.found[name]
            spent[name] += time.monotonic() - turn_begun
    gc.unfreeze()
    return taken
