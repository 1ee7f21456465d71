"""``asyncckpt doctor``: say before a training what it will meet at its root and on this host."""

from __future__ import annotations

import argparse

from asyncckpt.config import Config
from asyncckpt.doctor.diagnosis import diagnose
from asyncckpt.exporting.selection import parse_bytes
from asyncckpt.report.answers import UNUSABLE, Answers
from asyncckpt.storage import absolute, tier_folders


def show_diagnosis(answers: Answers, root: str, args: argparse.Namespace) -> None:
    """Print a line for each finding."""
    nbytes = None if args.size is None else parse_bytes(args.size)
    config = Config.from_env()
    diagnosis = diagnose(tier_folders(absolute(root), config.local_root), config, nbytes=nbytes)
    for each in diagnosis.findings:
        answers.add(each._asdict())
    answers.line(str(diagnosis))
    if diagnosis.level == "fails":
        answers.fail(UNUSABLE)
