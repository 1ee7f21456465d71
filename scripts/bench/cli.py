"""The command line of the benchmarks: each measurement by itself, or all of them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import bench
from bench import files, hosts, jobs, report, results, unchanged_ranks
from bench.contestants import ENTRIES, names_in
from bench.jobs import Choices, Job
from bench.states import Request, check_name
from bench.turns import Pace

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, and write the results."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.out is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("there is no matplotlib to draw with: pip install 'asyncckpt[bench]', or give no --out")
    if args.jobs is None:
        print(report.write(args.out))
        return 0
    _allow_descriptors()
    # Warnings of torch and the peers do not matter here, nor in child processes.
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    for job in args.jobs(args):
        with files.working_folder(args.folder) as folder:
            found = results.result(job.kind, job.label, folder, job.settings, job.measure(folder))
        print(f"{report.heading(found)}\n\n{report.section(found)}\n", flush=True)
        if args.out is not None:
            results.write(found, args.out)
            report.write(args.out)
    return 0


def _allow_descriptors() -> None:
    """Raise the limit of file descriptors to the maximum, because some peers hold one for every tensor."""
    most = int(Path("/proc/sys/fs/nr_open").read_text())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):  # only root may set this
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _save(args: argparse.Namespace) -> Iterator[Job]:
    return (jobs.save(request, _choices(args), args.changing) for request in _requests(args, args.values))


def _loop(args: argparse.Namespace) -> Iterator[Job]:
    threads = args.train_threads or [*dict.fromkeys((1, _cores()))]
    return (jobs.train(request, _choices(args), each) for request in _requests(args) for each in threads)


def _load(args: argparse.Namespace) -> Iterator[Job]:
    if args.ranks == 1:
        yield from (jobs.load(request, _choices(args)) for request in _requests(args))
    else:
        # All ranks must take the same turns, so no rank may run out of patience before another.
        pace = Pace(rounds=args.rounds, pause=args.pause, patience=3600.0)
        yield jobs.load_by_ranks(args.gib, args.layers, args.ranks, pace, replicas=args.replicas)


def _scale(args: argparse.Namespace) -> Iterator[Job]:
    base = Request(name="400", gib=args.gib, device=args.device)
    yield jobs.by_tensors(base, _choices(args), args.tensors)
    if args.bytes:
        yield jobs.by_bytes(base, _choices(args))


def _memory(args: argparse.Namespace) -> Iterator[Job]:
    return (jobs.take_memory(request, _choices(args)) for request in _requests(args))


def _cost(args: argparse.Namespace) -> Iterator[Job]:
    return (jobs.count(request, _choices(args)) for request in _requests(args))


def _ranks(args: argparse.Namespace) -> Iterator[Job]:
    processes, simulated = args.processes, args.simulate
    if not processes and not simulated:
        processes, simulated = jobs.PROCESSES, jobs.SIMULATED
    if processes:
        yield jobs.many_ranks(processes, args.gib, args.tensors, args.rounds)
    if simulated:
        yield jobs.simulated(simulated, args.items, args.rounds)


def _frameworks(args: argparse.Namespace) -> Iterator[Job]:
    yield jobs.train_by_frameworks(args.gib, Pace(rounds=args.rounds, pause=args.pause))


def _store(args: argparse.Namespace) -> Iterator[Job]:
    missing = [name for name in ("moto", "boto3", "obstore") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"bench store: there is no {missing[0]}: pip install 'asyncckpt[bench,cloud]'")
    yield jobs.save_to_store(args.gib, args.tensors, Pace(rounds=args.rounds, pause=args.pause, patience=3600.0))


def _export(args: argparse.Namespace) -> Iterator[Job]:
    pace = Pace(rounds=args.rounds, pause=args.pause)
    return (jobs.export(args.gib, tensors, pace) for tensors in args.tensors)


def _telemetry(args: argparse.Namespace) -> Iterator[Job]:
    pace = Pace(rounds=args.rounds, pause=args.pause, patience=3600.0)
    yield jobs.listen(Request(name=args.state, gib=args.gib), pace)


def _weights(args: argparse.Namespace) -> Iterator[Job]:
    pace = Pace(rounds=args.rounds, pause=args.pause)
    for tensors in args.tensors:
        yield jobs.publish(Request(name=str(tensors), gib=args.gib), pace)


def _hosts(args: argparse.Namespace) -> Iterator[Job]:
    if (why := hosts.missing()) is not None:
        raise SystemExit(f"bench hosts: {why}")
    reach = jobs.reach_hosts_sparsely if args.sparse else jobs.reach_hosts
    yield reach(args.gib, args.tensors, args.hosts, args.mbit, args.rounds)


def _vllm(args: argparse.Namespace) -> Iterator[Job]:
    yield jobs.update_vllm(args.gib, Pace(rounds=args.rounds, pause=args.pause, patience=3600.0))


def _unchanged(args: argparse.Namespace) -> Iterator[Job]:
    if args.peft and (name := unchanged_ranks.missing()) is not None:
        raise SystemExit(f"bench unchanged --peft: there is no {name}: pip install {name}")
    pace = Pace(rounds=args.rounds, pause=args.pause, patience=3600.0)
    if args.ranks == 1 and not args.peft:
        yield jobs.save_unchanged(args.gib, args.changing_mib, pace)
    else:
        yield jobs.save_unchanged_by_ranks(args.gib, args.changing_mib, args.ranks, pace, peft=args.peft)


def _all(args: argparse.Namespace) -> Iterator[Job]:
    return jobs.standard(args.gib, args.device, _choices(args), args.minutes, _cores())


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _requests(args: argparse.Namespace, values: int = 0) -> list[Request]:
    return [Request(name=name, gib=args.gib, device=args.device, values=values) for name in args.state]


def _choices(args: argparse.Namespace) -> Choices:
    pace = Pace(rounds=args.rounds, pause=args.pause, patience=args.patience)
    return Choices(names=args.contestants, pace=pace, check=args.check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench", description=bench.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    where = _where()
    who = argparse.ArgumentParser(add_help=False, parents=[where])
    who.add_argument("--device", default="cpu", help="where the tensors are: cpu, cuda, cuda:1 (default: %(default)s)")
    who.add_argument(
        "--contestants",
        type=_names,
        default=names_in("all"),
        metavar="A,B",
        help=f"who takes part (default: all but nvrx-ipc): {', '.join(ENTRIES)}",
    )
    who.add_argument("--pause", type=float, default=0.5, help="seconds before each turn (default: %(default)s)")
    who.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds of turns that a contestant may take (default: %(default)s)",
    )
    who.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load the last checkpoint of each, and compare it",
    )
    what = argparse.ArgumentParser(add_help=False, parents=[who])
    what.add_argument(
        "--state",
        type=_state,
        nargs="+",
        default=["400"],
        help="so many equal tensors (400), of a size (8000x50kB), as AdamW has them (adamw2000), or a model: gpt2,"
        " llama3-8b, olmoe, deepseek-v3",
    )

    def command(
        name: str,
        told: str,
        made: Callable[[argparse.Namespace], Iterator[Job]] | None,
        parents: list[argparse.ArgumentParser],
        out: Path | None = None,
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=told, description=told, parents=parents)
        added.add_argument("--out", type=Path, default=out, help=f"folder for JSON, pictures and page (default: {out})")
        added.set_defaults(jobs=made)
        return added

    save = command("save", "how long the call blocks, and when it is durable", _save, [what])
    save.add_argument("--values", type=int, default=0, help="small Python values beside the tensors")
    save.add_argument("--changing", type=int, default=0, help="how many of them change before each save")
    train = command("loop", "what a save costs the training loop", _loop, [what])
    train.add_argument("--train-threads", type=int, nargs="+", help="of the trainer (default: 1, then all cores)")
    load = command("load", "what a load costs, from memory and from storage", _load, [what])
    load.add_argument("--ranks", type=int, default=1, help="of a job under FSDP2, from storage (default: %(default)s)")
    load.add_argument(
        "--replicas", action="store_true", help="without FSDP2: each of these ranks loads the whole model"
    )
    load.add_argument("--layers", type=int, default=400, help="of its model, in the place of a state (%(default)s)")
    trainers = command(
        "frameworks",
        "what a save costs in trainers of Hugging Face, Lightning and torchtitan",
        _frameworks,
        [_where(gib=0.5)],
    )
    trainers.add_argument("--pause", type=float, default=0.5, help="seconds before each turn (default: %(default)s)")
    store = command("store", "a save to S3 as moto serves it, and a load", _store, [_where(gib=0.5, rounds=7)])
    store.add_argument("--tensors", type=int, default=400)
    store.add_argument("--pause", type=float, default=0.5, help="seconds before each turn (default: %(default)s)")
    exports = command("export", "a checkpoint in other forms: safetensors, torch's, DCP's", _export, [where])
    exports.add_argument("--tensors", type=int, nargs="+", default=[400], help="so many equal ones (%(default)s)")
    exports.add_argument("--pause", type=float, default=0.5, help="seconds before each turn (default: %(default)s)")
    told = command("telemetry", "saves with all adapters listening to events", _telemetry, [_where(rounds=1000)])
    told.add_argument("--state", type=_state, default="8000x50kB", help="as of save (default: %(default)s)")
    told.add_argument("--pause", type=float, default=0.01, help="seconds before each turn (default: %(default)s)")
    scale = command("scale", "a save against the number of tensors, and against bytes", _scale, [who])
    scale.add_argument("--tensors", type=int, nargs="+", default=jobs.SCALE_TENSORS)
    scale.add_argument("--bytes", action=argparse.BooleanOptionalAction, default=True, help="also against bytes")
    command("cost", "what is computed and moved, counted in all processes", _cost, [what])
    command("memory", "memory of all processes, and page cache left behind", _memory, [what])
    ranks = command("ranks", "a save against the number of ranks, real and simulated", _ranks, [where])
    ranks.add_argument("--tensors", type=int, default=400)
    ranks.add_argument("--processes", type=int, nargs="*", default=[], help="real jobs of so many processes")
    ranks.add_argument("--simulate", type=int, nargs="*", default=[], help="jobs of so many ranks")
    ranks.add_argument("--items", type=int, default=25, help="tensors of which each simulated rank has a shard")
    weights = command("weights", "weights for readers of the host", _weights, [where])
    weights.add_argument("--tensors", type=int, nargs="+", default=jobs.WEIGHTS_TENSORS)
    weights.add_argument("--pause", type=float, default=0.2, help="seconds before each turn (default: %(default)s)")
    others = command("hosts", "weights on other hosts, over links of a rate", _hosts, [_where(gib=0.5, rounds=3)])
    others.add_argument("--tensors", type=int, default=400)
    others.add_argument("--hosts", type=int, default=8, help="so many (default: %(default)s)")
    others.add_argument("--mbit", type=int, default=400, help="a second, of each link (default: %(default)s)")
    others.add_argument("--sparse", action="store_true", help="versions in which only a share of the values changes")
    vllm = command("vllm", "weights for an engine of vLLM, beside its own way", _vllm, [_where(gib=0.33)])
    vllm.add_argument("--pause", type=float, default=0.2, help="seconds before each turn (default: %(default)s)")
    same = command("unchanged", "saves of a state most of which does not change", _unchanged, [_where(rounds=9)])
    same.add_argument("--changing-mib", type=float, default=16.0, help="of it change, in MiB (default: %(default)s)")
    same.add_argument("--ranks", type=int, default=1, help="of a job under FSDP2; 1: without it (default: %(default)s)")
    same.add_argument("--peft", action="store_true", help="FSDP2, with a Llama of transformers, and peft's adapters")
    same.add_argument("--pause", type=float, default=0.5, help="seconds before each turn (default: %(default)s)")
    every = command("all", "the standard set, into docs/benchmarks", _all, [who], DOCS)
    every.add_argument("--minutes", type=float, default=15.0, help="about so long (default: %(default)s)")
    command("report", "draw pictures and page anew from the JSON", None, [], DOCS)
    return parser


def _where(gib: float = 1.0, rounds: int = 7) -> argparse.ArgumentParser:
    """Return a parent parser for commands with the same defaults. Parsers share the options of their parents."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--folder", help="where to write, on the disk in question (default: the system's temporary)")
    where.add_argument(
        "--rounds", type=int, default=rounds, help="after a first one that is cold (default: %(default)s)"
    )
    where.add_argument("--gib", type=float, default=gib, help="bytes of all tensors, in GiB (default: %(default)s)")
    return where


def _names(text: str) -> list[str]:
    try:
        return names_in(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _state(text: str) -> str:
    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
