"""The manager for torchtitan, driven as its ``Trainer`` drives it, beside torchtitan's own manager."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.peers import TORCHTITAN, python

pytestmark = pytest.mark.usefixtures("forkserver")

HERE = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.mark.parametrize(
    "scenario",
    ["ours_and_stocks", "killed_while_writing"],
)
def test_as_the_trainer_does(scenario: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = {HERE!r}; import test_torchtitan; test_torchtitan.main()"
    python(code, *TORCHTITAN, arguments=(scenario, str(tmp_path)))


def main() -> None:
    """In a process that finds torchtitan."""
    globals()[sys.argv[1]](Path(sys.argv[2]))


# Each of these runs there.


def ours_and_stocks(folder: Path) -> None:
    """Two ranks, sharded by FSDP2: each manager goes on from the other's, to the bit."""
    from support import torchtitan_training as titan

    def train() -> None:
        whole = titan.Training(titan.ours(enable=False), folder)
        losses = whole.run(8)
        for mode in ("disabled", "async", "async_with_pinned_mem"):
            place, found = folder / mode, {}
            for config, steps in ((titan.ours, 4), (titan.stock, 5), (titan.ours, 8)):
                training = titan.Training(config(async_mode=mode), place)
                found |= training.run(steps)
            assert found == losses, (mode, found, losses)
            assert titan.steps_in(place) == [2, 4, 5, 6, 8]
            # All of its state, and not only what the losses show; also by stock.
            for config in (titan.ours, titan.stock):
                loaded = titan.Training(config(), place)
                assert loaded.checkpointer.load()
                assert same(loaded.values(), whole.values())
                loaded.checkpointer.close()

    titan.on_ranks(2, train, folder=folder)


def killed_while_writing(folder: Path) -> None:
    """Both ranks are killed while step 4 is written: it comes from memory, and stock finds it when it is durable."""
    from support import torchtitan_training as titan
    from support.ranks import faulty
    from support.workers import wait_reached

    gate = folder / "gate"
    os.environ["ASYNCCKPT_TEST_GATE"] = str(gate)

    def begin() -> None:
        faulty("finalize:hold:2")
        titan.Training(titan.ours(), folder).train(4, last=False)
        wait_reached(gate)
        titan.dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        losses = titan.Training(titan.ours(enable=False), folder).run(8)
        assert titan.steps_in(folder) == [2]
        training = titan.Training(titan.ours(), folder)
        with titan.heard("asyncckpt") as heard:
            found = training.train(5, last=False)
        assert found == {5: losses[5]} and "loaded step 4 from memory" in heard.getvalue()
        assert titan.steps_in(folder) == [2]
        titan.dist.barrier()
        gate.touch()
        assert training.train(6, last=False) == {6: losses[6]}
        training.checkpointer.close()
        assert titan.Training(titan.stock(), folder).train(8, last=False) == {7: losses[7], 8: losses[8]}
        assert titan.steps_in(folder) == [2, 4, 6, 8]

    titan.on_ranks(2, begin, folder=folder, codes={-signal.SIGKILL})
    titan.on_ranks(2, go_on, folder=folder)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )
