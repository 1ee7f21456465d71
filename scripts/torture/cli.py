"""The command line of ``python scripts/torture``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import tempfile
import time
import warnings
from pathlib import Path

from tabulate import tabulate

from asyncckpt.link.endpoint import FOLDER_VARIABLE
from torture import (
    crash_states,
    damages,
    disks,
    each_call,
    forks,
    host_restarts,
    hosts,
    interruptions,
    kills,
    launchers,
    leftovers,
    links,
    power_cuts,
    restarts,
    stores,
    system_calls,
)
from torture.frameworks import trials
from torture.jobs import MARK
from torture.loop_disks import FILE_SYSTEMS, own_mounts
from torture.scenarios import SCENARIOS
from torture.tally import Tally

# For each kind of fault, the default count and the help text.
_KINDS = {
    "kills": (300, "of trainers, and as many of workers"),
    "interruptions": (300, "signals that the trainer gets"),
    "calls": (300, "system calls of the worker that fail"),
    "each-call": (1, "errors, of six, with which each call fails in turn"),
    "forks": (300, "of the trainer"),
    "damages": (1000, "to files of a checkpoint"),
    "exchanges": (300, "of one checkpoint for another"),
    "links": (300, "things done to checkpoints while files of theirs are linked"),
    "store": (200, "kills, of each, and faults on S3, as moto serves it"),
    "full": (50, "times that space runs out"),
    "framework-kills": (20, "of trainings of each kind in --frameworks"),
    "host-kills": (300, "hosts of a job that are lost with their memory"),
    "power-cuts": (60, "of a disk, for each of --file-systems; root alone may mount them"),
    "cache-cuts": (60, "of a disk with a volatile write cache, for each of --file-systems"),
    "launcher-kills": (
        20,
        "of each thing that a launcher runs, with each kind of worker",
    ),
    "crash-states": (2000, "that a weak file system may leave after a crash, of each scenario in --scenarios"),
    "restart-mib": (1024, "MiB of a state that is restarted out of memory, and timed"),
    "host-restart-mib": (1024, "MiB of each of four ranks on two hosts, which are restarted and timed"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/torture",
        description="Everything that can happen to a job, at random and by the hundreds: is anything ever lost? All"
        " kinds of it; or those alone that are named; or all but those that are named with 0.",
        epilog="The same seed makes the same choices; what comes of them is up to the machine. Each wait has a limit of"
        " 30 seconds, of 180 for a framework's training, and running into it is a hang. Exits with 1 if anything was"
        " lost, hung, published half, loaded wrong, or left over.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, (count, what) in _KINDS.items():
        said = f"{what} ({count:,} where no kind is named)"
        parser.add_argument(f"--{name}", type=int, metavar="N", default=argparse.SUPPRESS, help=said)
    parser.add_argument(
        "--frameworks",
        nargs="*",
        choices=trials.FRAMEWORKS,
        default=trials.FRAMEWORKS,
        help="for --framework-kills; those that are not installed are left out, and the tally says so",
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument(
        "--scenarios", nargs="*", choices=names, default=names, help="for --each-call and --crash-states"
    )
    parser.add_argument(
        "--transports", nargs="*", choices=("sockets", "nixl"), default=["sockets"], help="for --host-kills"
    )
    parser.add_argument(
        "--host-flips", type=float, default=0.3, help="of the --host-kills, how many with bytes changed"
    )
    parser.add_argument(
        "--host-stops", type=float, default=0.3, help="of the --host-kills, how many with workers stopped"
    )
    parser.add_argument(
        "--file-systems",
        nargs="*",
        choices=FILE_SYSTEMS,
        default=FILE_SYSTEMS,
        help="for --power-cuts and --cache-cuts; without root, mkfs or loop devices they are left out, and the tally"
        " says so",
    )
    parser.add_argument(
        "--mount-options", default="", help="of all --file-systems; with barrier=0 ext4 loses data in --cache-cuts"
    )
    parser.add_argument(
        "--each-call-share", type=float, default=1.0, help="of the places of --each-call, chosen at random"
    )
    parser.add_argument(
        "--hours",
        type=float,
        help="repeat a tenth of everything, or what is named, with a new seed each time; stop at the first fault, keep"
        " its files, and say how to replay it",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to write; by default the folder for temporary files")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    args.options = [
        f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in vars(args).items()
        if name not in ("hours", "seed", "json", *map(_of, _KINDS)) and value != parser.get_default(name)
    ]
    are_named = any(getattr(args, _of(name), 0) for name in _KINDS)
    for name, (count, _) in _KINDS.items():
        setattr(args, _of(name), getattr(args, _of(name), 0 if are_named else count))

    logging.getLogger("asyncckpt").setLevel(logging.CRITICAL)  # thousands of saves are about to fail
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # the judge has one process
    if args.power_cuts or args.cache_cuts or args.launcher_kills:
        own_mounts()
    tally, begun = Tally(), time.monotonic()
    if args.hours is None:
        took = _torture_in_folder(args, tally)
    else:
        took = {}
        if not are_named:
            _make_small(args)
        while not tally.losses and time.monotonic() < begun + 3600 * args.hours:
            _repeat(args, tally)
            args.seed += 1

    rows: list[tuple[str, object]] = sorted(tally.counts.items())
    rows += [(name, f"{value:.1f}") for name, value in sorted(tally.waits.items())]
    rows += [(name, f"{value:.3f}") for name, value in took.items()]
    if "hosts_load_s" in took:
        rows.append(
            ("restart from another host, / (memcpy + loopback)", f"{took['hosts_load_s'] / took['hosts_limit_s']:.2f}")
        )
    if "load_s" in took:
        rows.append(("restart from memory, of memcpy speed", f"{took['memcpy_s'] / took['load_s']:.2f}"))
        rows.append(
            ("the same, of a memcpy out of attached memory", f"{took['memcpy_attached_s'] / took['load_s']:.2f}")
        )
    rows.append(("longest wait of a save, s", f"{tally.longest_s:.1f}"))
    rows += [("minutes", f"{(time.monotonic() - begun) / 60:.1f}"), ("LOST", len(tally.losses))]
    print(tabulate(rows, tablefmt="github"))
    for loss in tally.losses:
        print(f"LOST: {loss}")
    if args.json is not None:
        facts = {
            **tally.counts,
            **tally.waits,
            **took,
            "longest_s": tally.longest_s,
            "seed": args.seed,
            "losses": tally.losses,
        }
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if tally.losses else 0


def _of(kind: str) -> str:
    return kind.replace("-", "_")


def _make_small(args: argparse.Namespace) -> None:
    """Choose a tenth of everything, and no timed restarts."""
    for name in _KINDS:
        setattr(args, _of(name), -(-getattr(args, _of(name)) // 10))
    args.each_call, args.each_call_share = len(each_call.ERRORS), 0.01
    args.options.append(f"--each-call-share {args.each_call_share}")
    args.restart_mib = args.host_restart_mib = 0


def _repeat(args: argparse.Namespace, tally: Tally) -> None:
    """Torture each kind by itself, until one loses something. Add the command for a replay."""
    for name in _KINDS:
        if not (count := getattr(args, _of(name))):
            continue
        alone = argparse.Namespace(**{**vars(args), **{_of(each): 0 for each in _KINDS}, _of(name): count})
        _torture_in_folder(alone, tally)
        tally.counts["repeated kinds"] += 1
        if tally.losses:
            options = [f"--{name} {count}", f"--seed {args.seed}", *args.options]
            tally.losses.append(f"replay it by: python scripts/torture {' '.join(options)}")
            return


def _torture_in_folder(args: argparse.Namespace, tally: Tally) -> dict[str, float]:
    """Torture in a new folder. With ``--hours`` the folder stays if something is lost."""
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="asyncckpt-torture-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        os.environ[FOLDER_VARIABLE] = str(folder / "runtime")
        os.environ[MARK] = str(folder)
        took = _torture(args, tally, folder)
        leftovers.check_left(tally, folder / "runtime")
        if tally.losses and args.hours is not None:
            stack.pop_all()
            tally.losses.append(f"what is left of it is in {folder}")
    return took


def _torture(args: argparse.Namespace, tally: Tally, folder: Path) -> dict[str, float]:
    """Run all kinds. Each kind has its own random choices, so that it can be replayed without the others."""

    def choice(kind: str) -> random.Random:
        return random.Random(f"{args.seed} {kind}")

    for ranks, count in ((1, args.kills - args.kills // 2), (2, args.kills // 2)):
        if count:
            kills.kill_trainers(tally, str(folder), count, choice(f"trainers {ranks}"), ranks)
            kills.kill_workers(tally, str(folder), count, choice(f"workers {ranks}"), ranks)
    if args.interruptions:
        interruptions.interrupt(tally, folder, args.interruptions, choice("interruptions"))
    if args.calls:
        system_calls.fail_calls(tally, folder, args.calls, choice("calls"))
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in args.scenarios]
    if args.each_call:
        each_call.fail_each(tally, folder, args.each_call, scenarios, choice("each call"), args.each_call_share)
    if args.forks:
        forks.fork(tally, folder, args.forks, choice("forks"))
    if args.damages:
        damages.damage(tally, folder, args.damages, choice("damages"))
    if args.exchanges:
        damages.exchange(tally, folder, args.exchanges, choice("exchanges"))
    if args.links:
        links.break_links(tally, folder, args.links, choice("links"))
    if args.store:
        stores.torture_store(tally, folder, args.store, choice("store"))
    if args.full:
        disks.fill_disks(tally, folder, args.full, choice("disks"))
    if args.crash_states:
        crash_states.crash_states(tally, folder, args.crash_states, choice("crash states"), scenarios)
    if args.launcher_kills:
        launchers.kill_in_launchers(tally, folder, args.launcher_kills, choice("launchers"))
    for name in args.frameworks if args.framework_kills else ():
        trials.kill_trainings(tally, folder, args.framework_kills, choice(name), name)
    if args.host_kills:
        for transport in args.transports:
            chosen = choice(f"hosts {transport}")
            shares = hosts.Shares(args.host_flips, args.host_stops)
            hosts.kill_hosts(tally, folder, args.host_kills, chosen, transport, shares)
    for file_system in args.file_systems:
        for rounds, caches in ((args.power_cuts, False), (args.cache_cuts, True)):
            if rounds:
                power_cuts.cut_power(tally, folder, rounds, args.seed, file_system, args.mount_options, caches=caches)
    took: dict[str, float] = {}
    if args.restart_mib:
        took = restarts.time_restarts(folder, 5, args.restart_mib << 20)
    if args.host_restart_mib:
        took |= host_restarts.time_host_restarts(folder, 5, args.host_restart_mib << 20)
    return took
