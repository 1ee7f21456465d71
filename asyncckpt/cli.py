"""The command line: its options and commands. The modules in ``report/`` produce the answers."""

from __future__ import annotations

import argparse
import codecs
import io
import logging
import os
import select
import signal
import sys
from collections.abc import Callable

import asyncckpt
from asyncckpt import demo
from asyncckpt.report.advice import advise
from asyncckpt.report.answers import UNUSABLE, Answers
from asyncckpt.report.diff import show_diff
from asyncckpt.report.exports import show_export
from asyncckpt.report.listing import DiskUse, inspect_checkpoint, list_checkpoints
from asyncckpt.report.marks import mark
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
    if argv[:1] == ["demo"]:  # the demo has its own options, and needs torch
        return demo.main(argv[1:])
    args = _parser().parse_args(argv)
    answers = Answers(args.json)
    for path in args.paths:
        with answers.about(path or "asyncckpt"):
            args.run(answers, path, args)
    answers.show()
    return answers.status


def _show_diagnosis(answers: Answers, root: str, args: argparse.Namespace) -> None:
    from asyncckpt.report.doctor import show_diagnosis  # imports torch

    show_diagnosis(answers, root, args)


def _run_workers(answers: Answers, root: str, args: argparse.Namespace) -> None:
    # Imported here, because other commands do not need these modules.
    from asyncckpt.link.platform_workers import run_workers
    from asyncckpt.publication import job_of_checkpoints

    logging.basicConfig(level=logging.WARNING, format="asyncckpt: %(message)s")
    answers.fail(run_workers(job_of_checkpoints(root, args.job_id), args.ranks))


def _ranks(text: str) -> list[int]:
    """Return the ranks of a text such as "0-7" or "0,3"."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1) or [-1]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names no ranks: write 0-7, or 3, or 0,3")
    return found


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

    def command(
        name: str, run: Callable[..., None], text: str, ends: str, examples: str, **defaults: object
    ) -> argparse.ArgumentParser:
        about = f"{text[0].upper()}{text[1:]}{ends}"
        added = commands.add_parser(name, help=text, description=about, epilog=f"examples: {examples}")
        if "json" not in defaults:
            added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(run=run, **defaults)
        return added

    def command_on_paths(name: str, run: Callable[..., None], text: str, **defaults: object) -> argparse.ArgumentParser:
        ends = (
            ". Exits with 0 if all is good, with 1 if a checkpoint is damaged, and with 2 if something is not there or"
            " cannot be used (141: nobody has read all of the answer)."
        )
        examples = f"asyncckpt {name} checkpoints; asyncckpt {name} checkpoints/step-00000100"
        added = command(name, run, text, ends, examples, **defaults)
        added.add_argument(
            "paths",
            metavar="PATH",
            nargs="+",
            help="a folder of checkpoints, or a checkpoint; also stock DCP's, which have no checksums",
        )
        return added

    command_on_paths("ls", list_checkpoints, "list checkpoints", disk_use=DiskUse())
    text = "show what is in a checkpoint; of a folder of them, in the newest"
    inspect = command_on_paths("inspect", inspect_checkpoint, text)
    inspect.add_argument("--shards", action="store_true", help="show the shards of each tensor, and where they are")
    text = "check every byte of checkpoints, and name what files and tensors are bad"
    command_on_paths("verify", verify_checkpoints, text, checked={})
    diff = command(
        "diff",
        show_diff,
        "show what was added, removed or changed from one checkpoint to another",
        ", the largest first. Indexes are compared, by names, dtypes, shapes and checksums. Exits with 0 if all values"
        " are the same, with 1 if some differ, and with 2 if something is damaged, not there or cannot be used.",
        "asyncckpt diff checkpoints/step-00000100 checkpoints/step-00000200 --values",
        paths=[None],
    )
    for name in ("a", "b"):
        diff.add_argument(name, metavar=name.upper(), help="a checkpoint; a folder of them, for the newest")
    diff.add_argument(
        "--values",
        action="store_true",
        help="read values that differ by their indexes; count elements that differ, and show the largest difference",
    )
    _add_export(
        command(
            "export",
            show_export,
            "write a checkpoint as safetensors, as a file of torch.save, or as another checkpoint",
            ", tensor by tensor, checked on the way. OUT appears when complete: then this exits with 0; with 1 if the"
            " checkpoint is damaged, with 2 if something is not there or cannot be used.",
            "asyncckpt export checkpoints model --only model --dtype bf16; asyncckpt export"
            " checkpoints/step-00000100 state.pt --to torch",
        )
    )
    timeline = command(
        "timeline",
        show_timeline,
        "show when each rank did what for each save, as a trace for Perfetto",
        " (ui.perfetto.dev, chrome://tracing), from the manifests alone. Exits as ls does.",
        "asyncckpt timeline checkpoints -o trace.json",
        paths=[None],
        json=False,
    )
    timeline.add_argument("places", metavar="PATH", nargs="+", help="a folder of checkpoints, or a checkpoint")
    timeline.add_argument(
        "-o", "--out", metavar="FILE", help="the trace; without this it goes to stdout, unless that is a terminal"
    )
    advice = command_on_paths("advise", advise, "say how often to save, from what the saves of a run have cost")
    advice.epilog = "example: asyncckpt advise checkpoints --mtbf 4h --restart 2m"
    advice.add_argument("--mtbf", metavar="TIME", required=True, help="mean time between failures, as 4h")
    advice.add_argument("--restart", metavar="TIME", help="how long a restart takes, as 2m; left out where not given")
    doctor = command(
        "doctor",
        _show_diagnosis,
        "say before a training what it will meet at its folder, and on this host",
        ": ok, slow (saves cost more than they could), risk (a failure loses more than it has to) or fails (a save"
        " fails). Takes some seconds, and reads the options of the environment. Exits with 2 if anything fails, else"
        " with 0. Checkpointer.check() does the same on all ranks.",
        "asyncckpt doctor checkpoints --size 100GB",
    )
    doctor.add_argument("paths", metavar="ROOT", nargs=1, help="the folder or address that the training saves to")
    doctor.add_argument("--size", metavar="SIZE", help="the size of one checkpoint of this host, as 100GB")
    marking = command(
        "mark",
        mark,
        "take steps out of a history, so that nothing loads them or shares their files any more",
        ": a diverged training, say, whose newest checkpoints are whole, and useless. Each becomes"
        " step-00000100.bad-1, in the folder and in the local folder of ASYNC_CKPT_LOCAL_ROOT, and stays until it is"
        " removed. End the training first. Exits with 2 if a step is not there.",
        "asyncckpt mark checkpoints 800 900 --bad",
    )
    marking.add_argument("paths", metavar="ROOT", nargs=1, help="the folder of the checkpoints")
    marking.add_argument("steps", metavar="STEP", nargs="+", type=int, help="the steps")
    marking.add_argument("--bad", action="store_true", required=True, help="the steps are not to be loaded")
    workers = command(
        "workers",
        show_workers,
        "list the workers of this user on this host, or end some of them",
        ". A worker ends by itself when its trainer closes, or, where that has died, after Config.linger seconds. Exits"
        " with 0 if all is good, and with 2 if a worker is not there, or does not end.",
        "asyncckpt workers; asyncckpt workers --end 4711",
        paths=[None],
    )
    workers.add_argument(
        "--end", metavar="ID", nargs="+", type=int, help="end these, when they have written what is left"
    )
    workers.add_argument(
        "--force",
        action="store_true",
        help="with --end: kill them, also where a trainer lives; what is not written is lost",
    )
    workers.add_argument(
        "--timeout", metavar="S", type=float, default=60.0, help="with --end: seconds to wait for each (60)"
    )
    worker = command(
        "worker",
        _run_workers,
        "run workers ahead of their trainers, in a container, a job step or a service of their own",
        ", which outlive the trainers' containers. Each needs its trainer's user, runtime folder"
        " (ASYNC_CKPT_RUNTIME_DIR) and installed files. A trainer attaches at its first save, or, after its death,"
        " another one. A worker that ends is started again. SIGTERM ends this, when everything staged is written. Exits"
        " with 0 then, and with 2 if the runtime folder cannot be used.",
        "asyncckpt worker --root checkpoints --ranks 0-7",
        json=False,
    )
    worker.add_argument("--root", dest="paths", metavar="ROOT", nargs=1, required=True, help="the trainer's folder")
    worker.add_argument("--ranks", type=_ranks, default=[0], help="the ranks of this host in their job, as 0-7 (0)")
    of_job = os.environ.get("ASYNC_CKPT_JOB_ID")
    worker.add_argument("--job-id", metavar="ID", default=of_job, help="its Config.job_id ($ASYNC_CKPT_JOB_ID)")
    commands.add_parser("demo", help="train a small transformer, kill it, resume it, show what its checkpoints cost")
    return parser


def _add_export(added: argparse.ArgumentParser) -> None:
    added.add_argument(
        "paths", metavar="PATH", nargs=1, help="a checkpoint, also stock DCP's; a folder of them, for the newest"
    )
    added.add_argument("out", metavar="OUT", help="what is made: a folder, or with --to torch a file")
    added.add_argument(
        "--to",
        choices=("hf", "torch", "dcp", "torch_checkpointing"),
        default="hf",
        help="hf: safetensors for from_pretrained, tensors alone (the default); torch: one file for torch.load; dcp: a"
        " checkpoint, to resume from; torch_checkpointing: a checkpoint of that library",
    )
    added.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="convert floating point tensors")
    added.add_argument("--only", metavar="KEY", help="the part of the state to export, as model; names begin behind it")
    added.add_argument(
        "--rename",
        metavar="FILE|PATTERN=REPLACEMENT",
        help="a JSON file of new names by old ones, or what re.sub replaces in names",
    )
    added.add_argument("--max-shard-size", metavar="SIZE", help="hf: bytes of a file (5GB)")
    added.add_argument(
        "--weights-only",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="refuse values that could run code when they are unpickled (the default)",
    )
