"""The command line: ``asyncckpt ls``, ``inspect``, ``verify`` and ``demo``.

All but the demo work without torch, and read no pickle.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
from typing import Any

from tabulate import tabulate

from asyncckpt.demo import run as demo
from asyncckpt.errors import CheckpointError, DamagedCheckpointError
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import StorageSource, read_manifest, verify
from asyncckpt.worker.manifest import Manifest
from asyncckpt.worker.storage import complete_steps, step_folder


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 for a damaged or missing checkpoint, 2 for a wrong call."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["demo"]:  # which has options of its own, and wants torch
        return demo.main(argv[1:])
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except CheckpointError as error:
        if args.json:
            print(json.dumps({"error": error.message, "path": error.path}))
        else:
            print(f"asyncckpt: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `asyncckpt ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncckpt", description="Look at checkpoints, and check them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example: {example}",
        )
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(run=run)
        return added

    ls = command("ls", _ls, "list the checkpoints of a run", "asyncckpt ls runs/7/checkpoints")
    ls.add_argument("root", metavar="ROOT", help="the folder of the run's checkpoints")
    inspect = command(
        "inspect", _inspect, "show what is in a checkpoint", "asyncckpt inspect checkpoints/step-00000100"
    )
    inspect.add_argument("path", metavar="PATH", help="a checkpoint")
    check = command(
        "verify",
        _verify,
        "check every byte of a checkpoint; exit 1 and name file and tensor if one is bad",
        "asyncckpt verify checkpoints/step-00000100",
    )
    check.add_argument("path", metavar="PATH", help="a checkpoint")
    commands.add_parser("demo", help="train a small transformer, kill it, resume it, show what its checkpoints cost")
    return parser


def _ls(args: argparse.Namespace) -> int:
    if not os.path.isdir(args.root):
        raise CheckpointError("there is no such folder", path=args.root)
    found, damages = [], []
    for step in complete_steps(args.root):
        path = step_folder(args.root, step)
        try:
            found.append((step, read_manifest(path), path))
        except DamagedCheckpointError as error:
            damages.append(error)
            print(f"asyncckpt: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps([_facts(each) | {"step": step, "path": path} for step, each, path in found], indent=1))
        return 1 if damages else 0
    shown = [
        (step, _time(each.created), _size(each.nbytes), f"{each.timings.get('write_s', 0):.2f}", path)
        for step, each, path in found
    ]
    print(tabulate(shown, headers=["step", "written at", "size", "write s", "path"]) if shown else "no checkpoints")
    return 1 if damages else 0


def _inspect(args: argparse.Namespace) -> int:
    source = StorageSource(args.path)
    manifest, items = source.manifest, [item for index in source.indexes() for item in index.items]
    if args.json:
        facts = {**_facts(manifest), "files": manifest.files, "items": [item._asdict() for item in items]}
        print(json.dumps(facts, indent=1))
        return 0
    rows = [
        (item.name, item.dtype or item.kind, "x".join(map(str, item.shape)), _size(item.payload_bytes))
        for item in items
    ]
    print(tabulate(rows, headers=["name", "type", "shape", "size"]))
    tensors = [item for item in items if item.kind == "tensor"]
    print(
        f"\n{len(tensors)} tensors and {len(items) - len(tensors)} objects, {_size(manifest.nbytes)},"
        f" step {manifest.step}, written by {manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
        f" at {_time(manifest.created)}"
    )
    print(", ".join(f"{name} {value:.3f}" for name, value in manifest.timings.items()))
    return 0


def _verify(args: argparse.Namespace) -> int:
    with Progress("verifying", shown=not args.json) as bar:
        with contextlib.suppress(CheckpointError):  # verify says what is wrong
            bar.expect(read_manifest(args.path).nbytes)
        report = verify(args.path, bar.update)
    if args.json:
        damages = [{"file": damage.path, "what": damage.message} for damage in report.damages]
        print(
            json.dumps({"path": report.path, "bytes": report.nbytes, "ok": not damages, "damages": damages}, indent=1)
        )
    else:
        for damage in report.damages:
            print(f"{damage.path}: {damage.message}")
        if not report.damages:
            print(f"{report.path}: good, {_size(report.nbytes)}")
    return 1 if report.damages else 0


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "created": manifest.created,
        "ranks": manifest.world_size,
        "bytes": manifest.nbytes,
        "timings": dict(manifest.timings),
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
