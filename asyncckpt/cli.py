"""The command line: its options and commands. The modules in ``report/`` produce the answers."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

import asyncckpt
from asyncckpt import demo
from asyncckpt.loading.data_file import CheckedFiles
from asyncckpt.report.advice import advise
from asyncckpt.report.answers import UNUSABLE, Answers
from asyncckpt.report.diff import show_diff
from asyncckpt.report.exports import add_export
from asyncckpt.report.listing import DiskUse, inspect_checkpoint, list_checkpoints
from asyncckpt.report.timeline import show_timeline
from asyncckpt.report.verification import verify_checkpoints
from asyncckpt.report.workers import show_workers

_UNREAD = 128 + signal.SIGPIPE  # the status that a shell reports for a command ended by a closed pipe


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status. It is 0 if all is good. It is 1 if a checkpoint is damaged or, for ``diff``, two checkpoints
            differ. It is 2 if something is missing, or cannot be used. It is 141 if the reader has closed the pipe
            before the end.
    """
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPED)  # a path is bytes, and may not be valid text
    try:
        status = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except OSError as error:  # `asyncckpt ls | head`, or a full disk
        if argv[:1] == ["demo"] and not _is_unread():  # the error is not about stdout
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return _UNREAD
        print(f"asyncckpt: nothing can be written to stdout: {error.strerror}", file=sys.stderr)
        return UNUSABLE


def _run(argv: list[str]) -> int:
    """Run a command. Raises ``OSError`` if stdout cannot be written."""
    if argv[:1] == ["demo"]:  # has its own options, and needs torch
        return demo.main(argv[1:])
    args = _parser().parse_args(argv)
    answers = Answers(args.json)
    for path in args.paths:
        with answers.about(path or "asyncckpt"):
            args.run(answers, path, args)
    answers.show()
    return answers.status


def _is_unread() -> bool:
    """Return whether stdout is a pipe that has lost its reader."""
    poll = select.poll()
    poll.register(1, 0)
    return any(flags & select.POLLERR for _, flags in poll.poll(0))


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write bytes of a path unchanged, and other characters without an encoding as Python escapes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


_ESCAPED = "asyncckpt_escaped"
codecs.register_error(_ESCAPED, _escaped)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncckpt", description="Look at checkpoints, and check them.")
    parser.add_argument("--version", action="version", version=f"asyncckpt {asyncckpt.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. Exits with 0 if all is good, with 1 if a checkpoint is damaged,"
            " and with 2 if something is not there or cannot be used (141: nobody has read all of the answer).",
            epilog=f"examples: asyncckpt {name} checkpoints; asyncckpt {name} checkpoints/step-00000100",
        )
        added.add_argument(
            "paths",
            metavar="PATH",
            nargs="+",
            help="a folder of checkpoints, or a checkpoint; also stock DCP's, which have no checksums",
        )
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(run=run)
        return added

    command("ls", list_checkpoints, "list checkpoints").set_defaults(disk_use=DiskUse())
    inspect = command("inspect", inspect_checkpoint, "show what is in a checkpoint; of a folder of them, in the newest")
    inspect.add_argument("--shards", action="store_true", help="show the shards of each tensor, and where they are")
    verify = command(
        "verify", verify_checkpoints, "check every byte of checkpoints, and name what files and tensors are bad"
    )
    verify.set_defaults(checked=CheckedFiles())
    _add_diff(commands)
    add_export(commands)
    _add_timeline(commands)
    advice = command("advise", advise, "say how often to save, from what the saves of a run have cost")
    advice.add_argument("--mtbf", metavar="TIME", required=True, help="mean time between failures, as 4h")
    advice.epilog = "example: asyncckpt advise checkpoints --mtbf 4h --restart 2m"
    advice.add_argument("--restart", metavar="TIME", help="how long a restart takes, as 2m; left out where not given")
    _add_workers(commands)
    commands.add_parser("demo", help="train a small transformer, kill it, resume it, show what its checkpoints cost")
    return parser


def _add_diff(commands: Any) -> None:
    text = "show what was added, removed or changed from one checkpoint to another"
    added = commands.add_parser(
        "diff",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, the largest first. Indexes are compared, by names, dtypes, shapes"
        " and checksums; only a value that stands in other parts is read. Exits with 0 if all values are the same, with"
        " 1 if some differ, and with 2 if something is damaged, not there or cannot be used.",
        epilog="example: asyncckpt diff checkpoints/step-00000100 checkpoints/step-00000200 --values",
    )
    for name in ("a", "b"):
        added.add_argument(name, metavar=name.upper(), help="a checkpoint; a folder of them, for the newest")
    added.add_argument(
        "--values",
        action="store_true",
        help="read the tensors that differ, and show how many elements differ, and the largest absolute difference",
    )
    added.add_argument("--json", action="store_true", help="print JSON")
    added.set_defaults(run=show_diff, paths=[None])


def _add_timeline(commands: Any) -> None:
    text = "show when each rank did what for each save, as a trace for Perfetto"
    added = commands.add_parser(
        "timeline",
        help=text,
        description=f"{text[0].upper()}{text[1:]} (ui.perfetto.dev, chrome://tracing), from the manifests alone. Exits"
        " as ls does.",
        epilog="example: asyncckpt timeline checkpoints -o trace.json",
    )
    added.add_argument("places", metavar="PATH", nargs="+", help="a folder of checkpoints, or a checkpoint")
    added.add_argument(
        "-o", "--out", metavar="FILE", help="the trace; without this it goes to stdout, unless that is a terminal"
    )
    added.set_defaults(run=show_timeline, paths=[None], json=False)


def _add_workers(commands: Any) -> None:
    text = "list the workers of this user on this host, or end some of them"
    added = commands.add_parser(
        "workers",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. A worker ends by itself when its trainer closes, or, where that has"
        " died, after Config.linger seconds. Exits with 0 if all is good, and with 2 if a worker is not there, or does"
        " not end.",
        epilog="examples: asyncckpt workers; asyncckpt workers --end 4711",
    )
    added.add_argument(
        "--end", metavar="ID", nargs="+", type=int, help="end these, when they have written what is left"
    )
    added.add_argument(
        "--force",
        action="store_true",
        help="with --end: kill them, also where a trainer lives; what is not written is lost",
    )
    added.add_argument(
        "--timeout", metavar="S", type=float, default=60.0, help="with --end: seconds to wait for each (60)"
    )
    added.add_argument("--json", action="store_true", help="print JSON")
    added.set_defaults(run=show_workers, paths=[None])
