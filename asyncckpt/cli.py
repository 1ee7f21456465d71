"""The command line: ``asyncckpt ls``, ``inspect``, ``verify``, ``export``, ``workers`` and ``demo``.

What we have written is looked at without torch, and without reading a pickle.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tabulate import tabulate

import asyncckpt
from asyncckpt.demo import run as demo
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.exporting import command as exporting
from asyncckpt.loading.contents import Value, checkpoints_at, contents
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import is_stock, read_manifest, verify
from asyncckpt.publication import facts_of_job
from asyncckpt.worker.manifest import Manifest
from asyncckpt.worker.running_workers import RunningWorker, end_worker, running_workers
from asyncckpt.worker.storage import storage_for

_GOOD, _DAMAGED, _UNUSABLE = 0, 1, 2
_UNREAD = 128 + signal.SIGPIPE  # what a shell says of a command that a closed pipe has ended


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0, all is good; 1, a checkpoint is damaged; 2, something is not there, or cannot be used; 141,
        nobody read the answer to its end.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["demo"]:  # which has options of its own, and wants torch
        return demo.main(argv[1:])
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path is bytes, and may be no text
    try:
        answers = _Answers(args.json)
        for path in args.paths:
            args.run(answers, path, args)
        answers.show()
        if sys.stdout is not None:
            sys.stdout.flush()
        return answers.status
    except OSError as error:  # `asyncckpt ls | head`, or a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return _UNREAD
        print(f"asyncckpt: nothing can be written to stdout: {error.strerror}", file=sys.stderr)
        return _UNUSABLE


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

    command("ls", _ls, "list checkpoints")
    inspect = command("inspect", _inspect, "show what is in a checkpoint; of a folder of them, in the newest")
    inspect.add_argument("--shards", action="store_true", help="show the shards of each tensor, and where they are")
    command("verify", _verify, "check every byte of checkpoints, and name the files and tensors that are bad")
    exporting.add_to(commands).set_defaults(run=_export)
    _add_workers(commands)
    commands.add_parser("demo", help="train a small transformer, kill it, resume it, show what its checkpoints cost")
    return parser


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
    added.set_defaults(run=_workers, paths=[None])


class _Answers:
    """What a command has to say, as JSON or as lines, and how it ends."""

    def __init__(self, as_json: bool) -> None:
        self.status = _GOOD
        self.is_json = as_json
        self._facts: list[dict[str, Any]] = []
        self._rows: list[tuple[object, ...]] = []
        self._headers: Sequence[str] = ()

    def line(self, text: str) -> None:
        """Say something beside the table, now."""
        if not self.is_json:
            print(text)

    def add(self, facts: dict[str, Any]) -> None:
        """For JSON."""
        self._facts.append(facts)

    def row(self, headers: Sequence[str], *cells: object) -> None:
        """A line of the table."""
        self._headers = headers
        self._rows.append(cells)

    @contextlib.contextmanager
    def about(self, what: str | int, kind: str = "path") -> Iterator[None]:
        """What goes wrong with ``what`` is said, and does not keep the others from being looked at."""
        try:
            yield
        except CheckpointError as error:
            self.fail(_DAMAGED if isinstance(error, DamagedCheckpointError) else _UNUSABLE)
            self.add({kind: error.path or what, "error": error.message})
            if not self.is_json:
                print(f"asyncckpt: {error}", file=sys.stderr)

    def fail(self, status: int) -> None:
        """End with that status, or a worse one."""
        self.status = max(self.status, status)

    def show_table(self) -> None:
        """Print the table, and begin another."""
        if self._rows and not self.is_json:
            print(tabulate(self._rows, headers=self._headers))
        self._rows = []

    def show(self) -> None:
        """Print what is left to be said."""
        self.show_table()
        if self.is_json:
            print(json.dumps(self._facts, indent=1))


def _ls(answers: _Answers, given: str, args: argparse.Namespace) -> None:
    headers = ("step", "written at", "size", "write s", "path")
    with answers.about(given):
        paths = checkpoints_at(given)
        if paths != [given]:
            answers.line(f"{given}: {_number(len(paths), 'checkpoint')}")
        for path in paths:
            if path == given and is_stock(path):
                answers.row(
                    headers, "", "", _size(sum(value.nbytes for value in contents(path))), "", f"{path} (DCP's)"
                )
                answers.add({"path": path, "stock": True})
                continue
            with answers.about(path), _still_there(path, given):
                manifest = read_manifest(path)
                write = f"{max(filter(None, manifest.timings.get('write_s', ())), default=0):.2f}"
                answers.row(headers, manifest.step, _time(manifest.created), _size(manifest.nbytes), write, path)
                answers.add({"path": path} | _facts(manifest))


def _inspect(answers: _Answers, given: str, args: argparse.Namespace) -> None:
    with answers.about(given):
        paths = checkpoints_at(given)
        if not paths:
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=given)
        path = paths[-1]
        if path != given:
            answers.line(f"{given}: {_number(len(paths), 'checkpoint')}; this is the last of them")
        with storage_for(path).reading(path):  # retention leaves it alone
            values = contents(path)
            manifest = None if is_stock(path) else read_manifest(path)
        if manifest is None:
            answers.line(f"{path}: a checkpoint of stock DCP, without checksums")
        else:
            written = f"written by {_number(manifest.world_size, 'rank')} at {_time(manifest.created)}"
            what = "a checkpoint" if manifest.step is None else f"the checkpoint of step {manifest.step}"
            answers.line(f"{path}: {what}, {written}")
        facts = {"stock": True} if manifest is None else {**_facts(manifest), "files": manifest.files}
        answers.add({"path": path, **facts, "values": [value.facts() for value in values]})
        _show_values(answers, values, shards=args.shards)
        tensors = sum(bool(value.dtype) for value in values)
        objects = _number(len(values) - tensors, "object")
        answers.line(f"\n{_number(tensors, 'tensor')} and {objects}, {_size(sum(value.nbytes for value in values))}")
        if manifest is not None:
            if small := [f"{name} ({_size(manifest.files[name]['bytes'])})" for name in manifest.small_files()]:
                answers.line(f"small files: {', '.join(small)}")
            first = {name: ranks[0] for name, ranks in manifest.timings.items()}
            answers.line(", ".join(f"{name} {seconds:.3f}" for name, seconds in first.items() if seconds is not None))


@contextlib.contextmanager
def _still_there(path: str, given: str) -> Iterator[None]:
    """Pass over a checkpoint that was listed and is gone since, as by retention; not one that was ``given``."""
    try:
        yield
    except CheckpointError:
        if path == given or storage_for(path).exists(path):
            raise


def _show_values(answers: _Answers, values: list[Value], *, shards: bool) -> None:
    headers = "name type shape from size file" if shards else "name type shape size shards"
    for value in values:
        kind = value.dtype or "object"
        if not shards:
            size = _size(value.nbytes)
            answers.row(headers.split(), value.name, kind, _shape(value.shape), size, len(value.shards))
        for each in value.shards if shards else ():
            begin, size = ",".join(map(str, each.offsets)), _size(each.nbytes)
            answers.row(headers.split(), value.name, kind, _shape(each.shape), begin, size, each.file)
    answers.show_table()


def _verify(answers: _Answers, given: str, args: argparse.Namespace) -> None:
    with answers.about(given), Progress("verifying", shown=not args.json) as bar:
        paths = checkpoints_at(given)
        if not paths:
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=given)
        if paths == [given] and is_stock(given):
            raise CheckpointNotFoundError("stock DCP wrote this, without checksums: nothing can verify it", path=given)
        for path in paths:
            with contextlib.suppress(CheckpointError):  # verify says what is wrong
                bar.expect(read_manifest(path).nbytes)
        for path in paths:
            with answers.about(path), _still_there(path, given):
                report = verify(path, bar.update)
                damages = [{"file": damage.path, "what": damage.message} for damage in report.damages]
                answers.add({"path": report.path, "bytes": report.nbytes, "ok": not damages, "damages": damages})
                for damage in report.damages:
                    answers.line(f"{damage.path}: {damage.message}")
                answers.fail(_DAMAGED if damages else _GOOD)
                if not damages:
                    answers.line(f"{report.path}: good, {_size(report.nbytes)}")


def _export(answers: _Answers, given: str, args: argparse.Namespace) -> None:
    with answers.about(given):
        done = exporting.run(given, args)
        answers.add(done.facts())
        answers.line(f"{done.path}: {_number(done.tensors, 'tensor')} in {_size(done.nbytes)}, from {done.source}")
        for line in exporting.remarks(done):
            answers.line(line)


def _workers(answers: _Answers, _: None, args: argparse.Namespace) -> None:
    found = running_workers()
    if args.end is not None:
        for number in args.end:
            with answers.about(number, "id"):
                worker = next((each for each in found if each.pid == number), None)
                if worker is None:
                    raise CheckpointError(f"no worker of this user on this host has the id {number}")
                end_worker(worker, args.timeout, force=args.force)
                answers.add({"id": number, "ended": True})
                answers.line(f"the worker {number} has ended")
        return
    headers = ("id", "rank", "of", "trainer", "memory", "age", "does")
    for each in found:
        said, status = each.command_line, each.status
        job = facts_of_job(said.options.job)
        trainer = f"{said.trainer}{'' if each.has_trainer else ' (gone)'}"
        age = f"{datetime.timedelta(seconds=int(each.age))}"
        answers.row(headers, each.pid, said.options.rank, _of(job), trainer, _size(each.nbytes), age, _does(each))
        facts: dict[str, Any] = {"id": each.pid, "rank": said.options.rank, **job, "trainer": said.trainer}
        facts |= {"has_trainer": each.has_trainer, "bytes": each.nbytes, "age_s": each.age, "does": each.doing}
        facts |= {"lingers_s": status and status.lingers, "saving": list(status.saving) if status else None}
        answers.add(facts | {"leaving": status and status.leaving, "trouble": each.trouble})
    answers.line(_number(len(found), "worker"))


def _of(job: dict[str, str | None]) -> str:
    """What a worker is for, in a cell."""
    if job["address"] is not None:
        return f"weights at {job['address']!r}"
    if job["root"] is None:
        return "saves to anywhere"
    return job["root"] + (f" (job {job['job_id']})" if job["job_id"] else "")


def _does(worker: RunningWorker) -> str:
    """What a worker does and waits for, in a cell."""
    status = worker.status
    if status is None:
        return f"{worker.doing}: {worker.trouble}"
    match worker.doing:
        case "serving":
            return "waits for its trainer"
        case "writing":
            more = f", and {len(status.saving) - 1} more" if len(status.saving) > 1 else ""
            then = "" if worker.has_trainer else ", then leaves" if status.leaving else ", then lingers"
            return f"writes {status.saving[0]}{more}{then}"
        case "lingering":
            return f"lingers for another trainer, {status.lingers:.0f} s more"
        case _:
            return "leaves"


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "created": manifest.created,
        "ranks": manifest.world_size,
        "bytes": manifest.nbytes,
        "timings": dict(manifest.timings),
    }


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
