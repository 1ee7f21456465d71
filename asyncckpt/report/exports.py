"""``asyncckpt export``: its options, and its report. torch is imported when the command runs."""

from __future__ import annotations

import argparse
import contextlib
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CheckpointError
from asyncckpt.report.answers import Answers, number, size_of

if TYPE_CHECKING:
    from asyncckpt.exporting.export import Exported

_SOME = 4


def add_export(commands: Any) -> None:
    """Add the command to the ``commands`` of a parser."""
    text = "write a checkpoint as safetensors, as a file of torch.save, or as another checkpoint"
    added: argparse.ArgumentParser = commands.add_parser(
        "export",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, tensor by tensor, checked on the way. OUT appears when complete:"
        " then this exits with 0; with 1 if the checkpoint is damaged, with 2 if something is not there or cannot be"
        " used.",
        epilog="examples: asyncckpt export checkpoints model --only model --dtype bf16 --extra config.json;"
        " asyncckpt export checkpoints/step-00000100 state.pt --to torch",
    )
    added.add_argument(
        "paths",
        metavar="PATH",
        nargs=1,
        help="a checkpoint, also stock DCP's; a folder of them, for the newest",
    )
    added.add_argument("out", metavar="OUT", help="what is made: a folder, or with --to torch a file")
    added.add_argument(
        "--to",
        choices=("hf", "torch", "dcp"),
        default="hf",
        help="hf: safetensors for from_pretrained, tensors alone (the default); torch: one file for torch.load; dcp: a"
        " checkpoint, to resume from",
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
        "--extra", metavar="FILE", nargs="+", default=[], help="hf: files to copy beside, as config.json"
    )
    added.add_argument(
        "--weights-only",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="refuse values that could run code when they are unpickled (the default)",
    )
    added.add_argument("--json", action="store_true", help="print JSON")
    added.set_defaults(run=show_export)


def show_export(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Export the checkpoint at ``given``, and report the result."""
    with answers.about(given):
        done = _export(given, args)
        answers.add(done.facts())
        answers.line(f"{done.path}: {number(done.tensors, 'tensor')} in {size_of(done.nbytes)}, from {done.source}")
        for line in _remarks(done):
            answers.line(line)


def _export(path: str, args: argparse.Namespace) -> Exported:
    """Export ``path``. Raises ``CheckpointError``, also if an option is invalid."""
    from asyncckpt.exporting.export import export

    with contextlib.suppress(ValueError, OSError):  # so that fewer files have to be reopened
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return export(
            path,
            args.out,
            to=args.to,
            dtype=args.dtype,
            only=args.only,
            rename=args.rename,
            max_shard_size=args.max_shard_size,
            extra=args.extra,
            weights_only=args.weights_only,
            progress=not args.json,
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _remarks(done: Exported) -> Iterator[str]:
    """Yield remarks about an export, as text lines."""
    if done.tied:
        pairs = ", ".join(f"{name} is {kept}" for name, kept in list(done.tied.items())[:_SOME])
        yield f"tied, and so written once: {pairs}{_more(len(done.tied))}"
    if done.objects:
        yield f"left out, as no tensors: {', '.join(done.objects[:_SOME])}{_more(len(done.objects))}"
    if done.tops:
        yield f"the names begin with {', '.join(done.tops)}: --only {done.tops[0]} exports that part alone, without it"


def _more(count: int) -> str:
    return f", and {count - _SOME} more" if count > _SOME else ""
