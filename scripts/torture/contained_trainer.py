"""A training that saves until it is killed, and writes down what it has done: ``contained_trainer.py ROOT LOG``."""

from __future__ import annotations

import logging
import os
import sys
import time

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError
from torture.tally import CONFIG, LIMIT_S, is_of, state_of

_STEP_S = 0.02


def main(root: str, log: str) -> None:
    logging.getLogger("asyncckpt").setLevel(logging.CRITICAL)
    out = os.open(log, os.O_WRONLY | os.O_APPEND)

    def say(*words: object) -> None:
        os.write(out, f"{' '.join(map(str, words))}\n".encode())

    with Checkpointer(root, CONFIG) as checkpointer:
        state = state_of(0)
        try:
            step = checkpointer.load(state)
        except CheckpointNotFoundError:
            step = 0
        source = checkpointer.loaded.source if checkpointer.loaded else "nothing"
        say("loaded", step, source, "right" if is_of(state, step) else "WRONG", os.environ.get("SLURM_STEP_ID", ""))
        while True:
            step += 1
            try:
                save = checkpointer.save(step, state_of(step))
                say("staged", step)
                if step % 2:
                    save.result(LIMIT_S)
                    say("durable", step)
            except CheckpointError as error:
                say("failed", step, type(error).__name__)
            time.sleep(_STEP_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
