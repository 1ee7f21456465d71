"""The demo's training processes. Each is forked from ``run.py`` before that has trained or saved anything.

What happens is reported to ``run.py`` in pairs of a word and what there is to say, over a pipe.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.demo.measuring import measure
from asyncckpt.demo.training import Training
from asyncckpt.save_handle import Save

# The one that resumes is started at once. Where the demo is interrupted no worker stays for long.
_CONFIG = Config(keep_last=3, linger=60)


@dataclass(frozen=True)
class Job:
    """What a training process is to do."""

    folder: str
    """Where its checkpoints are."""
    size: str
    every: int
    """Steps from save to save."""
    last: int
    """The step at which it ends."""
    pairs: int
    """How often to measure what saves cost, at most."""
    deadline: float
    """Of ``time.monotonic``: one that is to be killed is killed at the first save after it, and no costs are measured
    for longer."""


class _Run:
    """A training with a checkpointer, and its reports."""

    def __init__(self, job: Job, reports: Connection) -> None:
        # Ctrl-C, and what ends the demo, are for the demo, which then ends this.
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.job, self._reports = job, reports
        self.training = Training(job.size)
        self.checkpointer = Checkpointer(job.folder, _CONFIG)

    def report(self, word: str, said: Any) -> None:
        """Tell ``run.py`` what has happened."""
        self._reports.send((word, said))

    def train(self, last: int) -> Save | None:
        """Train until step ``last``. Returns the newest save."""
        save = None
        while self.training.step < last:
            loss = self.training.train()
            self.report("loss", (self.training.step, loss))
            if self.training.step % self.job.every == 0:
                save = self.checkpointer.save(self.training.step, self.training.state())
        return save


def train_until_killed(job: Job, reports: Connection) -> None:
    """Train and save. After the last save, or the first one after the deadline, SIGKILL ends this process."""
    run = _Run(job, reports)
    run.checkpointer.prepare(run.training.state())
    while True:
        save = run.train(run.training.step + job.every)
        if save is not None and (run.training.step >= job.last or time.monotonic() > job.deadline):
            facts = {"parameters": run.training.parameters, "state_bytes": run.training.state_bytes}
            run.report("killed", facts | {"device": str(run.training.device), "while_writing": not save.done()})
            os.kill(os.getpid(), signal.SIGKILL)


def resume(job: Job, reports: Connection) -> None:
    """Go on from the newest checkpoint of a trainer that was killed."""
    run = _Run(job, reports)
    loaded = run.training.resume(run.checkpointer)
    run.report("resumed", {"step": loaded.step, "source": loaded.source, "seconds": loaded.seconds})
    run.train(job.last)
    run.report("state", run.training.digest())
    run.checkpointer.close()


def train_and_measure(job: Job, dcp_folder: str, reports: Connection) -> None:
    """Train from the beginning to the end, and then on, to measure what saves cost.

    Args:
        job: What to do.
        dcp_folder: Where torch.distributed.checkpoint is to save.
        reports: Where to report, and where it is said that nobody else of the demo computes any more.
    """
    run = _Run(job, reports)
    run.checkpointer.prepare(run.training.state())
    run.train(job.last)
    run.report("state", run.training.digest())
    run.checkpointer.wait()
    reports.recv()

    def report_round(done: int, total: int) -> None:
        run.report("round", (done, total))

    pairs = measure(run.training, run.checkpointer, dcp_folder, job.pairs, job.deadline, report_round)
    run.report("pairs", pairs)
    run.checkpointer.close()
