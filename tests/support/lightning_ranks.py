"""A script: two ranks train with Lightning, and say in the folder they are given what each finds of the checkpoints.
Then they train once more, and are killed while their third save is being written.
"""

import json
import os
import signal
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from lightning.pytorch import Callback

from asyncckpt.engine import shared as engines
from asyncckpt.integrations.lightning import AsyncckptIO
from support.lightning_training import Model, batches, every, trainer
from support.ranks import faulty
from support.workers import wait_reached

found: dict[str, Any] = {}
folder = Path(sys.argv[1])
gate = Path(os.environ["ASYNCCKPT_TEST_GATE"])


class Loading(Callback):
    """Each rank loads what the first one is still saving: its worker waits for a while."""

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if trainer.global_step == 4:
            if trainer.is_global_zero:
                Timer(0.5, gate.touch).start()
            path = folder / "now.ckpt"
            trainer.save_checkpoint(path)
            found["step of what was being saved"] = trainer.strategy.load_checkpoint(path)["global_step"]
            trainer.strategy.barrier()
            trainer.strategy.remove_checkpoint(path)


class Death(Callback):
    """Comes when the worker waits."""

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if trainer.is_global_zero and trainer.global_step == 5:
            engines.shared.get(alone=True).wait()
            gate.unlink()
            gate.with_name("gate.reached").unlink()
        if trainer.global_step == 7:
            if trainer.is_global_zero:
                wait_reached(gate)
                worker = engines.shared.get(alone=True).worker
                assert worker is not None
                (folder / "worker").write_text(str(worker.pid))
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def train(*callbacks: Callback) -> int:
    training = trainer(*callbacks, plugins=[AsyncckptIO()], devices=2, strategy="ddp")
    training.fit(Model(), batches())
    return training.global_rank


if __name__ == "__main__":
    faulty("begin:hold")
    saves = folder / "saves"
    rank = train(Loading(), every(6, saves, save_last=True))
    found["files"] = sorted(path.name for path in saves.iterdir())
    found["step of last.ckpt"] = torch.load(saves / "last.ckpt", weights_only=True)["global_step"]
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    train(Death(), every(2, folder / "killed", save_last="link"))
