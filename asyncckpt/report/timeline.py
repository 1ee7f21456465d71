"""``asyncckpt timeline``: when each rank did what for each save, as a trace, and as a picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys

from asyncckpt.errors import StorageError
from asyncckpt.report.answers import UNUSABLE, Answers
from asyncckpt.report.formats import number
from asyncckpt.report.places import manifests_at
from asyncckpt.report.trace import RankOfSave, ranks_of, trace


def show_timeline(answers: Answers, _: None, args: argparse.Namespace) -> None:
    """Write the trace of all saves at ``args.places`` to ``args.out``, or to stdout, and draw it to ``args.png``."""
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        answers.say("--png wants matplotlib, which is not installed: pip install matplotlib")
        answers.fail(UNUSABLE)
        return
    if args.out is None and args.png is None and sys.stdout.isatty():
        answers.say("the trace is long, and no text: name a file for it (-o trace.json), or pipe it")
        answers.fail(UNUSABLE)
        return
    saves: list[list[RankOfSave]] = []
    for given in args.places:
        for path, manifest in manifests_at(answers, given):
            if its := ranks_of(path, manifest):
                saves.append(its)
            else:
                answers.say(f"{path}: it does not say when it was saved, and is left out")
    if not saves:
        answers.say("there is no save to show")
        answers.fail(UNUSABLE)
        return
    with answers.about(args.out or args.png or "stdout"):
        if args.out is not None or args.png is None:
            _write(answers, args.out, json.dumps(trace(rank for save in saves for rank in save), allow_nan=False))
        if args.png is not None:
            from asyncckpt.report.timeline_picture import draw  # here, as matplotlib may be missing

            try:
                draw(saves, args.png)
            except OSError as error:
                raise StorageError(f"writing failed: {error.strerror}", path=args.png) from error
        shown = f"{number(len(saves), 'save')} of {number(max(map(len, saves)), 'rank')}"
        for file, how in ((args.out, "; ui.perfetto.dev opens it"), (args.png, "")):
            if file is not None:
                answers.print(f"{file}: {shown}{how}")


def _write(answers: Answers, path: str | None, text: str) -> None:
    if path is None:
        answers.print(text)
        return
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"writing failed: {error.strerror}", path=path) from error
