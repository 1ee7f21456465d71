"""``asyncckpt mark``: take steps out of a history, so that no training loads them."""

from __future__ import annotations

import argparse
import os

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointNotFoundError, JobTakenError
from asyncckpt.format.manifest import MANIFEST_NAME
from asyncckpt.link.root_lock import holder_on_this_host
from asyncckpt.link.takeover import is_running
from asyncckpt.report.answers import Answers
from asyncckpt.storage import absolute, step_folder, storage_for, tier_folders


def mark(answers: Answers, root: str, args: argparse.Namespace) -> None:
    """Rename the checkpoints of ``args.steps`` to ``step-00000100.bad-1``, in all folders of the run."""
    folders = tier_folders(absolute(root), Config.from_env().local_root)
    for folder in folders:
        holder = holder_on_this_host(folder)
        if holder is not None and is_running(holder.trainer):
            raise JobTakenError(f"the trainer {holder.trainer} saves here: end it first", path=folder)
    for step in args.steps:
        with answers.about(step, "step"):
            paths = [step_folder(folder, step) for folder in folders]
            there = [path for path in paths if storage_for(path).exists(os.path.join(path, MANIFEST_NAME))]
            if not there:
                raise CheckpointNotFoundError("there is no such checkpoint", path=paths[-1], step=step)
            for path in there:
                storage_for(path).set_aside(path, "bad")
                answers.line(f"{path} is no step of this run any more")
                answers.add({"path": path, "step": step, "bad": True})
