"""Measure saves of a state that mostly stays the same: a frozen base with trained tensors beside it.

Both contestants are asyncckpt, each with its own checkpointer that keeps two checkpoints. A turn changes every byte of
the trained tensors, saves, and ends when the checkpoint is durable. The first saves are reported separately, because
the very first one writes everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch

from asyncckpt import Checkpointer, Config
from asyncckpt.storage import step_folder
from bench import contestants, files
from bench.contestants import told
from bench.costs import computed_s
from bench.limits import Limits
from bench.states import GIB, State, blank, local_of, same_tensors, tensors_of, with_tensors
from bench.turns import Pace, Turns, take

MIB = 1 << 20
FROZEN, CHANGING = 256, 64
"""Numbers of frozen and of changing tensors."""
FIRST = 2
"""The number of first saves that are reported separately."""
LINKED, FULL = contestants.OURS, "all is written"
ALL_LINKED, ALL_FULL = "asyncckpt, all changes", "all is written, all changes"
COPY_CHANGING, WRITE_CHANGING, DIGESTS = "copy of what changes", "direct write of what changes", "XXH3 of all"
LIMIT_S = 600.0
# Work of the worker after a save is durable, such as removing an older checkpoint, counts for that save.
_REST_S = 0.1

Row = dict[str, float]


class Saver:
    """The saves of one contestant, one after the other."""

    def __init__(self, root: str, config: Config, train: Callable[[], State], meet: Callable[[], object]) -> None:
        """Create the checkpointer, and prepare it.

        Args:
            root: The folder for the checkpoints.
            config: The configuration that makes this contestant.
            train: Changes the trained tensors, and returns the state to save.
            meet: Waits until all ranks have called it.
        """
        self._train, self._meet, self._step = train, meet, 0
        before = _started()
        self._checkpointer = Checkpointer(root, config)
        self._checkpointer.prepare(self._next())
        self._workers = _started() - before

    def save(self) -> Row:
        """Train one step, save the state, and return the measurements."""
        state = self._next()
        self._meet()
        computed, theirs = time.process_time(), self._computed()
        begun = time.perf_counter()
        save = self._checkpointer.save(self._step, state)
        returned = time.perf_counter()
        save.result(LIMIT_S)
        durable = time.perf_counter()
        time.sleep(_REST_S)
        row = {"call_s": returned - begun, "durable_s": durable - begun}
        row |= {"trainer_cpu_s": time.process_time() - computed, "worker_cpu_s": self._computed() - theirs}
        return row | self._written() | {"memory": _held(self._workers)}

    def check(self) -> None:
        """Check that a checkpoint has the saved values. Raises ``RuntimeError``."""
        state = self._next()
        self._checkpointer.save(self._step, state).result(LIMIT_S)
        self._checkpointer.load(loaded := blank(state), self._step, memory=False)
        if not same_tensors(with_tensors(state, local_of), with_tensors(loaded, local_of)):
            raise RuntimeError("its checkpoint has other values")

    def close(self) -> None:
        self._checkpointer.close()

    def _next(self) -> State:
        """Return the state of the next step, with a few values that are not tensors."""
        self._step += 1
        return self._train() | {"step": self._step, "lr": 0.1 / self._step, "name": "bench"}

    def _computed(self) -> float:
        """Return the CPU seconds of the workers."""
        return sum(map(computed_s, self._workers))

    def _written(self) -> Row:
        """Return the bytes that only the newest checkpoint has: their number, and their size on the disk."""
        facts = map(os.stat, files.files_in(step_folder(self._checkpointer.root, self._step)))
        own = [each for each in facts if each.st_nlink == 1]
        return {"written": sum(each.st_size for each in own), "allocated": sum(each.st_blocks for each in own) * 512}


def _started() -> set[int]:
    """Return the ids of all descendants of this process."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _held(pids: set[int]) -> int:
    """Return the bytes of shared memory that these processes hold, mapped or not. Each memory file counts once."""
    found = {}
    for pid in pids:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            if os.readlink(entry.path).startswith("/memfd:"):
                facts = os.stat(entry.path)
                found[facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())


def configs(frozen: list[str]) -> dict[str, Config]:
    """Return the configuration of each contestant. ``frozen``: name patterns of the unchanged tensors."""
    # The checkpointer keeps two checkpoints, so each file that the newest one linked has more than one link.
    linked = Config(linger=0, keep_last=2, assume_unchanged=frozen)
    return {LINKED: linked, FULL: replace(linked, link_unchanged=False)}


def take_turns(savers: Mapping[str, Saver], limits: Mapping[str, Callable[[], float]], pace: Pace) -> Turns[Row]:
    """Return the rows of all saves and ``limits`` in order, with the first ones. Check each contestant at the end."""
    turns: dict[str, Callable[[], Row]] = {name: saver.save for name, saver in savers.items()}
    turns |= {name: partial(_limit, call) for name, call in limits.items()}
    # ``take`` adds one turn that does not count.
    more = Pace(rounds=pace.rounds + FIRST - 1, pause=pace.pause, patience=pace.patience, budget=pace.budget)
    taken = take(turns, more, "save, unchanged")
    # All ranks check in the same order.
    for name, saver in savers.items():
        if name not in taken.found:
            continue
        try:
            saver.check()
        except Exception as error:
            taken.left_out[name] = told(error)
            del taken.found[name]
    return taken


def _limit(call: Callable[[], float]) -> Row:
    return {"s": call()}


def results(found: Mapping[str, list[Row]]) -> dict[str, Any]:
    """Return by contestant the columns of the counted saves, and the first saves as rows."""
    return {
        name: {"first": rows[:FIRST]} | {key: [row[key] for row in rows[FIRST:]] for key in rows[0]}
        for name, rows in found.items()
        if "s" not in rows[0]
    }


def limits_of(found: Mapping[str, list[Row]]) -> dict[str, list[float]]:
    """Return the seconds of each limit."""
    return {name: [row["s"] for row in rows[1:]] for name, rows in found.items() if "s" in rows[0]}


def measure(gib: float, changing_mib: float, pace: Pace, folder: str) -> dict[str, Any]:
    """Measure a frozen base with changing tensors beside it, then the same state with all tensors changing."""
    state = make(int(gib * GIB), int(changing_mib * MIB))
    nbytes, changing = _nbytes(state), _nbytes({"changing": state["changing"]})
    with ExitStack() as opened:
        whole, part = (opened.enter_context(Limits(each, folder)) for each in (nbytes, changing))
        limits = whole.of_copies() | {DIGESTS: whole.digests_all_cores}
        limits |= {COPY_CHANGING: part.memcpy, WRITE_CHANGING: part.direct_write}
        both = configs(["frozen.*"])
        some = _turns(both, state, ["changing"], limits, pace, folder)
    both = {ALL_LINKED: both[LINKED], ALL_FULL: both[FULL]}
    every = _turns(both, state, ["changing", "frozen"], {}, pace, folder)
    return {
        "title": f"{changing_mib:g} MiB of {gib:g} GiB change, one rank",
        "nbytes": nbytes,
        "changing": changing,
        "limits": limits_of(some.found),
        "results": results(some.found) | results(every.found),
        "left_out": some.left_out | every.left_out,
    }


def make(nbytes: int, changing: int) -> State:
    """Return a state of ``nbytes`` with ``changing`` bytes to train. Raises ``ValueError`` if the sizes do not fit."""
    if not 0 < changing < nbytes:
        raise ValueError(f"{changing} bytes of {nbytes} cannot change while the others do not")
    torch.manual_seed(1)
    sizes = {"frozen": (nbytes - changing, FROZEN), "changing": (changing, CHANGING)}
    return {
        kind: {str(number): torch.rand(max(1, of_it // count // 4)) for number in range(count)}
        for kind, (of_it, count) in sizes.items()
    }


def _nbytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state))


def _turns(
    who: Mapping[str, Config],
    state: State,
    kinds: list[str],
    limits: Mapping[str, Callable[[], float]],
    pace: Pace,
    folder: str,
) -> Turns[Row]:
    """Take turns of all contestants and limits. ``kinds``: the parts of the state that change."""
    tensors = [tensor for kind in kinds for tensor in state[kind].values()]

    def train() -> State:
        torch._foreach_add_(tensors, 1.0)
        return state

    with ExitStack() as opened:
        savers = {}
        for name, config in who.items():
            savers[name] = Saver(os.path.join(folder, name), config, train, lambda: None)
            opened.callback(savers[name].close)
        return take_turns(savers, limits, pace)
