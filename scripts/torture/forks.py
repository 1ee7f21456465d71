"""Fork the trainer anywhere, as data loaders do. The children hold no memory of asyncckpt, and break nothing."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError, ClosedError
from torture.jobs import count_rounds
from torture.tally import CONFIG, LIMIT_S, PATIENCE_S, Tally, is_of, state_of

_HOLDS, _SAVED, _FAILED = 3, 4, 5
_TROUBLES = {
    _HOLDS: "a fork holds memory of ours",
    _SAVED: "a fork could save",
    _FAILED: "a save in a fork ended by another error than ClosedError",
}


def fork(tally: Tally, folder: Path, rounds: int, choice: random.Random) -> None:
    """Fork the trainer ``rounds`` times."""
    count_rounds(tally, str(folder / "forks"), rounds, _train, choice)


def _train(pipe: Connection, rank: int, root: str, rounds: int, seed: int) -> None:
    choice = random.Random(seed)
    with Checkpointer(root, CONFIG) as checkpointer:
        checkpointer.save(1, state_of(1)).result(LIMIT_S)  # a fork before the first save could be a job of its own
        for step in range(2, rounds + 2):
            state = state_of(step) | {f"more{number}": state_of(step)["both"] for number in range(step // 30 % 3)}
            children: list[int] = []
            forks = threading.Thread(target=_fork_later, args=(checkpointer, choice.uniform(0, 0.02), children))
            begun = time.monotonic()
            losses = []
            if choice.random() < 0.5:
                forks.start()  # from another thread, anywhere in the save
                save = checkpointer.save(step, state)
            else:
                save = checkpointer.save(step, state)
                forks.start()
            try:
                save.result(LIMIT_S)
                into = state_of(0) | {name: value.clone() for name, value in state.items() if name.startswith("more")}
                if checkpointer.load(into, memory=False) != step or not is_of(into, step):
                    losses.append(f"step {step} does not load after a fork")
            except CheckpointError as error:
                losses.append(f"a save failed beside a fork: {error}")
            forks.join()
            took = time.monotonic() - begun
            for child in children:
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if code:
                    losses.append(_TROUBLES.get(code, f"a fork ended with {code}"))
            if took > PATIENCE_S:
                losses.append(f"beside a fork a save took {took:.1f} s")
            pipe.send(("round", "forks", took, losses))
    pipe.send(("ended",))


def _fork_later(checkpointer: Checkpointer, pause: float, children: list[int]) -> None:
    time.sleep(pause)
    child = os.fork()
    if child:
        children.append(child)
        return
    code = 1
    try:
        code = _in_child(checkpointer)
    finally:
        os._exit(code)


def _in_child(checkpointer: Checkpointer) -> int:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fds.append(os.readlink(f"/proc/self/fd/{name}"))
    if "/memfd:asyncckpt " in Path("/proc/self/maps").read_text() or any("/memfd:asyncckpt " in fd for fd in fds):
        return _HOLDS
    try:
        checkpointer.save(10**6, {})
    except ClosedError:
        return 0
    except Exception:
        traceback.print_exc()
        return _FAILED
    return _SAVED
