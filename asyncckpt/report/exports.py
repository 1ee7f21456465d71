"""``asyncckpt export``: what was made."""

from __future__ import annotations

import argparse

from asyncckpt.exporting import command as exporting
from asyncckpt.report.answers import Answers
from asyncckpt.report.formats import number, size_of


def show_export(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Export what is at ``given``, and say what was made."""
    with answers.about(given):
        done = exporting.run(given, args)
        answers.add(done.facts())
        answers.line(f"{done.path}: {number(done.tensors, 'tensor')} in {size_of(done.nbytes)}, from {done.source}")
        for line in exporting.remarks(done):
            answers.line(line)
