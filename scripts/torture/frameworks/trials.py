"""Kill trainings of frameworks, and let the framework resume them. This is the entry point for the script."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from torture.frameworks.run import Runs
from torture.jobs import Job
from torture.tally import Tally


class _Place(NamedTuple):
    """The module of a kind of training, and its requirements."""

    module: str
    name: str
    needs: tuple[str, ...] = ()
    """Modules that must be installed."""
    peers: tuple[str, ...] = ()
    """Prefixes of folder names that ``scripts/peers.sh`` must have unpacked."""
    python: tuple[int, int] = (3, 10)
    torch: tuple[int, int] = (2, 6)


_HUGGINGFACE, _LIGHTNING = ("transformers", "accelerate", "safetensors"), ("lightning",)
_TORCHTITAN = ("torchtitan-", "torchdata-", "spmd-types-", "tyro-", "docstring-parser-", "typeguard-")
_DEEPSPEED = ("deepspeed-", "hjson-", "py-cpuinfo-", "einops-", "msgpack-")
_VERL = ("transformers", "accelerate")
_KINDS = {
    "huggingface": _Place("torture.frameworks.huggingface", "KIND", _HUGGINGFACE),
    "huggingface-ranks": _Place("torture.frameworks.huggingface", "TWO_RANKS", _HUGGINGFACE),
    "lightning": _Place("torture.frameworks.lightning", "KIND", _LIGHTNING),
    "lightning-sharded": _Place("torture.frameworks.lightning", "SHARDED", _LIGHTNING),
    # torchtitan 0.3 needs this Python, and a torch of the same age.
    "torchtitan": _Place("torture.frameworks.torchtitan", "KIND", (), _TORCHTITAN, (3, 11), (2, 13)),
    # FSDP2 of torch 2.6 does not train on a CPU.
    "verl": _Place("torture.frameworks.verl", "KIND", _VERL, ("verl-0.9", "torchdata-"), torch=(2, 7)),
    "verl-replay": _Place("torture.frameworks.verl", "REPLAY", _VERL, ("verl-0.9", "torchdata-"), torch=(2, 7)),
    "verl-veomni": _Place("torture.frameworks.verl", "VEOMNI", _VERL, ("verl-0.9", "torchdata-"), torch=(2, 7)),
    "verl-megatron": _Place(
        "torture.frameworks.verl", "MEGATRON", _VERL, ("verl-0.9", "torchdata-", "megatron-core-"), torch=(2, 7)
    ),
    "verl-torchtitan": _Place(
        "torture.frameworks.verl", "TORCHTITAN", _VERL, ("verl-0.9", *_TORCHTITAN), (3, 11), (2, 13)
    ),
    "deepspeed": _Place("torture.frameworks.deepspeed", "KIND", (), _DEEPSPEED),
    "deepspeed-sharded": _Place("torture.frameworks.deepspeed", "SHARDED", (), _DEEPSPEED),
    "torch-checkpointing": _Place(
        "torture.frameworks.torch_checkpointing", "KIND", (), ("torch-checkpointing-",), torch=(2, 11)
    ),
}
FRAMEWORKS = tuple(_KINDS)
"""The names of all kinds of training."""

_PEERS = Path(sys.prefix, "peers")
_TESTS = Path(__file__).parents[3] / "tests"
# Maximum time without a message from a run. A run has several trainings, each with a limit of its own.
_SILENCE_S = 900.0
# Maximum number of runs for each kill. Some runs end before a kill.
_MOST_RUNS = 5


def kill_trainings(tally: Tally, folder: Path, kills: int, choice: random.Random, name: str) -> None:
    """Kill trainings of the kind ``name`` ``kills`` times. Only count the kind if it is not installed."""
    if not _is_installed(name):
        tally.counts[f"{name}: not installed, no kills"] += 1
        return
    job = Job(1, _run, name, str(folder / name), kills, choice.randrange(1 << 30))
    with job, tqdm(total=kills, desc=f"kills of {name}", unit="kill", disable=None) as bar:
        pipe = job.pipes[0]
        try:
            while pipe.poll(_SILENCE_S):
                kind, *said = pipe.recv()
                if kind == "ended":
                    return
                if kind == "error":
                    tally.lose(f"{name}: {said[0]}")
                    return
                if kind == "lost":
                    tally.lose(f"{name}, {said[0]}")
                elif said[1]:
                    tally.counts[f"{name}: {said[0]}"] += said[1]
                    bar.update(said[1] if said[0].startswith("kills of ") else 0)
            tally.lose(f"{name}: nothing was heard for {_SILENCE_S:g} s")
        except (EOFError, ConnectionResetError):
            tally.lose(f"{name}: the process that starts the ranks has died")


def _is_installed(name: str) -> bool:
    place = _KINDS[name]
    is_of_its_time = sys.version_info >= place.python and _torch_version() >= place.torch
    is_there = all(importlib.util.find_spec(each) is not None for each in place.needs)
    return is_of_its_time and is_there and all(any(_PEERS.glob(f"{each}*")) for each in place.peers)


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def _run(pipe: Connection, rank: int, name: str, folder: str, kills: int, seed: int) -> None:
    """Run trainings in a process that imports the framework and starts no thread, because it forks the ranks."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    place, choice, killed = _KINDS[name], random.Random(seed), 0
    # The trainings and stand-ins of the tests are on the path, too.
    sys.path[:0] = [str(_TESTS), *(str(each) for prefix in place.peers for each in _PEERS.glob(f"{prefix}*"))]
    runs = Runs(getattr(importlib.import_module(place.module), place.name), Path(folder), choice, pipe.send)
    for number in range(_MOST_RUNS * kills):
        if killed >= kills:
            break
        killed += runs.one(number, min(kills - killed, choice.randint(1, 4)))
    else:
        runs.say(("lost", f"there were only {killed} kills in {number + 1} runs"))
    pipe.send(("ended",))
